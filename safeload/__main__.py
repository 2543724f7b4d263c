"""`python -m safeload`: the command. It can be interrupted before it has imported anything that takes time."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # As in `safeload`: whatever is imported here is time in which Ctrl-C shows a traceback.
if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

_INTERRUPTED_JSON = (
    b'{"schema": 1, "verdict": "none", "files": [], "findings": [{"code": "interrupted", '
    b'"message": "the run was interrupted", "offset": null, "hint": null}]}\n'
)
"""What `cli` prints of an interruption; spelled out, as importing what would make it is what is interrupted here."""

_NO_VERDICT = 2

_AGAIN_SECONDS = 0.01
"""Until a lost interrupt is repeated: a callback is over by then."""


def main() -> None:
    """Run the command and leave with its exit code, which no signal turns into another verdict."""
    # A shell starts a job in the background with SIGINT ignored, and `nohup` and others do it on purpose.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, _leave)

    from safeload import cli

    sys.unraisablehook = _interrupt_again
    try:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)
        code = cli.main()
        # The verdict is out. A signal that comes while the interpreter ends must not change the exit code that says it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        # Before the command listens or behind its last word; in between, it says so itself.
        _say_interrupted()
        code = _NO_VERDICT
    sys.exit(code)


def _leave(_number: int, _frame: FrameType | None) -> None:
    """End the process at once: nothing was opened or written yet.

    A KeyboardInterrupt could be caught by what is being imported, or be lost in a callback of the import machinery.
    """
    if _wants_json(sys.argv[1:]):
        _write(1, _INTERRUPTED_JSON)
    _say_interrupted()
    os._exit(_NO_VERDICT)


def _interrupt_again(lost: UnraisableHookArgs) -> None:
    """Repeat an interrupt that came within a callback, such as one of the import machinery: Python drops it there."""
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    import threading

    threading.Timer(_AGAIN_SECONDS, signal.raise_signal, [signal.SIGINT]).start()


def _wants_json(arguments: list[str]) -> bool:
    """As `cli.main` decides it: the audit's `--json` names a file."""
    flags = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in flags and [flag for flag in flags if flag not in {"-v", "--verbose"}][:1] != ["audit"]


def _say_interrupted() -> None:
    _write(2, b"safeload: interrupted\n")


def _write(fd: int, data: bytes) -> None:
    try:  # noqa: SIM105 - `contextlib` takes a quarter of what there is to import here
        os.write(fd, data)
    except OSError:
        pass  # Closed, or nobody reads: the exit code is left.


if __name__ == "__main__":
    main()
