"""Pages that are run: the code blocks of a Markdown file, and what a shell prints for the commands in them."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
"""Where the environment's commands are, `safeload` among them."""


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of one language, in order."""
    return [body for name, body in all_blocks(page) if name == language]


def all_blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the body of every block, in order."""
    return re.findall(r"^```([a-z0-9-]*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def commands(block: str) -> Iterator[tuple[str, str]]:
    r"""Yield each command of a console block, with what is shown of its output. A line that ends in \ goes on."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        length = next(n for n, line in enumerate(lines, 1) if not line.endswith("\\"))
        yield "\n".join(lines[:length]), "\n".join(lines[length:])


def shape(text: str) -> str:
    """Return output with what differs from run to run made equal: digests, times, the order of the two streams."""
    text = re.sub(r"\b[0-9a-f]{16}([0-9a-f]{48})?\b", "<digest>", text)
    text = re.sub(r"in [0-9.]+ s( \([0-9.]+ GB/s\))?", "in <time>", text)
    return "\n".join(sorted(line.rstrip() for line in text.splitlines() if line.strip()))


def run(command: str, folder: Path) -> tuple[str, int]:
    """Run a command line as a reader would in `folder`; return both streams, and the exit code."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={"PATH": f"{BIN}:/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr, done.returncode
