"""The commands that move and compare values: convert, diff."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from safeload.cli import options, signatures
from safeload.cli.keys import read_secret_keys, require_absent
from safeload.cli.output import Output
from safeload.errors import ConfigError, escape
from safeload.rendering import text
from safeload.rendering.text import shown
from safeload.sizes import human_size

if TYPE_CHECKING:
    from safeload.diffing import Difference

_MAX_SHOWN = 20
"""Rows of each kind of difference that are shown without --verbose."""


def convert(
    directory: options.Directory,
    target: Annotated[Path, typer.Argument(metavar="NEW", help="the directory to make", show_default=False)],
    to: Annotated[
        Literal["safetensors", "npy", "grok-1"], typer.Option("--to", help="the new format", show_default=False)
    ],
    manifest: options.Manifest,
    trust: options.Trust,
    key: Annotated[
        list[Path],
        typer.Option("--key", metavar="KEY", help="a secret key to sign the result; repeatable", show_default=False),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="MANIFEST", help="the new manifest (default: NEW/manifest.json)"),
    ] = None,
    as_model: Annotated[
        str | None,
        typer.Option("--as-model", metavar="NAME", help="its model (default: the old one, + and the format)"),
    ] = None,
    as_revision: Annotated[
        str | None, typer.Option("--as-revision", metavar="REV", help="its revision (default: the old one)")
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    as_policy: Annotated[
        str, typer.Option("--as-policy", metavar="POLICY", help="what to allow in the new files")
    ] = options.DEFAULT_POLICY_NAME,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="leave out numbers and text that lie among the weights")
    ] = False,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", metavar="SIZE", help="most memory to stage in, such as 8GiB")
    ] = None,
    blake3: signatures.Blake3 = False,
    pin: options.Pin = None,
    model: options.ExpectedModel = None,
    revision: options.ExpectedRevision = None,
    history: options.History = None,
    purpose: options.Purpose = None,
    trust_pin: options.TrustPin = None,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Verify DIR and make the same values in another format, signed anew and proven equal."""
    out = Output(json=json, verbose=verbose)
    if output is not None:
        require_absent(output)
    keys = read_secret_keys(key, passphrase_file)

    from safeload import converting

    with out.progress() as progress:
        made = converting.convert(
            directory,
            target,
            to=to,
            manifest=manifest,
            trust=trust,
            keys=keys,
            output=output,
            as_model=as_model,
            as_revision=as_revision,
            policy=policy,
            as_policy=as_policy,
            tensors_only=tensors_only,
            memory_budget=memory_budget,
            blake3=blake3,
            progress=progress,
            pin=pin,
            model=model,
            revision=revision,
            history=history,
            purpose=purpose,
            trust_pin=trust_pin,
        )
    if json:
        out.object(
            {
                "schema": 1,
                "verdict": "accepted",
                "output": str(made.manifest),
                "derived_from": made.derived_from,
                "tensors": made.n_tensors,
                "bytes": made.nbytes,
                "files": list(made.files),
                "left_out": list(made.left_out),
            }
        )
        return 0
    if verbose or len(made.files) <= text.MAX_LISTED_FILES:
        for path in made.files:
            out.line(f"wrote     {shown(path)}")
    for path in made.left_out:
        out.note(f"safeload: note: left out {shown(path)}")
    out.line(f"wrote     {shown(str(made.manifest))}")
    out.line(f"from      the manifest sha256:{made.derived_from}")
    out.line(
        f"{text.count(made.n_tensors, 'tensor')}, {human_size(made.nbytes)}: each has the type, the shape and the "
        "value digest that were signed before"
    )
    return out.verdict("accepted")


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="a directory or a signed manifest", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="the same of the other", show_default=False)],
    trust: Annotated[
        list[Path] | None,
        typer.Option(
            "--trust", metavar="TRUST", help="a key that signed the manifests; repeatable", show_default=False
        ),
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Compare two checkpoints of any formats, tensor by tensor, by the digests of their values."""
    out = Output(json=json, verbose=verbose)
    for side in (first, second):
        if not os.path.lexists(side):
            raise ConfigError(f"there is no directory and no manifest {escape(str(side))}", hint="check the path")

    from safeload import diffing

    with out.progress() as progress:
        found = diffing.diff(first, second, trust=trust or None, policy=policy, progress=progress)
    if json:
        verdict = "accepted" if found.is_equal else "rejected"
        out.object({"schema": 1, "verdict": verdict, "findings": [], "files": [], "difference": found.to_json()})
        return 0 if found.is_equal else 1
    _show(out, found, verbose=verbose)
    if found.is_equal:
        return out.verdict("accepted")
    return out.verdict("rejected: the checkpoints differ")


def _show(out: Output, found: Difference, *, verbose: bool) -> None:
    kinds = {
        "changed": [(name, f"{before} -> {after}") for name, (before, after) in found.changed.items()],
        "renamed": [(old, f"-> {shown(new)}") for old, new in found.renamed],
        "missing": [(name, str(tensor)) for name, tensor in found.missing.items()],
        "added": [(name, str(tensor)) for name, tensor in found.added.items()],
    }
    for kind, rows in kinds.items():
        for name, what in rows if verbose else rows[:_MAX_SHOWN]:
            out.line(f"{kind:9} {shown(name)}  {what}")
        if len(rows) > _MAX_SHOWN and not verbose:
            out.line(f"{kind:9} and {len(rows) - _MAX_SHOWN} more; --verbose lists them")
    counts = ", ".join(f"{len(rows)} {kind}" for kind, rows in kinds.items())
    out.line(f"{text.count(len(found.same), 'tensor')} same, {counts}")
