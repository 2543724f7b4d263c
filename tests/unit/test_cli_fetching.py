"""The commands that reach out, run as a user runs them, against servers on loopback."""

import io
import json
import pickle
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from safeload import cli
from safeload.cli import fetching
from safeload.cli.output import Output
from safeload.errors import Finding
from safeload.fetching.fetch import FetchEvent
from safeload.fetching.quarantine import Quarantine
from safeload.fetching.sources import HUB_ENDPOINT
from safeload.sizes import human_size
from tests.nginx_server import NGINX, NO_NGINX, running
from tests.range_server import HOST, RangeServer, serving

HOSTILE = b"cos\nsystem\n(S'true'\ntR."
PRIVATE = ("--allow-private", HOST)


class Done(NamedTuple):
    """What one run of the command gave."""

    code: int
    stdout: str
    stderr: str

    @property
    def last(self) -> str:
        return self.stdout.splitlines()[-1]

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.stdout.splitlines()]


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str | Path) -> Done:
        capsys.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving() as state:
        yield state


def shard(fill: int = 1, n: int = 300_000) -> bytes:
    return pickle.dumps({"w": np.full((3, n // 3), fill, np.int8)})


# --- scan and inspect -------------------------------------------------------------------------------------------------


def test_scan_of_a_url_says_what_it_did_not_check(run: Run, server: RangeServer) -> None:
    server.files["/f"] = shard()
    done = run("scan", f"{server.url}/f", *PRIVATE)
    assert (done.code, done.last) == (0, "accepted")
    assert "no digest was checked" in done.stdout
    assert "of 293.1 KiB" in done.stdout
    assert server.nbytes < 100_000


def test_scan_of_a_hostile_url_is_a_rejection(run: Run, server: RangeServer) -> None:
    server.files["/f"] = HOSTILE
    done = run("scan", f"{server.url}/f", *PRIVATE)
    assert done.code == 1
    assert done.last == f"rejected: global-not-allowed in {server.url}/f"
    assert "safeload explain" not in done.stderr


def test_scan_takes_paths_and_urls_together(run: Run, server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(shard())
    server.files["/there"] = HOSTILE
    done = run("scan", f"{server.url}/there", tmp_path / "here", *PRIVATE, "--json")
    (report,) = done.lines
    assert done.code == 1
    assert [(Path(file["path"]).name, file["verdict"]) for file in report["files"]] == [
        ("here", "accepted"),
        ("there", "rejected"),
    ]
    assert report["remote"]["digests_checked"] is False


def test_inspect_of_a_url_shows_its_tensors(run: Run, server: RangeServer) -> None:
    server.files["/f"] = shard()
    done = run("inspect", f"{server.url}/f", *PRIVATE)
    assert done.code == 0
    assert "3x100000" in done.stdout


def test_inspect_of_a_repository(run: Run, server: RangeServer) -> None:
    commit = "c" * 40
    server.pages["/api/models/org/name/revision/v1"] = ({"sha": commit}, None)
    tree = [{"type": "file", "path": "a", "size": len(shard())}]
    server.pages[f"/api/models/org/name/tree/{commit}?recursive=true"] = (tree, None)
    server.files[f"/org/name/resolve/{commit}/a"] = shard()
    done = run("inspect", "hf://org/name@v1", "--hf-endpoint", server.url, *PRIVATE, "--json")
    (report,) = done.lines
    assert done.code == 0
    assert report["remote"]["sources"][0]["commit"] == commit
    assert [tensor["shape"] for file in report["files"] for tensor in file["tensors"]] == [[3, 100_000]]


def test_an_endpoint_that_is_no_url_is_told(run: Run) -> None:
    done = run("scan", "hf://org/name", "--hf-endpoint", "ftp://hub.example")
    assert done.code == 2
    assert "expected a URL such as https://" in done.stderr


def test_a_private_address_that_was_not_named_is_no_verdict(run: Run, server: RangeServer) -> None:
    done = run("scan", f"{server.url}/f")
    assert done.code == 2
    assert "--allow-private" in done.stderr
    assert server.requests == []


def test_plain_http_needs_to_be_named(run: Run) -> None:
    done = run("scan", "http://192.0.2.1/f")
    assert done.code == 2
    assert "--allow-http 192.0.2.1" in done.stderr


def test_digests_of_what_is_elsewhere_are_refused(run: Run, server: RangeServer) -> None:
    done = run("scan", f"{server.url}/f", "--digest", *PRIVATE)
    assert done.code == 2
    assert "--digest" in done.stderr
    assert server.requests == []


def test_a_token_comes_from_a_file(run: Run, server: RangeServer, tmp_path: Path) -> None:
    server.files["/f"] = shard()
    (tmp_path / "token").write_text("hf_abc\n")
    assert run("scan", f"{server.url}/f", "--token-file", tmp_path / "token", *PRIVATE).code == 0
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer hf_abc"}


def test_what_lies_here_is_scanned_without_an_http_client(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(shard())
    code = (
        "import sys\nfrom safeload import cli\n"
        f"assert cli.main(['scan', {str(tmp_path)!r}]) == 0\nassert cli.main(['--help']) == 0\n"
        "assert not {'httpx', 'httpcore', 'ssl', 'fsspec', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_endpoint_that_help_shows_is_the_one_that_is_asked() -> None:
    assert fetching.DEFAULT_ENDPOINT == HUB_ENDPOINT


# --- quarantine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path: Path) -> tuple[Path, str]:
    """A directory with one item in its quarantine, and the item's name."""
    target = tmp_path / "ckpt"
    record = Quarantine(target).add(
        "sub/\x1b[2Jevil",
        mirrors=["https://mirror.example/x"],
        findings=[Finding("global-not-allowed", "expected a harmless global, found os.system")],
        expected="a" * 64,
        found="b" * 64,
        move=lambda place: place.write_bytes(HOSTILE),
    )
    return target, record.id


def test_quarantine_lists_and_shows_without_obeying_a_name(run: Run, refused: tuple[Path, str]) -> None:
    target, item = refused
    done = run("quarantine", "list", target)
    assert done.code == 0
    assert item in done.stdout
    assert "global-not-allowed" in done.stdout
    shown = run("quarantine", "show", target, item)
    assert "https://mirror.example/x" in shown.stdout
    assert f"sha256:{'a' * 64}" in shown.stdout
    assert "found os.system" in shown.stdout
    assert "\x1b" not in done.stdout + shown.stdout
    assert r"\x1b[2Jevil" in shown.stdout


def test_quarantine_speaks_json(run: Run, refused: tuple[Path, str]) -> None:
    target, item = refused
    (listed,) = run("quarantine", "list", target, "--json").lines
    assert [entry["id"] for entry in listed["items"]] == [item]
    (shown,) = run("quarantine", "show", target, item, "--json").lines
    assert shown["found"] == "b" * 64
    assert Path(shown["content"]).read_bytes() == HOSTILE


def test_quarantine_is_for_its_owner_alone(run: Run, refused: tuple[Path, str]) -> None:
    target, item = refused
    place = Path(run("quarantine", "show", target, item, "--json").lines[0]["content"])
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place, place.parent, place.parent.parent)] == [
        0o600,
        0o700,
        0o700,
    ]


def test_purge_removes_what_is_named(run: Run, refused: tuple[Path, str]) -> None:
    target, item = refused
    assert run("quarantine", "purge", target).code == 2
    assert run("quarantine", "purge", target, item, "--all").code == 2
    assert run("quarantine", "purge", target, "../ckpt").code == 2
    assert run("quarantine", "list", target, "--json").lines[0]["items"] != []
    done = run("quarantine", "purge", target, item)
    assert (done.code, done.last) == (0, "removed 1 item")
    assert run("quarantine", "list", target).last.startswith("nothing is in quarantine")


def test_purge_all_leaves_nothing_behind(run: Run, refused: tuple[Path, str], tmp_path: Path) -> None:
    assert run("quarantine", "purge", refused[0], "--all").code == 0
    assert list(tmp_path.iterdir()) == []


# --- fetch ------------------------------------------------------------------------------------------------------------


class Signed(NamedTuple):
    """A checkpoint that somebody signed, and what `fetch` needs to know of it."""

    folder: Path
    options: tuple[str | Path, ...]
    files: dict[str, bytes]


@pytest.fixture
def signed(run: Run, tmp_path: Path) -> Signed:
    folder = tmp_path / "published"
    (folder / "sub").mkdir(parents=True)
    files = {"one": shard(1), "sub/two": shard(2), "config.json": b"{}"}
    for path, data in files.items():
        (folder / path).write_bytes(data)
    key, manifest = tmp_path / "key", tmp_path / "manifest.json"
    assert run("keygen", "-o", key, "--no-passphrase").code == 0
    assert run("sign", folder, "--key", key, "-o", manifest).code == 0
    return Signed(folder, ("-m", manifest, "--trust", f"{key}.pub"), files)


def serve(server: RangeServer, files: dict[str, bytes]) -> str:
    server.files.update({f"/ckpt/{path}": data for path, data in files.items()})
    return f"{server.url}/ckpt"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fetch_brings_what_was_signed(run: Run, server: RangeServer, signed: Signed, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    done = run("fetch", serve(server, signed.files), target, *signed.options, *PRIVATE)
    assert (done.code, done.last) == (0, "accepted")
    assert contents(target) == signed.files
    nbytes = human_size(sum(map(len, signed.files.values())))
    assert f"fetched   {nbytes}, 0 B were there already" in done.stdout
    assert f"from      {server.url}/ckpt: {nbytes}" in done.stdout
    assert "--history" in done.stdout
    assert run("verify", target, *signed.options).code == 0


def test_fetch_from_a_directory(run: Run, signed: Signed, tmp_path: Path) -> None:
    assert run("fetch", signed.folder, tmp_path / "ckpt", *signed.options).code == 0
    assert contents(tmp_path / "ckpt") == signed.files


def test_fetch_from_a_repository(run: Run, server: RangeServer, signed: Signed, tmp_path: Path) -> None:
    server.files.update({f"/org/name/resolve/v1/{path}": data for path, data in signed.files.items()})
    (tmp_path / "token").write_text("hf_abc")
    reach = ("--hf-endpoint", server.url, "--token-file", tmp_path / "token", *PRIVATE)
    assert run("fetch", "hf://org/name@v1", tmp_path / "ckpt", *signed.options, *reach).code == 0
    assert contents(tmp_path / "ckpt") == signed.files
    assert {headers["authorization"] for _, _, headers in server.requests} == {"Bearer hf_abc"}


def test_a_mirror_gets_no_token_and_its_lies_are_told(
    run: Run, server: RangeServer, signed: Signed, tmp_path: Path
) -> None:
    lies = {path: bytes(len(data)) for path, data in signed.files.items()}
    (tmp_path / "token").write_text("hf_abc")
    with serving() as honest:
        done = run(
            *("fetch", serve(server, lies), tmp_path / "ckpt", "--mirror", serve(honest, signed.files)),
            *(*signed.options, *PRIVATE, "--token-file", tmp_path / "token"),
        )
        assert done.code == 0
        assert contents(tmp_path / "ckpt") == signed.files
        assert {headers.get("authorization") for _, _, headers in honest.requests} == {None}
    assert {headers.get("authorization") for _, _, headers in server.requests} == {"Bearer hf_abc"}
    assert "wrong piece" in done.stdout
    assert f" from {server.url}/ckpt" in done.stderr


def test_a_token_is_for_the_sources_host_however_its_scheme_is_spelled(
    run: Run, server: RangeServer, signed: Signed, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("hf_abc")
    with serving() as hub:
        done = run(
            *("fetch", serve(server, signed.files).replace("http:", "HTTP:"), tmp_path / "ckpt"),
            *("--mirror", "hf://org/name", "--hf-endpoint", hub.url, "--token-file", tmp_path / "token"),
            *(*signed.options, *PRIVATE),
        )
        assert done.code == 0
        assert {headers.get("authorization") for _, _, headers in hub.requests} <= {None}
    assert {headers.get("authorization") for _, _, headers in server.requests} == {"Bearer hf_abc"}


@pytest.mark.parametrize("unsigned", [False, True])
def test_ctrl_c_ends_a_fetch_from_a_server_that_says_nothing(signed: Signed, tmp_path: Path, unsigned: bool) -> None:
    with socket.create_server((HOST, 0)) as silent:
        url = f"http://{HOST}:{silent.getsockname()[1]}/x"
        more = ["--unsigned"] if unsigned else [str(option) for option in signed.options]
        command = [sys.executable, "-m", "safeload", "fetch", url, str(tmp_path / "ckpt"), *more, *PRIVATE]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
            silent.accept()[0],
        ):
            before = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=60)
    assert time.monotonic() - before < 5  # and not the half minute that a server may take
    assert (process.returncode, told) == (2, "safeload: interrupted\n")
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("kind", ["piece", "kept"])
def test_ctrl_c_says_that_what_arrived_is_kept(
    run: Run, signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def interrupted(*_: object, watch: Callable[[FetchEvent], None], **__: object) -> None:
        watch(FetchEvent(kind, "one", done=100, size=200))
        raise KeyboardInterrupt

    monkeypatch.setattr("safeload.fetching.fetch.fetch_and_report", interrupted)
    done = run("fetch", signed.folder, tmp_path / "new", *signed.options)
    assert done.code == 2
    assert done.stderr.splitlines()[-1] == "safeload: interrupted"
    assert ("the same command goes on from there" in done.stderr) == (kind == "piece")


def test_ctrl_c_ends_a_fetch_that_waits_for_the_bandwidth(run: Run, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one").write_bytes(shard(n=3_000_000))
    before = time.monotonic()
    threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
    done = run("fetch", tmp_path / "source", tmp_path / "ckpt", "--unsigned", "--bandwidth", "10KB")
    assert done.code == 2
    assert time.monotonic() - before < 10  # one piece takes more than a minute
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_that_only_lies_is_a_rejection_and_leaves_nothing(
    run: Run, server: RangeServer, signed: Signed, tmp_path: Path
) -> None:
    lies = {**signed.files, "one": shard(7)}
    done = run("fetch", serve(server, lies), tmp_path / "ckpt", *signed.options, *PRIVATE, "--json")
    report = done.lines[-1]
    assert done.code == 1
    assert report["verdict"] == "rejected"
    assert "digest-mismatch" in {finding["code"] for file in report["files"] for finding in file["findings"]}
    assert not (tmp_path / "ckpt").exists()


def test_a_refused_file_is_found_in_quarantine(run: Run, signed: Signed, tmp_path: Path) -> None:
    # Signed as it is, and not what the stricter policy of whoever fetches it allows.
    done = run("fetch", signed.folder, tmp_path / "ckpt", *signed.options, "--policy", "grok-1")
    assert done.code == 1
    assert f"safeload quarantine list {tmp_path / 'ckpt'}" in done.stdout
    assert not (tmp_path / "ckpt").exists()
    items = run("quarantine", "list", tmp_path / "ckpt", "--json").lines[0]["items"]
    assert "one" in {item["path"] for item in items}


def test_a_source_that_is_not_there_is_no_verdict(
    run: Run, server: RangeServer, signed: Signed, tmp_path: Path
) -> None:
    done = run("fetch", f"{server.url}/nothing", tmp_path / "ckpt", *signed.options, *PRIVATE, "--json")
    assert done.code == 2
    assert done.lines[-1]["verdict"] == "none"
    assert not (tmp_path / "ckpt").exists()


def test_json_is_one_event_a_line_and_the_report_last(
    run: Run, server: RangeServer, signed: Signed, tmp_path: Path
) -> None:
    done = run("fetch", serve(server, signed.files), tmp_path / "ckpt", *signed.options, *PRIVATE, "--json")
    *events, report = done.lines
    assert done.code == 0
    assert report["verdict"] == "accepted"
    assert {event["path"] for event in events if event["event"] == "file"} == signed.files.keys()
    assert events[-1]["event"] == "published"
    assert done.stderr == ""


def test_a_dry_run_asks_nobody_and_writes_nothing(
    run: Run, server: RangeServer, signed: Signed, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = run("fetch", serve(server, signed.files), tmp_path / "ckpt", *signed.options, "--dry-run")
    assert (done.code, done.last) == (0, f"would fetch 3 files, {human_size(sum(map(len, signed.files.values())))}")
    assert server.requests == []
    assert sorted(tmp_path.rglob("*")) == before
    (plan,) = run("fetch", signed.folder, tmp_path / "ckpt", *signed.options, "--dry-run", "--json").lines
    assert plan["plan"]["bytes"] == sum(map(len, signed.files.values()))
    assert {file["path"] for file in plan["plan"]["missing"]} == signed.files.keys()


def test_incremental_completes_a_directory(run: Run, server: RangeServer, signed: Signed, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    target.mkdir()
    (target / "one").write_bytes(signed.files["one"])
    url = serve(server, signed.files)
    assert run("fetch", url, target, *signed.options, *PRIVATE).code == 2
    done = run("fetch", url, target, *signed.options, *PRIVATE, "--incremental")
    assert done.code == 0
    assert contents(target) == signed.files
    assert "/ckpt/one" not in server.paths()


def test_reuse_takes_what_is_unchanged(run: Run, server: RangeServer, signed: Signed, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "one").write_bytes(signed.files["one"])
    done = run("fetch", serve(server, signed.files), tmp_path / "ckpt", *signed.options, *PRIVATE, "--reuse", old)
    assert done.code == 0
    assert contents(tmp_path / "ckpt") == signed.files
    assert "/ckpt/one" not in server.paths()


@pytest.mark.skipif(NGINX is None, reason=NO_NGINX)
def test_fetch_from_nginx_of_which_a_part_serves_no_ranges(run: Run, tmp_path: Path) -> None:
    with running(tmp_path) as url:
        # Two chunks, so that the second one takes a range.
        (tmp_path / "www" / "big").write_bytes(shard(3, 18_000_000))
        (tmp_path / "www" / "config.json").write_bytes(b"{}")
        assert run("keygen", "-o", tmp_path / "key", "--no-passphrase").code == 0
        assert run("sign", tmp_path / "www", "--key", tmp_path / "key", "-o", tmp_path / "m.json").code == 0
        target = tmp_path / "ckpt"
        signed = ("-m", tmp_path / "m.json", "--trust", tmp_path / "key.pub")
        done = run("fetch", f"{url}/whole", target, "--mirror", url, *signed, *PRIVATE, "--json")
    assert done.code == 0
    assert contents(target) == contents(tmp_path / "www")
    whole, ranged = done.lines[-1]["fetch"]["mirrors"]
    assert ranged["failures"] == 0
    assert whole["wrong_pieces"] == ranged["wrong_pieces"] == 0
    assert ranged["bytes"] > 0


def test_what_was_expected_is_held_against_the_manifest(run: Run, signed: Signed, tmp_path: Path) -> None:
    done = run("fetch", signed.folder, tmp_path / "ckpt", *signed.options, "--revision", "other")
    assert done.code == 1
    assert done.last.startswith("rejected: revision-mismatch")
    assert not (tmp_path / "ckpt").exists()


def test_bandwidth_is_bounded(run: Run, signed: Signed, tmp_path: Path) -> None:
    started = time.monotonic()
    assert run("fetch", signed.folder, tmp_path / "ckpt", *signed.options, "--bandwidth", "1MB").code == 0
    assert time.monotonic() - started > 0.3
    assert run("fetch", signed.folder, tmp_path / "ckpt2", *signed.options, "--bandwidth", "fast").code == 2


@pytest.mark.parametrize(
    "options", [(), ("-m", "manifest.json"), ("--unsigned", "-m", "m"), ("--unsigned", "--pin", "sha256:x")]
)
def test_fetch_says_what_it_needs(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run("fetch", tmp_path, tmp_path / "ckpt", *options)
    assert done.code == 2
    assert "--unsigned" in done.stderr


def test_unsigned_goes_into_quarantine_and_says_so(run: Run, server: RangeServer, tmp_path: Path) -> None:
    server.files["/x/hostile.pkl"] = HOSTILE
    target = tmp_path / "ckpt"
    done = run("fetch", f"{server.url}/x/hostile.pkl", target, "--unsigned", *PRIVATE)
    assert (done.code, done.last) == (0, "unsigned: quarantined")
    assert "rejected: global-not-allowed" in done.stdout
    assert not target.exists()
    (item,) = run("quarantine", "list", target, "--json").lines[0]["items"]
    assert (item["path"], item["unsigned"], item["expected"]) == ("hostile.pkl", True, None)
    shown = run("quarantine", "show", target, item["id"])
    assert "unsigned: nobody said" in shown.stdout


def test_unsigned_json_and_dry_run(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "one").write_bytes(shard())
    plan = run("fetch", source, tmp_path / "ckpt", "--unsigned", "--dry-run")
    assert plan.last == "would fetch 1 file, 293.1 KiB"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    (report,) = run("fetch", source, tmp_path / "ckpt", "--unsigned", "--json").lines
    assert report["verdict"] == "unsigned"
    assert [item["path"] for item in report["items"]] == ["one"]


def test_an_unsigned_fetch_cannot_be_loaded_or_verified(run: Run, signed: Signed, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    assert run("fetch", signed.folder, target, "--unsigned").code == 0
    for command in ("load", "verify"):
        assert run(command, target, *signed.options).code == 2
        assert run(command, target.parent / ".ckpt.quarantine", *signed.options).code == 1


# --- what is shown meanwhile ------------------------------------------------------------------------------------------


def test_a_line_says_how_far_how_fast_and_how_long() -> None:
    line = fetching.progress_line(3, 3 << 30, 10 << 30, 20.0, 2 << 30)
    assert line == "3 files complete, 3.0 GiB of 10.0 GiB, 102.4 MiB/s, 0:01:10 left"
    assert fetching.progress_line(1, 5, 10, 10.0, 0) == "1 file complete, 5 B of 10 B"
    assert fetching.progress_line(1, 5, 10, 0.0, 5) == "1 file complete, 5 B of 10 B"


def watched_line(events: Sequence[FetchEvent], *, done: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return what is said after 20 s, of which an event took one each."""
    now = 0.0
    with fetching._Watcher(Output(), clock=lambda: now) as watcher:
        watcher.progress("fetching", 0, 100_000)
        for second, event in enumerate(events, 1):
            now = float(second)
            watcher.watch(event)
            watcher.progress("fetching", 1, 100_000)
        now = 20.0
        watcher.progress("fetching", done, 100_000)
    return capsys.readouterr().err.splitlines()[-1]


def test_what_was_there_makes_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    kept = [FetchEvent("kept", "a", done=309, size=309), FetchEvent("kept", "b", done=50_000, size=60_000)]
    line = watched_line(kept, done=50_309, capsys=capsys)
    assert line == "safeload: 1 file complete, 49.1 KiB of 97.7 KiB"


def test_the_rate_is_that_of_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        FetchEvent("kept", "b", done=50_000, size=60_000),
        FetchEvent("piece", "b", done=54_096, size=60_000),
        FetchEvent("piece", "b", done=52_048, size=60_000),  # two threads may tell of theirs in another order
        FetchEvent("piece", "b", done=58_192, size=60_000),
        FetchEvent("file", "c", done=2048, size=2048),  # of a file without pieces
    ]
    # Nothing came within the first second; 8 KiB and 2 KiB did within the 19 that followed.
    line = watched_line(events, done=60_240, capsys=capsys)
    assert line == "safeload: 1 file complete, 58.8 KiB of 97.7 KiB, 538 B/s, 0:01:14 left"


def test_without_a_terminal_a_line_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with fetching._Watcher(Output(), clock=lambda: now) as watcher:
        for second in range(25):
            now = float(second)
            watcher.progress("fetching", second * 1000, 100_000)
        for name in "abc":
            watcher.watch(FetchEvent("retry", name, mirror="https://m", message="was slow"))
        watcher.watch(FetchEvent("wrong-bytes", "a\x1b[2J", mirror="https://m", message="lied"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[1] for line in lines[:2]] == [" 9.8 KiB of 97.7 KiB", " 19.5 KiB of 97.7 KiB"]
    # Whoever waits learns why, and not from a thousand lines.
    assert lines[2:] == ["safeload: https://m: a: was slow", r"safeload: https://m: a\x1b[2J: lied"]


def test_on_a_terminal_there_is_a_bar_for_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    bars = fetching._Bars()
    with bars:
        bars.total("fetching", 10, 100, 0)
        bars.file(FetchEvent("piece", "a/very/long/" + "x" * 40 + "/[bold]name\x1b[2J", done=5, size=10))
        bars.file(FetchEvent("piece", "b", done=5, size=10))
        assert len(bars._files) == 2
        described = [task.description for task in bars._rich.tasks]
        drawn = io.StringIO()
        Console(file=drawn, width=200).print(bars._rich.get_renderable())
        bars.file(FetchEvent("file", "b", done=10, size=10))
        assert len(bars._files) == 1
        for index in range(20):
            bars.file(FetchEvent("piece", f"c{index}", done=1, size=10))
        assert len(bars._files) == 8
    assert "[bold]name" in drawn.getvalue()
    assert "\x1b" not in drawn.getvalue()
    assert described[0] == "fetching"
    assert described[1].endswith(r"[bold]name\x1b[2J")
    assert len(described[1]) == 32


def test_a_bar_has_the_rate_of_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    now = 0.0
    bars = fetching._Bars()
    monkeypatch.setattr(bars._rich, "get_time", lambda: now)
    with bars:
        bars.total("fetching", 0, 10_000, 0)
        bars.file(FetchEvent("kept", "a", done=5000, size=8000))
        for second, (done, arrived) in enumerate([(5000, 0), (5100, 100), (7200, 200), (7300, 300)], 1):
            now = float(second)
            bars.total("fetching", done, 10_000, arrived)
            bars.file(FetchEvent("piece", "a", done=5000 + arrived, size=8000))
        total, file = bars._rich.tasks
        assert (total.completed, total.speed) == (7300, 100)
        assert (file.completed, file.speed) == (5300, 100)


def test_one_that_nobody_serves_is_given_up_within_seconds(run: Run, signed: Signed, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        url = f"http://{HOST}:{taken.getsockname()[1]}/x"
    before = time.monotonic()
    done = run("fetch", url, tmp_path / "ckpt", *signed.options, *PRIVATE)
    assert time.monotonic() - before < 10
    assert done.code == 2
    assert "Connection refused" in done.stderr
    # What is told meanwhile names the URL, and once.
    (first, *_) = done.stderr.splitlines()
    assert first.count(url) == 1


def test_a_directory_without_most_files_is_asked_for_the_others_and_not_waited_for(run: Run, tmp_path: Path) -> None:
    folder, key, manifest = tmp_path / "published", tmp_path / "key", tmp_path / "manifest.json"
    folder.mkdir()
    shards = [folder / f"shard{index}" for index in range(12)]
    for path in shards:
        path.write_bytes(shard(n=3000))
    (folder / "config.json").write_bytes(b"{}")  # the smallest, and so the last that is asked for
    assert run("keygen", "-o", key, "--no-passphrase").code == 0
    assert run("sign", folder, "--key", key, "-o", manifest).code == 0
    for path in shards:
        path.unlink()
    before = time.monotonic()
    done = run("fetch", folder, tmp_path / "ckpt", "-m", manifest, "--trust", f"{key}.pub", "--connections", "1")
    assert time.monotonic() - before < 10
    assert done.code == 2
    assert "12 of 13 files could not be fetched" in done.stderr


def test_purging_what_is_empty_says_so(run: Run, tmp_path: Path) -> None:
    done = run("quarantine", "purge", tmp_path, "--all")
    assert (done.code, done.last) == (0, f"nothing is in quarantine for {tmp_path}")


@pytest.mark.parametrize("more", [("list",), ("purge", "--all")])
def test_a_quarantine_of_a_directory_that_is_not_there_is_a_wrong_path(
    run: Run, tmp_path: Path, more: tuple[str, ...]
) -> None:
    verb, *rest = more
    done = run("quarantine", verb, tmp_path / "nope", *rest)
    assert done.code == 2
    assert "and no quarantine for it" in done.stderr
