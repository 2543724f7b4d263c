"""`safeload doctor`: what this machine makes slow or impossible."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.errors import OperationalError
from safeload.rendering.text import printable
from safeload.report import SCHEMA_VERSION


def doctor(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="also try what its file system can do, in a hidden directory that is removed again"
        ),
    ] = None,
    jax: Annotated[bool, typer.Option("--jax", help="also start JAX and list its devices")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Say what will be slow or refused on this machine, and why. Judges no checkpoint."""
    out = Output(json=json, verbose=verbose)

    from safeload.doctor import CORE, examine

    found = examine(directory, jax=jax)
    refused = [item.subject for item in found if item.level == "refused"]
    slow = [item.subject for item in found if item.level == "slow"]
    ready = not CORE.intersection(refused)
    facts = {"ready": ready, "slow": slow, "refused": refused, "observations": [asdict(item) for item in found]}
    out.object({"schema": SCHEMA_VERSION, **facts})
    out.table(["", "what", "found"], ((item.level, item.subject, printable(item.value)) for item in found))
    out.line()
    for item in found:
        if item.level in {"slow", "refused"} or (verbose and item.why is not None):
            out.line(f"{item.subject}: {printable(item.why or item.value)}")
            if item.hint is not None:
                out.line(f"  hint: {printable(item.hint)}")
    troubles = [f"{text}: {', '.join(names)}" for text, names in (("refused", refused), ("slow", slow)) if names]
    out.line("; ".join(["ready" if ready else "not ready", *troubles]))
    return 0 if ready else OperationalError.exit_code
