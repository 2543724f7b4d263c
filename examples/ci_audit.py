# ruff: noqa: INP001, T201
"""Audit a directory of checkpoints in CI: the exit code says whether the build may go on.

    python examples/ci_audit.py                      # makes a mirror with one bad file, and shows what is said of it
    python examples/ci_audit.py DIR [MANIFEST KEY]   # audits a directory of yours

0: nothing to refuse. 1: refused, and each reason is printed. 2: there is no verdict, such as for a wrong argument;
whatever was to be checked is still untrusted. The command `safeload audit` does the same, and writes reports.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np

import safeload
from safeload.auditing import audit
from safeload.errors import escape
from safeload.formats.pickles.writing import write_shard

USAGE = "usage: ci_audit.py [DIR [MANIFEST KEY]]"


def gate(directory: Path, manifest: Path | bytes | None = None, trust: Path | safeload.PublicKey | None = None) -> int:
    """Print why a directory is refused, and return the exit code."""
    try:
        found = audit({directory: manifest}, trust=() if trust is None else trust, policy="numpy-quantized")
    except safeload.SafeloadError as err:
        print(f"no verdict: {err}")
        return 2
    for finding in found.report.all_findings:
        # Names come from the files, and a terminal or a log must not obey them.
        print(f"{escape(str(finding.file))}: {finding.code}: {escape(finding.message)}")
    print(f"{len(found.report.files)} files, {len(found.report.all_findings)} findings: {found.report.verdict}")
    return 0 if found.has_passed else 1


class Hostile:
    """What an attacker would put into a checkpoint: `pickle.load` would call `print`, or anything else."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Return what to call, and with what."""
        return print, ("arbitrary code ran",)


def demo(folder: Path) -> None:
    """Audit a signed mirror as it was published, after a flipped bit, and with a hostile pickle in it."""
    mirror = folder / "mirror"
    mirror.mkdir()
    with (mirror / "tensor00000_000").open("wb") as file:
        write_shard(file, np.arange(1000, dtype=np.float32))
    key = safeload.SecretKey.generate("ed25519")
    manifest = safeload.sign(mirror, keys=[key], model="example", revision="1", policy="numpy-quantized")

    print("-- as published")
    codes = [gate(mirror, manifest, key.public)]

    print("-- one bit flipped")
    whole = (mirror / "tensor00000_000").read_bytes()
    (mirror / "tensor00000_000").write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    codes.append(gate(mirror, manifest, key.public))

    print("-- a hostile pickle, and nobody's signature to hold it against")
    (mirror / "tensor00000_000").write_bytes(whole)
    (mirror / "tensor00001_000").write_bytes(pickle.dumps(Hostile()))
    codes.append(gate(mirror))
    print(f"exit codes {codes}")


def main() -> int:
    """Audit what was named, or run the demo."""
    arguments = sys.argv[1:]
    if not arguments:
        with tempfile.TemporaryDirectory() as folder:
            demo(Path(folder))
        return 0
    if len(arguments) not in {1, 3}:
        print(USAGE)
        return 2
    directory, *rest = map(Path, arguments)
    return gate(directory, *rest)


if __name__ == "__main__":
    sys.exit(main())
