"""How fast `fetch` is while it verifies, against curl for the same file: `python -m benchmarks.bench_fetch`.

A static server of a few lines (sendfile, ranges) runs in a process of its own on loopback, and each measurement too.
`curl` writes the file and checks nothing; "curl + sync" also brings it to disk, as `fetch` does. The kinds of run
alternate, and ratios are taken of neighbors in time: on a shared machine nothing else means anything. "CPU s" is what
the client took of all processors: where that is more than curl's, others at work slow it down more. "peak" is the most
memory that the process had resident (VmHWM), code included.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import resource
import shutil
import socket
import socketserver
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

MIB = 1024 * 1024
FILE = "tensor00000_000"


def main() -> None:
    """Make the file, run each kind of run in turn, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_fetch", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the file in MiB (default 2048)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--connections", type=int, nargs="+", default=[4], help="how many to fetch with (default 4)")
    parser.add_argument("--directory", help="where to write (default: the system's place for temporary files)")
    parser.add_argument("--run", nargs=3, metavar=("KIND", "DIRECTORY", "URL"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, metavar=("DIRECTORY", "FD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve[0], int(options.serve[1]))
    elif options.run:
        kind, directory, url = options.run
        print(*run(kind, Path(directory), url))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Run everything in turn and print one table."""
    if shutil.which("curl") is None:
        print("curl is not installed: nothing to compare with")
        return
    kinds = ["curl", "curl + sync", *(f"fetch {n}" for n in options.connections)]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="safeload-bench-", dir=options.directory) as folder:
        directory = Path(folder)
        make_checkpoint(directory, options.mib * MIB)
        size = (directory / "published" / FILE).stat().st_size
        with server(directory / "published") as url:
            for round_ in range(options.rounds):
                for kind in kinds if round_ % 2 == 0 else reversed(kinds):
                    command = [sys.executable, "-m", "benchmarks.bench_fetch", "--run", kind, folder, url]
                    wall, used, peak = subprocess.run(command, check=True, capture_output=True).stdout.split()
                    times[kind].append(float(wall))
                    cpu[kind].append(float(used))
                    peaks[kind] = max(peaks.get(kind, 0), int(peak))
    print(
        f"one file of {size / MIB:.0f} MiB, {len(os.sched_getaffinity(0))} cores, {options.rounds} alternating rounds"
    )
    print("run           median s   best s   CPU s    MB/s   speed / curl   speed / curl + sync    peak")
    for kind, found in times.items():
        ratios = [
            statistics.median(base / time_ for base, time_ in zip(times[other], found, strict=True))
            for other in ("curl", "curl + sync")
        ]
        median = statistics.median(found)
        row = f"{kind:<12} {median:>9.2f} {min(found):>8.2f} {statistics.median(cpu[kind]):>7.2f}"
        row = f"{row} {size / median / 1e6:>7.0f} {ratios[0]:>14.2f}"
        print(f"{row} {ratios[1]:>21.2f} {peaks[kind] / MIB:>7.0f} MiB")


def make_checkpoint(directory: Path, nbytes: int) -> None:
    """Write a checkpoint of one file, sign it, and put manifest and key beside it."""
    import numpy as np

    from safeload.formats.pickles.writing import write_shard
    from safeload.publishing import sign
    from safeload.trust.keys import SecretKey

    published = directory / "published"
    published.mkdir()
    backing = np.memmap(directory / "values", dtype=np.float32, mode="w+", shape=(nbytes // 4,))
    block = np.random.default_rng(0).integers(0, 255, MIB, dtype=np.uint8).view(np.float32)
    for start in range(0, len(backing), len(block)):
        backing[start : start + len(block)] = block[: len(backing) - start]
        backing[start] = start  # no two chunks are alike
    with (published / FILE).open("wb") as file:
        write_shard(file, backing.view(np.ndarray))
    del backing
    (directory / "values").unlink()
    key = SecretKey.generate()
    (directory / "manifest").write_bytes(sign(published, keys=[key], model="bench/model", revision="1"))
    (directory / "key.pub").write_bytes(key.public.to_pem())


@contextlib.contextmanager
def server(directory: Path) -> Iterator[str]:
    """Serve a directory from a process of its own, and lend its URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.bench_fetch", "--serve", str(directory), str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


def serve(directory: str, fd: int) -> None:
    """Answer GET for the files of a directory until the process is ended."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with Path(directory, self.path.lstrip("/")).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                asked = self.headers.get("Range")
                start, stop = 0, size
                if asked is None:
                    self.send_response(200)
                else:
                    first, last = asked.removeprefix("bytes=").split("-")
                    start, stop = int(first), int(last) + 1
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
                self.send_header("Content-Length", str(stop - start))
                self.end_headers()
                self.wfile.flush()
                while start < stop:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class calls it that
            """Say nothing."""

    class Server(socketserver.ThreadingMixIn, HTTPServer):
        daemon_threads = True

    running = Server(("127.0.0.1", 0), Handler, bind_and_activate=False)
    running.socket.close()
    running.socket = socket.socket(fileno=fd)
    running.serve_forever()


def run(kind: str, directory: Path, url: str) -> tuple[float, float, int]:
    """Fetch once, and return wall and CPU seconds, without imports, and the peak of memory in bytes."""
    target = directory / "fetched"
    if kind.startswith("curl"):
        target.mkdir()
        file = target / FILE
        before = time.perf_counter()
        subprocess.run([shutil.which("curl") or "curl", "-s", "-f", "-o", str(file), f"{url}/{FILE}"], check=True)
        if kind.endswith("sync"):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        seconds = time.perf_counter() - before
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024
        assert file.stat().st_size == (directory / "published" / FILE).stat().st_size
    else:
        from safeload.fetching.fetch import fetch
        from safeload.fetching.sources import Access

        connections = int(kind.split()[1])
        access = Access(allow_private=frozenset({"127.0.0.1"}), connections=connections)
        before, cpu_before = time.perf_counter(), time.process_time()
        report = fetch(
            url,
            target,
            manifest=directory / "manifest",
            trust=directory / "key.pub",
            access=access,
            connections=connections,
        )
        seconds, cpu = time.perf_counter() - before, time.process_time() - cpu_before
        # Of this process alone: `ru_maxrss` begins with what the process that started it had.
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        assert report.is_accepted
        with (target / FILE).open("rb") as fetched:
            assert hashlib.file_digest(fetched, "sha256").hexdigest() == report.files[0].sha256
    shutil.rmtree(target)
    return seconds, cpu, peak


if __name__ == "__main__":
    main()
