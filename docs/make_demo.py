# ruff: noqa: INP001
"""Draws docs/demo.svg: what `safeload demo` prints on a terminal. `python docs/make_demo.py`, with safeload installed.

The command runs on a terminal of its own (a pty), and every character of the picture is one that it printed, but for
the prompt and the lines `...` that stand for what was left out. The picture has no fonts or links from elsewhere.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURE = Path(__file__).with_name("demo.svg")

COLUMNS = 116
"""Of the terminal: as many as the longest line has. Wider ones would be small print in a page."""

PARAMETERS_SHOWN = 3
"""Of the long table of tensors; the rest of it is left out."""

THEME = TerminalTheme(
    (24, 26, 31),
    (220, 223, 228),
    [
        *((40, 44, 52), (240, 100, 110), (150, 210, 120), (229, 192, 123)),
        *((97, 175, 239), (198, 120, 221), (86, 182, 194), (220, 223, 228)),
    ],
)

FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>safeload demo</title>
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
  <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own picture would fetch a font from a server of somebody else's."""


def main() -> None:
    """Run the demo and write the picture."""
    PICTURE.write_text(picture(list(shown(recorded()))), encoding="utf-8")


def recorded() -> str:
    """Return what the demo prints on a terminal, colors included.

    Raises:
        CalledProcessError: The demo did not end as it should.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    command = [str(Path(sys.executable).with_name("safeload")), "demo"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:  # noqa: S603 - ours
        os.close(theirs)
        output = io.BytesIO()
        while piece := _read(ours):
            output.write(piece)
        os.close(ours)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, output.getvalue())
    return output.getvalue().decode("utf-8").replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: the other side has closed it
        return b""


def shown(output: str) -> Iterator[str]:
    """Yield the lines of the picture: steps 3 to 5 and the verdict, with the middle of the long table left out."""
    yield "$ safeload demo"
    lines = output.rstrip("\n").split("\n")
    begin = next(n for n, line in enumerate(lines) if line.startswith("3. "))
    end = next(n for n, line in enumerate(lines) if line.startswith("6. "))
    yield lines[0]
    yield "..."
    n_parameters = 0
    for line in lines[begin : end - 1]:
        n_parameters += re.match(r" {3}(language_model|transformer)/", line) is not None
        if re.match(r" {3}[0-9]+ tensors, ", line):
            n_parameters = 0
        if n_parameters <= PARAMETERS_SHOWN:
            yield line
        elif n_parameters == PARAMETERS_SHOWN + 1:
            n_parameters += 1
            yield "   ..."
    yield "..."
    yield lines[-1]


def picture(lines: list[str]) -> str:
    """Return an SVG of a terminal with these lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="ellipsis", highlight=False)
    return console.export_svg(title="safeload demo", theme=THEME, code_format=FORMAT, unique_id="demo")


if __name__ == "__main__":
    main()
