"""`safeload attach-signature`, and the options of `sign` that say what a manifest is for and who signs it where."""

from __future__ import annotations

import binascii
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safeload.cli import options
from safeload.cli.keys import claimed, require_absent
from safeload.cli.output import Output
from safeload.errors import ConfigError, Finding, SignatureError, VerificationError, escape, reason
from safeload.rendering.text import shown
from safeload.report import SCHEMA_VERSION

if TYPE_CHECKING:
    from safeload.manifest import Manifest
    from safeload.report import Report

_MAX_SMALL_FILE_BYTES = 64 * 1024
"""A signature takes up to 150 bytes and a public key 300; a longer file is neither."""

_WHAT_TO_SIGN = "name what `safeload sign --payload-only` wrote, or a manifest that it signed"

Kind = Annotated[
    str, typer.Option("--kind", metavar="KIND", help="what a restore is for: inference, or training (to resume it)")
]
Require = Annotated[
    list[str] | None,
    typer.Option("--require", metavar="ROLE", help="a role that a restore needs besides; repeatable"),
]
Epoch = Annotated[
    int, typer.Option("--epoch", metavar="N", min=1, help="goes before --version: one more when versions start anew")
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="DATE", help="end of the last day on which it is current (UTC)")
]
Blake3 = Annotated[bool, typer.Option("--blake3", help="add each file's BLAKE3 digest beside SHA-256")]
PayloadOnly = Annotated[
    bool,
    typer.Option("--payload-only", help="write the bytes to sign elsewhere (KMS, HSM), then `attach-signature`"),
]


def parse_expiry(text: str | None) -> datetime | None:
    """Return the last second of a day, or the instant that is named.

    Raises:
        ConfigError: It is no date of ISO 8601, or is over.
    """
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as err:
        raise ConfigError(
            f"--expires: expected a date, found {escape(text)!r}", hint="write it as 2027-12-31 or 2027-12-31T12:00Z"
        ) from err
    if len(text) == len("2027-12-31"):
        moment = moment.replace(hour=23, minute=59, second=59)
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    if moment <= datetime.now(UTC):
        raise ConfigError(
            f"--expires: expected a time to come, found {escape(text)}",
            hint="name the last day on which the manifest shall be current",
        )
    return moment


def write_payload(out: Output, output: Path, manifest: Manifest, report: Report) -> int:
    """Write the bytes that somebody else shall sign, and say what to do with them; return the exit code."""
    from safeload.digests import sha256_hex
    from safeload.files import publish
    from safeload.signing import payload_to_sign

    payload = payload_to_sign(manifest)
    with claimed(output):
        publish(output, payload)
    extra = {"output": str(output), "payload": {"sha256": sha256_hex(payload), "bytes": len(payload)}}
    name = shown(str(output))
    note = f"wrote     {name}: not signed yet\nnext      sign exactly these bytes with your key, then:\n"
    note += f"          safeload attach-signature {name} --signature SIG --public-key KEY.pub -o MANIFEST"
    return out.report(report, extra=extra, note=note)


def attach_signature(
    payload: Annotated[
        Path,
        typer.Argument(
            metavar="PAYLOAD",
            help="what `sign --payload-only` wrote, or a manifest to sign as well",
            show_default=False,
        ),
    ],
    signature: Annotated[
        Path,
        typer.Option("--signature", metavar="SIG", help="64 bytes of Ed25519, or ECDSA as DER; raw or in base64"),
    ],
    public_key: Annotated[Path, typer.Option("--public-key", metavar="KEY.pub", help="the signer's public key (PEM)")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="MANIFEST", help="the manifest to write", show_default=False)
    ],
    json: options.Json = False,
) -> int:
    """Put a signature that was made elsewhere to what it was made over. One that does not fit is refused."""
    out = Output(json=json)
    require_absent(output)

    from safeload.digests import sha256_hex
    from safeload.files import publish
    from safeload.trust.dsse import MAX_ENVELOPE_BYTES, Envelope
    from safeload.trust.keys import PublicKey

    try:
        key = PublicKey.from_pem(_read(public_key, _MAX_SMALL_FILE_BYTES, "the public key"), name=public_key.stem)
    except ConfigError as err:
        named = escape(str(public_key))
        raise err if named in err.message else ConfigError(f"{named}: {err.message}", hint=err.hint) from err
    data = _read(payload, MAX_ENVELOPE_BYTES, "the payload")
    made = _read(signature, _MAX_SMALL_FILE_BYTES, "the signature")
    try:
        envelope = _attach(data, made, key)
    except VerificationError as err:
        at_fault = signature if err.findings[0].code == "bad-signature" else payload
        findings = (Finding(f.code, f.message, str(at_fault), f.offset, f.hint or _WHAT_TO_SIGN) for f in err.findings)
        raise type(err)(*findings) from err
    with claimed(output):
        publish(output, envelope)
    parsed = Envelope.parse(envelope)
    signed: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "output": str(output),
        "manifest": {"sha256": sha256_hex(parsed.payload)},
        "signer": {"name": key.name, "keyid": key.keyid},
        "signatures": len(parsed.signatures),
    }
    out.object(signed)
    out.line(f"signature of key {key.keyid} fits, {len(parsed.signatures)} in all")
    out.line(f"wrote     {shown(str(output))}")
    return 0


def _attach(data: bytes, signature: bytes, key: Any) -> bytes:
    """Take the signature as it is, or else as the base64 that command lines of key services print."""
    from safeload.signing import attach_signature as attach

    try:
        return attach(data, signature, key)
    except SignatureError:
        try:
            decoded = binascii.a2b_base64(b"".join(signature.split()), strict_mode=True)
        except ValueError:
            decoded = b""
        if not decoded:
            raise
        return attach(data, decoded, key)


def _read(path: Path, limit: int, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {what} {escape(str(path))}: {reason(err)}", hint="check the path") from err
    if len(data) > limit:
        raise ConfigError(
            f"{escape(str(path))}: expected {what} of at most {limit} bytes, found more", hint="check the path"
        )
    return data
