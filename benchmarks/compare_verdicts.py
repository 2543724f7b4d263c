"""What other tools say of the same files: `python -m benchmarks.compare_verdicts [--peers BIN ...]`.

Each file is looked at alone, by each tool's own command and exit code. `passed` is an exit code that a CI job takes
for good; `refused` any that it does not, whatever the reason, with the code in brackets where it is not 1; `no file`
says that the tool saw nothing that it supports. No tool of the table runs a payload, which is asserted, and every one
is harmless: the last column loads the file, in a process and a folder of its own, and says whether it ran. Tools that
are not there are left out; `make bench-peers` installs most of them.
"""

from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from safeload.formats.pickles.writing import write_shard
from safeload.formats.safetensors_writing import write_safetensors
from safeload.records import QuantizedWeight8bit

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".venv-peers" / "bin"
OURS = Path(sys.executable).parent

SENTINEL = "the-payload-ran"
SYSTEM = f"cos\nsystem\n(S'touch {SENTINEL}'\ntR.".encode()
"""A pickle of protocol 0 that runs a program."""

IMPORTS = b"cthis\ns\n."
"""A pickle that only names something: to look that up, a module is imported, which is code as well. On no list."""


@dataclass(frozen=True, slots=True)
class Case:
    """One file.

    Attributes:
        what: What it is, for the table.
        name: What it is called.
        data: Its bytes.
        is_good: Whether it holds tensors and nothing else.
        folder: The folder that the tools are given in place of the file, where it is not empty.
    """

    what: str
    name: str
    data: bytes
    is_good: bool
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool.

    Attributes:
        name: For the table.
        command: What is typed, with the file's path to follow.
        codes: What its exit codes say; every other is `refused`.
    """

    name: str
    command: Sequence[str]
    codes: dict[int, str]


def main() -> None:
    """Make the files, show them to each tool and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_verdicts", description=__doc__)
    parser.add_argument(
        "--peers", action="append", type=Path, metavar="BIN", help="where tools are (default: .venv-peers/bin)"
    )
    options = parser.parse_args()
    found = list(tools([place.resolve() for place in options.peers or [PEERS]]))
    print("| file | " + " | ".join(tool.name for tool in found) + " | loading it |")
    print("|---|" + "---|" * (len(found) + 1))
    for case in cases():
        with tempfile.TemporaryDirectory(prefix="safeload-verdicts-") as folder:
            path = Path(folder) / case.folder / case.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(case.data)
            row = [says(tool, path.parent if case.folder else path) for tool in found]
            assert not [*Path(folder).rglob(SENTINEL)], "a scanner ran the payload"
            row.append(loads(path))
        print(f"| {case.what} | " + " | ".join(row) + " |")


def tools(places: Sequence[Path]) -> Iterator[Tool]:
    """Yield each tool that is there, ours first."""
    clean = {0: "passed"}
    yield Tool("safeload scan", [str(OURS / "safeload"), "scan"], clean)
    known = {
        "picklescan": (["-p"], clean),
        "modelscan": (["scan", "-p"], {**clean, 3: "no file"}),
        "fickling": (["--check-safety"], clean),
        "modelaudit": (["scan", "--no-cache"], clean),
    }
    for name, (arguments, codes) in known.items():
        path = next((place / name for place in places if (place / name).exists()), None)
        if path is not None:
            yield Tool(name, [str(path), *arguments], codes)


def says(tool: Tool, path: Path) -> str:
    """Return what a tool's exit code says of a file."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(path.parent),
        "NO_ANALYTICS": "1",
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [*tool.command, path.name], cwd=path.parent, env=environment, capture_output=True, timeout=300, check=False
    )
    verdict = tool.codes.get(done.returncode, "refused")
    return verdict if done.returncode in {0, 1} else f"{verdict} ({done.returncode})"


LOADER = """
import pickle, sys
import numpy, ml_dtypes

class QuantizedWeight8bit:
    pass

name = sys.argv[1]
with open(name, "rb") as file:
    head = file.read(4)
    file.seek(0)
    if name.endswith((".npy", ".npz")):
        numpy.load(file, allow_pickle=True)
    elif name.endswith(".pt"):
        import torch
        torch.load(file, weights_only=False)
    elif name.endswith(".joblib"):
        import zlib
        pickle.loads(zlib.decompress(file.read()))
    elif name.endswith(".safetensors"):
        from safetensors.numpy import load
        load(file.read())
    else:
        pickle.load(file)
