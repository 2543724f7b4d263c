"""`safeload completion`: the script that teaches a shell to complete this command's words, and the answers to it."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer
import typer.main

from safeload.cli.output import Output

_VARIABLE = "_SAFELOAD_COMPLETE"
"""What the script sets when it asks: typer's name for it. It calls the command without any argument, so that a variable
which somebody left there cannot make a run of `verify` end with 0."""


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish", show_default=False)
    ],
) -> int:
    """Print a script that completes commands and options in SHELL."""
    # Late, and so for the next: typer does not promise these names, and only completion may break if they move.
    from typer.completion import get_completion_script  # type: ignore[attr-defined] # not in its `__all__`

    Output().verbatim(get_completion_script(prog_name="safeload", complete_var=_VARIABLE, shell=shell) + "\n")
    return 0


def is_asked() -> bool:
    """Return whether a shell may be asking for words; only a run without arguments can be one that answers."""
    return _VARIABLE in os.environ


def answer(app: typer.Typer) -> int:
    """Print the words that can come next, as the shell's script wants them, and return the exit code."""
    from typer.completion import completion_init  # type: ignore[attr-defined] # see above

    completion_init()
    try:
        typer.main.get_command(app).main([], "safeload", complete_var=_VARIABLE)
    except SystemExit as end:
        return 0 if not end.code else 2
    return 2
