"""The two streams of a run: results and the verdict on stdout, reasons and progress on stderr.

With `--json` stdout gets exactly one object and nothing else. A reader that goes away (`| head`) ends the printing and
not the run: the exit code is the verdict all the same.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from safeload.errors import Finding, OperationalError, RejectedError
from safeload.rendering import json as json_rendering
from safeload.rendering import text
from safeload.report import Progress, Report

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_QUIET_SECONDS = 0.5
"""Shorter runs draw no bar: it would only flash, and importing rich costs a quarter of such a run."""

_ERROR = "safeload: error:"
_RED, _GREEN, _RESET = "\x1b[31m", "\x1b[32m", "\x1b[0m"


class Output:
    """Where one run of the command prints.

    Args:
        json: Whether stdout gets one JSON object in place of text.
        verbose: Whether to list every file, and to show the traceback of an error that is our own fault.
    """

    def __init__(self, *, json: bool = False, verbose: bool = False) -> None:
        self.json = json
        self.verbose = verbose

    def line(self, line: str = "") -> None:
        """Print one line of a result on stdout; nothing with `--json`."""
        if not self.json:
            _write(sys.stdout, line + "\n")

    def note(self, line: str) -> None:
        """Print one line on stderr."""
        _write(sys.stderr, line + "\n")

    def verbatim(self, content: str) -> None:
        """Print a text file on stdout as it is; on a terminal, with what could control the terminal escaped."""
        if _is_terminal(sys.stdout):
            lines = ("\t".join(map(text.printable, line.split("\t"))) for line in content.split("\n"))
            content = "\n".join(lines)
        _write(sys.stdout, content)

    def object(self, value: Mapping[str, Any]) -> None:
        """Print the run's one JSON object; nothing without `--json`."""
        if self.json:
            _write(sys.stdout, json_rendering.object_json(value) + "\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, indent: str = "") -> None:
        """Print a table on stdout, as wide as it needs to be in a file and as wide as there is room in a terminal."""
        if self.json:
            return
        width = shutil.get_terminal_size().columns if _is_terminal(sys.stdout) else None
        for line in text.table_lines(columns, rows, width=width, indent=indent):
            self.line(line)

    def report(self, report: Report, *, extra: Mapping[str, Any] | None = None, note: str | None = None) -> int:
        """Print a report, the verdict last.

        Args:
            report: What was found.
            extra: More keys for the JSON object.
            note: One line to print before the verdict: what it does not say.

        Returns:
            The exit code: 0 accepted, 1 rejected.
        """
        accepted = report.verdict == "accepted"
        if self.json:
            _write(sys.stdout, json_rendering.report_json(report, extra) + "\n")
            return 0 if accepted else 1
        for finding in report.all_findings:
            self.finding(finding)
        if report.files or accepted:
            for line in text.summary_lines(report, verbose=self.verbose):
                self.line(line)
        if note is not None:
            self.line(note)
        return self.verdict(text.verdict_line(report))

    def verdict(self, line: str) -> int:
        """Print the last line, `accepted` or `rejected: ...`, and return the exit code that goes with it."""
        accepted = line == "accepted"
        self.line(_painted(line, _GREEN if accepted else _RED, sys.stdout))
        return 0 if accepted else 1

    def rejected(self, err: RejectedError) -> int:
        """Print the rejection that ended a run before there was a report; return its exit code."""
        return self.report(Report((), err.findings))

    def finding(self, finding: Finding) -> None:
        """Print one finding on stderr."""
        for line in text.error_lines(finding):
            is_error = line.startswith(_ERROR)
            self.note(_painted(_ERROR, _RED, sys.stderr) + line.removeprefix(_ERROR) if is_error else line)

    def no_verdict(self, code: str, message: str, *, hint: str | None = None) -> int:
        """Print why no verdict was reached; return the exit code for that, 2."""
        if self.json:
            _write(sys.stdout, json_rendering.no_verdict_json([Finding(code, message, hint=hint)]) + "\n")
        self.note(f"{_painted(_ERROR, _RED, sys.stderr)} {text.printable(message)}")
        if hint is not None:
            self.note(f"safeload: hint: {text.printable(hint)}")
        return OperationalError.exit_code

    @contextmanager
    def progress(self) -> Iterator[Progress | None]:
        """Give a callback that draws a bar on stderr, or None where stderr is no terminal or this is a CI job."""
        if not _is_terminal(sys.stderr) or os.environ.get("CI"):
            yield None
            return
        bar = _Bar()
        try:
            yield bar.update
        finally:
            bar.stop()


class _Bar:
    """A progress bar that appears only when there is something to wait for, and leaves no trace."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._rich: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def update(self, phase: str, done_bytes: int, total_bytes: int) -> None:
        if self._rich is None:
            if time.monotonic() - self._started < _QUIET_SECONDS:
                return
            self._rich = self._start()
        if phase not in self._tasks:
            self._tasks[phase] = self._rich.add_task(phase, total=total_bytes)
        self._rich.update(self._tasks[phase], completed=done_bytes, total=total_bytes)

    def stop(self) -> None:
        if self._rich is not None:
            self._rich.stop()

    @staticmethod
    def _start() -> RichProgress:
        bar = new_bars()
        bar.start()
        return bar


def new_bars() -> RichProgress:
    """Return bars of bytes, with rate and time left, on stderr; they are gone when they are stopped."""
    # Imported here because only a long run on a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def flush() -> None:
    """Flush both streams, so that a reader that went away cannot change the exit code while Python shuts down."""
    for stream in (sys.stdout, sys.stderr):
        _write(stream, "")


def _write(stream: TextIO | None, data: str) -> None:
    if stream is None:  # Closed by whoever started us (`>&-`): there is nobody to tell.
        return
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        # A name that the terminal's encoding lacks is shown escaped; it must not turn a verdict into a crash.
        stream.reconfigure(errors="backslashreplace")
    try:
        stream.write(data)
        stream.flush()
    except BrokenPipeError:
        _silence(stream)
    except OSError as err:
        _silence(stream)
        raise OperationalError(f"the output cannot be written: {os.strerror(err.errno or 0)}") from err


def silence_stdout() -> None:
    """Give up on a stdout that nobody reads any more."""
    _silence(sys.stdout)


def _silence(stream: TextIO) -> None:
    """Point a dead stream at nothing, so that neither we nor Python's shutdown meet the error again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _painted(line: str, color: str, stream: TextIO | None) -> str:
    plain = not _is_terminal(stream) or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
    return line if plain else f"{color}{line}{_RESET}"