"""
"""What such files are commonly loaded by, `pickle.load` in Grok-1's published code among it."""


def loads(path: Path) -> str:
    """Load a file as programs do, and say what came of it."""
    python = PEERS / "python"
    interpreter = str(python) if python.exists() else sys.executable
    done = subprocess.run(
        [interpreter, "-c", LOADER, path.name], cwd=path.parent, capture_output=True, timeout=300, check=False
    )
    if (path.parent / SENTINEL).exists():
        return "the payload runs"
    if b"Zen of Python" in done.stdout:
        return "a module is imported"
    if b"ModuleNotFoundError" in done.stderr:
        return "not installed"
    return "an exception" if done.returncode else "loads"


def cases() -> Iterator[Case]:
    """Yield the files: four good ones, and what can be wrong with such."""
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    shard = io.BytesIO()
    weight, scales = np.ones((8, 8), np.int8), np.ones((1, 8), ml_dtypes.bfloat16)
    record = QuantizedWeight8bit(weight, scales)  # type: ignore[call-arg] # made by make_dataclass
    write_shard(shard, record)
    good = pickle.dumps({"w": array}, protocol=4)
    tensors = io.BytesIO()
    write_safetensors(tensors, {"w": array}, {})
    yield Case("a shard of Grok-1, no extension", "tensor00000_000", shard.getvalue(), is_good=True)
    yield Case("numpy arrays in a dict", "good.pkl", good, is_good=True)
    yield Case("a PyTorch state dict", "good.pt", torch_file(), is_good=True)
    yield Case("safetensors", "good.safetensors", tensors.getvalue(), is_good=True)
    yield Case("pickle that calls `os.system`", "evil.pkl", SYSTEM, is_good=False)
    yield Case("the same, called as Grok-1's shards are", "tensor00000_000", SYSTEM, is_good=False)
    yield Case("a folder with only that file", "tensor00000_000", SYSTEM, is_good=False, folder="ckpt-0")
    yield Case("pickle that names `this.s`", "imports.pkl", IMPORTS, is_good=False)
    yield Case("good pickle, cut in the middle", "cut.pkl", good[: len(good) // 2], is_good=False)
    yield Case("random bytes", "random.pkl", np.random.default_rng(7).bytes(4096), is_good=False)
    yield Case("good pickle, another behind it that calls `os.system`", "two.pkl", good + SYSTEM, is_good=False)
    yield Case("the same call in a PyTorch file", "evil.pt", torch_file(SYSTEM), is_good=False)
    yield Case("the same call in an object array", "evil.npy", object_array(), is_good=False)
    yield Case("the same call, compressed by zlib", "evil.joblib", zlib.compress(SYSTEM), is_good=False)
    yield Case("safetensors, a tensor longer than its bytes", "evil.safetensors", lying_header(), is_good=False)


def torch_file(program: bytes | None = None) -> bytes:
    """Return a PyTorch file of one tensor, or of a program in the place of its pickle."""
    pickled = program or (
        b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01ctorch._utils\n_rebuild_tensor_v2\nq\x02((X\x07\x00\x00\x00storageq\x03"
        b"ctorch\nFloatStorage\nq\x04X\x01\x00\x00\x000q\x05X\x03\x00\x00\x00cpuq\x06K\x04tq\x07QK\x00K\x04\x85q\x08"
        b"K\x01\x85q\t\x89ccollections\nOrderedDict\nq\n)Rq\x0btq\x0cRq\rs."
    )
    members = {"data.pkl": pickled, "byteorder": b"little", "data/0": bytes(16), "version": b"3\n"}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            member = zipfile.ZipInfo(f"archive/{name}", (1980, 1, 1, 0, 0, 0))
            # PyTorch puts each member's bytes at a multiple of 64.
            start = out.tell() + 30 + len(member.filename) + 4
            padding = -start % 64
            member.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            archive.writestr(member, data)
    return out.getvalue()


def object_array() -> bytes:
    """Return an npy file whose one element is pickled, as a program."""
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + SYSTEM


def lying_header() -> bytes:
    """Return a safetensors file of 64 bytes whose header has a tensor of 4 KiB there."""
    header = b'{"w":{"dtype":"F32","shape":[1024],"data_offsets":[0,64]}}'
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + bytes(64)


if __name__ == "__main__":
    main()
