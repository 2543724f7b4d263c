"""What becomes of a signed checkpoint that somebody damaged: `python -m benchmarks.compare_damage`.

Six shards in Grok-1's layout are signed by safeload and, where `make bench-peers` has installed it, by model_signing,
both with a key. Each damage is done to a copy. The verifiers are asked by their commands, and `unpickled` is what
Grok-1's published code does with files: `pickle.load` of each one that it expects, in a process of its own. The one
hostile payload is harmless, and whether it ran is looked up.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.compare_verdicts import PEERS, SENTINEL, SYSTEM
from safeload.formats.pickles.writing import write_shard

SAFELOAD = Path(sys.executable).with_name("safeload")
N_SHARDS = 6

RECIPE = f"""
import pickle, ml_dtypes, numpy
for index in range({N_SHARDS}):
    with open(f"checkpoint/tensor{{index:05d}}_000", "rb") as file:
        pickle.load(file)
"""
"""What the published code does with each file; that it does so in 32 threads makes no difference here."""


def main() -> None:
    """Sign, damage copies, and print the table."""
    with tempfile.TemporaryDirectory(prefix="safeload-damage-") as name:
        origin = Path(name) / "origin"
        make(origin)
        verifiers: dict[str, Callable[[Path], str]] = {"safeload verify": by_safeload}
        if (PEERS / "model_signing").exists():
            verifiers["model_signing verify"] = by_model_signing
        verifiers["unpickled"] = unpickled
        print("| damage | " + " | ".join(verifiers) + " |")
        print("|---|" + "---|" * len(verifiers))
        for number, (what, damage) in enumerate(DAMAGES.items()):
            copy = Path(name) / str(number)
            shutil.copytree(origin, copy)
            damage(copy / "checkpoint")
            print(f"| {what} | " + " | ".join(verifier(copy) for verifier in verifiers.values()) + " |")


def make(folder: Path) -> None:
    """Write a checkpoint, a key, and the signatures over it."""
    (folder / "checkpoint").mkdir(parents=True)
    for index in range(N_SHARDS):
        with (folder / "checkpoint" / shard(index)).open("wb") as file:
            # All of one shape, as the layers of a model are.
            write_shard(file, np.full((16, 16), index, np.float32))
    commands = [
        [str(SAFELOAD), "keygen", "-o", "key", "--no-passphrase", "--kind", "ecdsa-p256"],
        [str(SAFELOAD), "sign", "checkpoint", "--key", "key", "-o", "manifest.json", "--model", "m"],
    ]
    if (PEERS / "model_signing").exists():
        sign = [str(PEERS / "model_signing"), "sign", "key", "checkpoint", "--signature", "model.sig"]
        commands.append([*sign, "--private_key", "key"])
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def shard(index: int) -> str:
    """Return the name of a shard."""
    return f"tensor{index:05d}_000"


def by_safeload(folder: Path) -> str:
    """Return what safeload says, and why."""
    command = [str(SAFELOAD), "verify", "checkpoint", "-m", "manifest.json", "--trust", "key.pub"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    last = done.stdout.splitlines()[-1]
    return "passed" if done.returncode == 0 else last.removeprefix("rejected: ").partition(" in ")[0]


def by_model_signing(folder: Path) -> str:
    """Return what model_signing says."""
    command = [str(PEERS / "model_signing"), "verify", "key", "checkpoint", "--signature", "model.sig"]
    done = subprocess.run([*command, "--public_key", "key.pub"], cwd=folder, capture_output=True, check=False)
    return "passed" if done.returncode == 0 else "refused"


def unpickled(folder: Path) -> str:
    """Return what becomes of unpickling each file."""
    done = subprocess.run([sys.executable, "-c", RECIPE], cwd=folder, capture_output=True, check=False)
    if (folder / SENTINEL).exists():
        return "the payload runs"
    return "an exception" if done.returncode else "loads"


def flip(folder: Path) -> None:
    """Change one bit of one weight."""
    data = bytearray((folder / shard(1)).read_bytes())
    data[-100] ^= 1
    (folder / shard(1)).write_bytes(data)


def swap(folder: Path) -> None:
    """Let two shards of one shape change places."""
    (folder / shard(1)).rename(folder / "other")
    (folder / shard(2)).rename(folder / shard(1))
    (folder / "other").rename(folder / shard(2))


def link(folder: Path) -> None:
    """Put a symbolic link to the same bytes elsewhere in the place of a shard."""
    (folder / shard(1)).rename(folder.parent / "elsewhere")
    (folder / shard(1)).symlink_to(folder.parent / "elsewhere")


def write(path: Path, data: bytes, mode: str) -> None:
    """Write to a file in a mode of `open`."""
    with path.open(mode) as file:
        file.write(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "none": lambda _: None,
    "one bit of one weight": flip,
    "two shards of one shape exchanged": swap,
    "a shard missing": lambda folder: (folder / shard(1)).unlink(),
    "a file added": lambda folder: (folder / shard(N_SHARDS)).write_bytes(b"x"),
    "four bytes behind a shard": lambda folder: write(folder / shard(1), b"more", "ab"),
    "a symbolic link to the same bytes": link,
    "a shard that calls `os.system`": lambda folder: write(folder / shard(1), SYSTEM, "wb"),
}
"""What is done to the copies."""


if __name__ == "__main__":
    main()
