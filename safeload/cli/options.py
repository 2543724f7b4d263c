"""The options that several commands share, each with one name and one help text, and how help shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from safeload.errors import ConfigError, escape

# Spelled out so that `--help` need not import the policy module; a test holds it to `policy.DEFAULT_POLICY`.
DEFAULT_POLICY_NAME = "numpy-quantized"


_EXPECTED = "What the manifest has to be"
_SIGSTORE = "A bundle that Sigstore vouches for"
"""Panels of help: of the options that a first run has no use for."""


class _PlainHelp:
    """Makes help show a flag without a type, and an argument as it is declared; typer would show `<list[Path]>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of the class that this is mixed into
        for param in params:
            if param.param_type_name == "argument":
                param.get_usage_pieces = lambda ctx, shown=param.metavar: [shown]  # noqa: ARG005
                param.display_type_rich = lambda ctx: None  # noqa: ARG005
            elif param.is_flag:
                param.metavar = ""
        return params


class Command(_PlainHelp, TyperCommand):
    """One command."""


class Group(_PlainHelp, TyperGroup):
    """A command of commands."""


def _require_directory(path: Path) -> Path:
    if os.path.isfile(path):  # noqa: PTH113 - `Path.is_file` raises where we may not look; opening it says that better
        raise ConfigError(f"{escape(str(path))} is a file", hint="name the directory")
    if not os.path.lexists(path):
        raise ConfigError(f"there is no directory {escape(str(path))}", hint="check the path")
    return path


# `readable=False`, here and below: whoever opens a path says why it cannot be read and what to do; the parser of the
# command line would say only that it is so.
Directory = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="the checkpoint", show_default=False, callback=_require_directory, readable=False
    ),
]
Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="files and directories, or URLs: https://, hf://", show_default=False),
]


_URL = re.compile(r"(https?|hf):/", re.IGNORECASE)
"""How a URL begins that was made a path of, which has one slash for two."""


def _require_local(given: Path | None) -> Path | None:
    if given is not None and _URL.match(str(given)):
        raise ConfigError(
            f"expected a manifest that lies here, found the URL {escape(str(given).replace(':/', '://', 1))}",
            hint="download it first, by any way: its signature says whether it is right; then -m FILE",
        )
    return given


def complete_policy(incomplete: str) -> list[str]:
    """Return the shipped policies whose names begin like that."""
    from safeload.policy import shipped_policies

    return [name for name, _ in shipped_policies() if name.startswith(incomplete)]


Policy = Annotated[
    str,
    typer.Option(
        "-p",
        "--policy",
        metavar="POLICY",
        help="what to allow: a shipped name or a path",
        autocompletion=complete_policy,
    ),
]
Manifest = Annotated[
    Path,
    typer.Option(
        "-m",
        "--manifest",
        metavar="MANIFEST",
        help="the signed manifest",
        show_default=False,
        callback=_require_local,
        readable=False,
    ),
]
OptionalManifest = Annotated[
    Path | None,
    typer.Option(
        "-m", "--manifest", metavar="MANIFEST", help="the signed manifest", callback=_require_local, readable=False
    ),
]
Trust = Annotated[
    list[Path],
    typer.Option(
        "--trust",
        metavar="TRUST",
        help="a public key or a trust store; repeatable",
        show_default=False,
        readable=False,
    ),
]
BundleTrust = Annotated[
    list[Path] | None,
    typer.Option(
        "--trust",
        metavar="TRUST",
        help="a public key, a trust store or, for a bundle, certificates; repeatable",
        show_default=False,
        readable=False,
    ),
]
SigstoreWho = Annotated[
    str | None,
    typer.Option(
        "--sigstore-identity",
        metavar="WHO",
        help="for a bundle: who signed it without a key",
        rich_help_panel=_SIGSTORE,
    ),
]
SigstoreIssuer = Annotated[
    str | None,
    typer.Option("--sigstore-issuer", metavar="URL", help="who vouches for that identity", rich_help_panel=_SIGSTORE),
]
SigstoreRoot = Annotated[
    Path | None,
    typer.Option(
        "--sigstore-root",
        metavar="FILE",
        help="Sigstore's trusted_root.json; never fetched",
        rich_help_panel=_SIGSTORE,
    ),
]
Pin = Annotated[
    str | None,
    typer.Option(
        "--pin",
        metavar="sha256:HEX",
        help="accept this one manifest only, by its digest; the strongest check",
        rich_help_panel=_EXPECTED,
    ),
]
TrustPin = Annotated[
    str | None,
    typer.Option(
        "--trust-pin",
        metavar="sha256:HEX",
        help="accept this one trust store only, by its digest",
        rich_help_panel=_EXPECTED,
    ),
]
ExpectedModel = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="the model that the manifest has to be of", rich_help_panel=_EXPECTED),
]
ExpectedRevision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="REV", help="the revision that the manifest has to be of", rich_help_panel=_EXPECTED
    ),
]
History = Annotated[
    Path | None,
    typer.Option(
        "--history",
        metavar="FILE",
        help="remember here what was accepted, and refuse older manifests; made where there is none",
        show_default=False,
        rich_help_panel=_EXPECTED,
    ),
]
Purpose = Annotated[
    Literal["inference", "training"] | None,
    typer.Option("--for", help="refuse a checkpoint that lacks what this needs", rich_help_panel=_EXPECTED),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", metavar="FILE", help="read the key's passphrase from FILE", show_default=False),
]
Digest = Annotated[bool, typer.Option("--digest", help="also read every byte and show SHA-256 digests")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="list every file; show the traceback of a crash")]
