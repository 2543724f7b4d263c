"""The DSSE v1 envelope: bytes, what type they are of, and signatures over both."""

from __future__ import annotations

import binascii
import json
from dataclasses import dataclass
from typing import NoReturn

from safeload.errors import Finding, ManifestError, SignatureError, escape
from safeload.trust import strict_json

MAX_ENVELOPE_BYTES = 64 * 1024 * 1024
"""Longest envelope that is looked at. A manifest of 100,000 files with one tensor each takes about 60 MB."""

MAX_SIGNATURES = 256
"""Most signatures in one envelope: each may have to be tried against every trusted key."""

_MAX_DEPTH = 16
"""Envelope, list, signature make three; the rest is room for fields of others, which are ignored."""

_MAX_VALUES = 65_536
"""An envelope has few values whatever its length; this is checked while nothing in it is authentic yet. It leaves room
for telling somebody with 10,000 signatures that they are too many."""

_HTML = (b"<!doctype html", b"<html")
_HEAD_BYTES = 1024
"""How far in a page may begin, after white space."""

_MAKE_ONE = "make one with `safeload sign DIR --key KEY -o MANIFEST`"

_URL_SAFE = str.maketrans("-_", "+/")


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature of an envelope.

    Attributes:
        sig: The signature itself.
        keyid: Hint at the key, empty where there is none. Anyone can write it: it may order the search, never decide.
    """

    sig: bytes
    keyid: str = ""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A well-formed envelope. Nothing in it is authentic before a signature over `signed_bytes` has been checked.

    Attributes:
        payload: The bytes that were signed, decoded.
        payload_type: What they claim to be; signed too.
        signatures: At least one where the envelope was parsed.
    """

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]

    @classmethod
    def parse(cls, data: bytes) -> Envelope:
        """Return the envelope in `data`; fields that DSSE does not define are ignored, as it asks.

        Raises:
            ManifestError: It is too long, no strict JSON, no envelope, or has more than `MAX_SIGNATURES`.
            SignatureError: Its list of signatures is empty.
        """
        if data[:_HEAD_BYTES].lstrip().lower().startswith(_HTML):
            # Named first: whatever breaks JSON in a page would be the wrong thing to look at.
            _refuse("expected JSON, found an HTML page", hint="a server's error page? get the manifest again")
        try:
            value = strict_json.loads(data, max_bytes=MAX_ENVELOPE_BYTES, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)
        except ManifestError as err:
            _refuse(err.findings[0].message, err.findings[0].offset, err)
        if not isinstance(value, dict):
            _refuse("expected a JSON object")
        signatures = value.get("signatures")
        if not isinstance(signatures, list):
            _refuse('expected a list "signatures"')
        if not signatures:
            raise SignatureError(
                Finding(
                    "no-signatures",
                    "expected at least one signature, found none",
                    hint="sign it with `safeload sign DIR --key KEY -o MANIFEST`",
                )
            )
        if len(signatures) > MAX_SIGNATURES:
            raise ManifestError(
                Finding(
                    "too-many-signatures",
                    f"expected up to {MAX_SIGNATURES} signatures, found {len(signatures)}",
                    hint="take out the signatures of keys that you do not trust: they prove nothing",
                )
            )
        return cls(
            payload=_base64_field(value, "payload"),
            payload_type=_text_field(value, "payloadType"),
            signatures=tuple(_signature(entry) for entry in signatures),
        )

    @property
    def signed_bytes(self) -> bytes:
        """What the signatures are over: payload and type."""
        return pae(self.payload_type, self.payload)

    def serialize(self) -> bytes:
        """Return the envelope as one line of JSON, standard base64, always in the same order."""
        signatures = [{"keyid": each.keyid, "sig": _encode_base64(each.sig)} for each in self.signatures]
        value = {
            "payloadType": self.payload_type,
            "payload": _encode_base64(self.payload),
            "signatures": signatures,
        }
        return json.dumps(value).encode("ascii") + b"\n"


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the pre-authentication encoding (DSSE v1): lengths make it unambiguous where type and payload end."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def decode_base64(text: str) -> bytes:
    """Return the bytes of the one base64 text that stands for them, in the standard or the URL-safe alphabet.

    Raises:
        ValueError: It mixes the alphabets, or is not what an encoder would write (RFC 4648, 3.2 to 3.5): white space,
            padding missing or too long, or bits set in the last character that no byte uses.
    """
    if ("-" in text or "_" in text) and ("+" in text or "/" in text):
        raise ValueError("expected one alphabet of base64, found a mixture")
    standard = text.translate(_URL_SAFE) if "-" in text or "_" in text else text
    decoded = binascii.a2b_base64(standard)
    # That many bytes take so many characters, and none is left over if one was skipped; the last four are compared.
    # No decoder's notion of "strict" needs to be relied on, and what is 60 MB long is not encoded again.
    tail = len(decoded) - (len(decoded) - 1) // 3 * 3 if decoded else 0
    last = binascii.b2a_base64(decoded[len(decoded) - tail :], newline=False).decode("ascii")
    if len(standard) != -(-len(decoded) // 3) * 4 or not standard.endswith(last):
        raise ValueError("expected base64 with its padding and nothing else")
    return decoded


def _encode_base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


def _signature(entry: object) -> Signature:
    if not isinstance(entry, dict):
        _refuse("expected each signature to be a JSON object")
    keyid = entry.get("keyid")
    return Signature(_base64_field(entry, "sig"), "" if keyid is None else _text_field(entry, "keyid"))


def _text_field(value: dict[str, object], name: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        _refuse(f'expected a string "{name}"')
    return text


def _base64_field(value: dict[str, object], name: str) -> bytes:
    try:
        return decode_base64(_text_field(value, name))
    except ValueError as err:
        _refuse(f'"{name}": {escape(str(err))}', None, err)


def _refuse(
    message: str, offset: int | None = None, cause: Exception | None = None, *, hint: str = _MAKE_ONE
) -> NoReturn:
    raise ManifestError(
        Finding(
            "bad-envelope",
            f"not a signed manifest (a DSSE envelope): {message}",
            offset=offset,
            hint=hint,
        )
    ) from cause
