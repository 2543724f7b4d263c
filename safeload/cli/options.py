"""The options that several commands share, each with one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Spelled out so that `--help` need not import the policy module; a test holds it to `policy.DEFAULT_POLICY`.
DEFAULT_POLICY_NAME = "numpy-quantized"

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="the checkpoint", show_default=False)]
Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="files and directories", show_default=False)]
Policy = Annotated[
    str, typer.Option("-p", "--policy", metavar="POLICY", help="what to allow: a shipped name or a path")
]
Manifest = Annotated[
    Path, typer.Option("-m", "--manifest", metavar="MANIFEST", help="the signed manifest", show_default=False)
]
Trust = Annotated[
    list[Path],
    typer.Option("--trust", metavar="TRUST", help="a public key or a trust store; repeatable", show_default=False),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="read the key's passphrase from FILE", show_default=False),
]
Digest = Annotated[bool, typer.Option("--digest", help="also read every byte and show SHA-256 digests")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="list every file; show the traceback of a crash")]
