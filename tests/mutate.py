"""`python -m tests.mutate`: remove each check of the pickle gate, one at a time, and see that a test fails for it.

A check is a statement that refuses: a call of `refuse`, `_fail` or `_limit`, or the raising of an error. It is
replaced by nothing in a copy of the package, and the gate's tests run against the copy. A check whose removal no test
notices is printed, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
GATE = [
    "formats/pickles/machine.py",
    "formats/pickles/constructors.py",
    "formats/pickles/results.py",
    "formats/pickles/torch_constructors.py",
    "formats/pickles/torch_machine.py",
    "formats/gguf.py",
    "formats/inert.py",
    "formats/npy.py",
    "formats/npz.py",
    "formats/pytorch.py",
    "formats/safetensors.py",
    "formats/shapes.py",
    "formats/shard_index.py",
    "formats/tensorflow.py",
    "formats/zips.py",
    "scanning.py",
]
TESTS = [
    *("vectors", "constructors", "pickle_machine", "results", "inert", "opcodes", "scanning", "policy", "loading"),
    *("indexes", "format_gguf", "format_index", "format_npy", "format_npz", "format_pytorch", "format_safetensors"),
    *("format_tensorflow", "format_zips"),
]
REFUSALS = {
    *("refuse", "_fail", "_limit", "_refuse_field", "_refuse", "_exceeds", "_want", "require"),
    *("check_name", "_check_names", "_check_padding"),
}
SECONDS = 120
"""A mutant that runs longer is noticed: its check was what ended a loop."""


def checks(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield the first and the last line of each check, and what it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in REFUSALS:
                yield node.lineno, node.end_lineno or node.lineno, ast.unparse(node)[:90]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.lineno, node.end_lineno or node.lineno, ast.unparse(node)[:90]


def without(source: str, first: int, last: int) -> str:
    """Return the source with these lines replaced by `pass`, at the same indentation."""
    lines = source.splitlines(keepends=True)
    indent = lines[first - 1][: len(lines[first - 1]) - len(lines[first - 1].lstrip())]
    return "".join([*lines[: first - 1], f"{indent}pass\n", *lines[last:]])


def is_noticed(file: str, first: int, last: int) -> bool:
    """Run the tests on a copy of the project that lacks one check."""
    with tempfile.TemporaryDirectory(prefix="safeload-mutant-") as folder:
        for part in ("safeload", "policies", "tests", "pyproject.toml", "README.md", "SECURITY.md"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, Path(folder, part))
        target = Path(folder, "safeload", file)
        target.write_text(without(target.read_text(encoding="utf-8"), first, last), encoding="utf-8")
        tests = [f"tests/unit/test_{name}.py" for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--only", default="", help="only files whose path contains this")
    options = parser.parse_args()
    found = [
        (file, *check)
        for file in GATE
        if options.only in file
        for check in sorted(checks((ROOT / "safeload" / file).read_text(encoding="utf-8")))
    ]
    survivors = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Told as they come: all of them take hours.
        for (file, first, _, text), noticed in zip(
            found, pool.map(lambda check: is_noticed(check[0], check[1], check[2]), found), strict=True
        ):
            if not noticed:
                survivors += 1
                print(f"safeload/{file}:{first}: no test notices without: {text}", flush=True)  # noqa: T201 - this is a command
    print(f"{len(found)} checks, {survivors} of them unnoticed")  # noqa: T201 - see above
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
