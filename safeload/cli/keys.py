"""`safeload keygen`, and how a passphrase reaches the command: from a file, or from a person at a terminal."""

from __future__ import annotations

import contextlib
import getpass
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.errors import ConfigError, escape, reason
from safeload.report import SCHEMA_VERSION

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey

_MAX_PASSPHRASE_BYTES = 4096
"""A passphrase is typed by a person or made by a tool; a longer file is a mistake."""

_MIN_PASSPHRASE_CHARACTERS = 8
"""All that are shorter can be tried out; see `_not_short`."""

_MAX_KEY_FILE_BYTES = 64 * 1024
"""An encrypted P-256 key takes about 400 bytes; a longer file is no key."""

_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"
"""How PKCS #8 marks an encrypted key in PEM (RFC 7468, section 11)."""

_KEY_MODE = 0o600


def keygen(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="KEY", help="the secret key", show_default=False)],
    kind: Annotated[
        Literal["ed25519", "ecdsa-p256", "ecdsa-p384", "ecdsa-p521"],
        typer.Option("--kind", help="the signature scheme"),
    ] = "ed25519",
    passphrase_file: options.PassphraseFile = None,
    no_passphrase: Annotated[bool, typer.Option("--no-passphrase", help="store the secret key unencrypted")] = False,
    json: options.Json = False,
) -> int:
    """Make a key pair: KEY (secret, for you alone) and KEY.pub (for everyone who verifies).

    Use a long passphrase, such as six random words: whoever gets hold of KEY can try many.
    """
    out = Output(json=json)
    if no_passphrase and passphrase_file is not None:
        raise ConfigError("--no-passphrase and --passphrase-file exclude each other", hint="leave one of them out")
    if not output.name:
        raise ConfigError(
            f"-o: expected the name of a file, found {escape(str(output))}", hint="name one, such as -o publisher.key"
        )
    public_path = output.with_name(output.name + ".pub")
    for path in (output, public_path):
        require_absent(path)
    passphrase = None if no_passphrase else _new_passphrase(passphrase_file)

    from safeload.files import publish
    from safeload.trust.keys import SecretKey

    key = SecretKey.generate(kind)
    with claimed(output), claimed(public_path):
        publish(output, key.to_pem(passphrase), mode=_KEY_MODE)
        publish(public_path, key.public.to_pem())
    out.object(
        {
            "schema": SCHEMA_VERSION,
            "keyid": key.public.keyid,
            "kind": kind,
            "key": str(output),
            "public_key": str(public_path),
        }
    )
    out.line(f"secret key  {escape(str(output))}  ({'encrypted' if passphrase else 'not encrypted'})")
    out.line(f"public key  {escape(str(public_path))}")
    out.line(f"keyid       {key.public.keyid}")
    return 0


def require_absent(path: Path) -> None:
    """Refuse to write where something is: a key or a manifest that is overwritten is lost.

    Raises:
        ConfigError: There is something at `path`, or its folder is missing.
    """
    if os.path.lexists(path):
        raise ConfigError(f"{escape(str(path))} exists already", hint="move it away, or choose another name with -o")
    if not path.parent.is_dir():
        raise ConfigError(
            f"there is no folder {escape(str(path.parent))}", hint="make it, or choose another name with -o"
        )


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Hold `path` as an empty new file while its content is published over it; leave nothing if that fails.

    Publishing replaces what is there, so this is what makes it certain that the file was ours.

    Raises:
        ConfigError: There is something at `path` already, or it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _KEY_MODE))
    except FileExistsError as err:
        raise ConfigError(f"{escape(str(path))} exists already", hint="move it away, or choose another name") from err
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"cannot write {escape(str(path))}: {reason(err)}", hint="choose another name with -o"
        ) from err
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def read_secret_keys(paths: list[Path], passphrase_file: Path | None) -> list[SecretKey]:
    """Return the secret keys of these files; encrypted ones with the passphrase of the file, or as typed.

    Raises:
        ConfigError: A file is no key, cannot be read, or is encrypted and the passphrase is missing or wrong.
    """
    return [_read_secret_key(path, passphrase_file) for path in paths]


def _read_secret_key(path: Path, passphrase_file: Path | None) -> SecretKey:
    from safeload.trust.keys import SecretKey

    pem = _read(path, _MAX_KEY_FILE_BYTES, "a key", "check the path; `safeload keygen -o KEY` makes a key pair")
    passphrase = _passphrase_for(path, passphrase_file) if _ENCRYPTED in pem else None
    try:
        return SecretKey.from_pem(pem, passphrase)
    except ConfigError as err:
        raise ConfigError(f"{escape(str(path))}: {err.message}", hint=err.hint) from err


def _passphrase_for(path: Path, passphrase_file: Path | None) -> bytes:
    if passphrase_file is not None:
        return _passphrase_in(passphrase_file)
    if not sys.stdin.isatty():
        raise ConfigError(
            f"{escape(str(path))} is encrypted and there is no terminal to ask for its passphrase",
            hint="pass --passphrase-file FILE",
        )
    return _typed(f"passphrase of {escape(str(path))}: ")


def _typed(prompt: str) -> bytes:
    """Return what a person types, as the bytes that the terminal sent, whatever they are in its encoding."""
    try:
        return getpass.getpass(prompt).encode("utf-8", "surrogateescape")
    except EOFError as err:  # Ctrl-D
        raise ConfigError(
            "expected a passphrase, found the end of the input", hint="run it again, or pass --passphrase-file FILE"
        ) from err


def _new_passphrase(passphrase_file: Path | None) -> bytes:
    if passphrase_file is not None:
        return _not_short(_passphrase_in(passphrase_file))
    if not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to ask for a passphrase", hint="pass --passphrase-file FILE or --no-passphrase"
        )
    first = _typed("new passphrase: ")
    if not first:
        raise ConfigError("the passphrase is empty", hint="pass --no-passphrase for a key that is not encrypted")
    passphrase = _not_short(first)
    if first != _typed("the same again: "):
        raise ConfigError("the two passphrases differ; nothing was written", hint="run it again")
    return passphrase


def _not_short(passphrase: bytes) -> bytes:
    # The library writes PKCS #8 with PBKDF2 of 2,048 rounds of SHA-256: a GPU tries millions of passphrases a second.
    if len(passphrase.decode("utf-8", "replace")) < _MIN_PASSPHRASE_CHARACTERS:
        raise ConfigError(
            f"the passphrase has fewer than {_MIN_PASSPHRASE_CHARACTERS} characters; the key derivation of a key file "
            "(PKCS #8) is weak against guessing, and only a long passphrase makes up for it",
            hint="use a long one, such as six random words",
        )
    return passphrase


def _passphrase_in(path: Path) -> bytes:
    """The first line of the file, without its line end: editors add one, and nobody types it."""
    content = _read(path, _MAX_PASSPHRASE_BYTES, "a passphrase", "check the path that --passphrase-file names")
    passphrase = content.removesuffix(b"\n").removesuffix(b"\r")
    if not passphrase or b"\n" in passphrase:
        raise ConfigError(
            f"{escape(str(path))}: expected one line with the passphrase",
            hint="put the passphrase into its first line, and nothing else into the file",
        )
    return passphrase


def _read(path: Path, limit: int, what: str, hint: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {escape(str(path))}: {reason(err)}", hint=hint) from err
    if len(content) > limit:
        raise ConfigError(f"{escape(str(path))} is too long to be {what}", hint=hint)
    return content
