"""The envelope is read strictly, and says nothing that was not signed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from safeload.errors import ManifestError, SignatureError
from safeload.trust import dsse
from safeload.trust.dsse import MAX_SIGNATURES, Envelope, Signature, decode_base64, pae

SIG = {"keyid": "k", "sig": "c2ln"}


def envelope(**changes: Any) -> bytes:
    value = {"payload": "cGF5bG9hZA==", "payloadType": "t", "signatures": [SIG]} | changes
    return json.dumps({name: field for name, field in value.items() if field is not ...}).encode()


def refused(data: bytes, code: str = "bad-envelope") -> str:
    with pytest.raises(ManifestError) as caught:
        Envelope.parse(data)
    assert [finding.code for finding in caught.value.findings] == [code]
    return caught.value.findings[0].message


def test_pae_is_that_of_the_specification() -> None:
    # The example of the DSSE v1 protocol.
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )
    assert pae("é", b"") == b"DSSEv1 2 \xc3\xa9 0 "


def test_an_envelope_survives_its_own_text() -> None:
    made = Envelope(b"\xfb\xff\x00", "t", (Signature(b"\xff" * 64, "a"), Signature(b"", "")))
    text = made.serialize()
    assert text.count(b"\n") == 1
    assert text.endswith(b"}\n")
    assert Envelope.parse(text) == made


def test_what_dsse_does_not_define_is_ignored() -> None:
    assert Envelope.parse(envelope(extra={"a": [1]}, signatures=[{**SIG, "cert": "x"}])) == Envelope(
        b"payload", "t", (Signature(b"sig", "k"),)
    )


def test_a_keyid_that_is_absent_empty_or_null_is_the_same() -> None:
    read = Envelope.parse(envelope(signatures=[{"sig": "c2ln"}, {**SIG, "keyid": ""}, {**SIG, "keyid": None}]))
    assert set(read.signatures) == {Signature(b"sig", "")}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        b"[]",
        b"null",
        b'{"a":1,"a":1}',
        envelope(payload=...),
        envelope(payload=None),
        envelope(payload=7),
        envelope(payloadType=...),
        envelope(payloadType=["t"]),
        envelope(signatures=...),
        envelope(signatures=None),
        envelope(signatures={"keyid": "", "sig": ""}),
        envelope(signatures=["c2ln"]),
        envelope(signatures=[{"keyid": "k"}]),
        envelope(signatures=[{"sig": 7}]),
        envelope(signatures=[{**SIG, "keyid": 7}]),
        envelope(signatures=[{**SIG, "sig": "c2l"}]),
        envelope(payload="cGF5bG9hZA"),
        envelope(extra=0.5),
    ],
)
def test_a_malformed_envelope_is_refused(data: bytes) -> None:
    assert "DSSE" in refused(data)


def test_no_signature_is_a_matter_of_signatures() -> None:
    with pytest.raises(SignatureError) as caught:
        Envelope.parse(envelope(signatures=[]))
    assert caught.value.findings[0].code == "no-signatures"


def test_signatures_are_limited() -> None:
    assert len(Envelope.parse(envelope(signatures=[SIG] * MAX_SIGNATURES)).signatures) == MAX_SIGNATURES
    refused(envelope(signatures=[SIG] * (MAX_SIGNATURES + 1)), "too-many-signatures")
    assert "found 10000" in refused(envelope(signatures=[SIG] * 10_000), "too-many-signatures")
    assert "values" in refused(envelope(signatures=[SIG] * 25_000))
    assert "values" in refused(envelope(extra=[[]] * 40_000))


def test_length_is_checked_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dsse.MAX_ENVELOPE_BYTES == 64 * 1024 * 1024
    monkeypatch.setattr(dsse, "MAX_ENVELOPE_BYTES", len(envelope()))
    Envelope.parse(envelope())
    assert "bytes" in refused(envelope() + b" ")


@pytest.mark.parametrize("data", [b"", b"a", b"ab", b"abc", b"\xfb\xef\xff", b"\xff\xfe\xfd\xfc"])
def test_both_alphabets_are_read(data: bytes) -> None:
    assert decode_base64(base64.b64encode(data).decode()) == data
    assert decode_base64(base64.urlsafe_b64encode(data).decode()) == data


@pytest.mark.parametrize(
    "text",
    [
        "YQ",  # no padding
        "YQ=",
        "YQ===",
        "YWI",
        "YWJj=",
        "YWJj====",
        "=",
        "A",
        "YR==",  # bits that no byte uses
        "YWJ=",
        " YQ==",
        "YQ==\n",
        "Y Q==",
        "Y\tQ==",
        "YQ==YQ==",  # two texts
        "Y=Q=",
        "+_+_",  # two alphabets
        "-/-/",
        "Y!Q==",
        "YQ=\u003d\u2028",
        "\uff21A==",
        "é",
    ],
)
def test_what_no_encoder_writes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_base64(text)
    refused(envelope(payload=text))
    refused(envelope(signatures=[{"sig": text}]))
