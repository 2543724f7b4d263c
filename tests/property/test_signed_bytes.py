"""Whatever is done to a signed manifest, the answer is the signed bytes or one of our own refusals."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safeload.digests import sha256_hex
from safeload.errors import ManifestError, SignatureError, VerificationError
from safeload.manifest import FileEntry, Manifest, ManifestTensor
from safeload.signing import sign_manifest
from safeload.trust.dsse import Envelope, Signature
from safeload.trust.keys import SecretKey
from safeload.trust.store import TrustStore
from safeload.verifying import verify_manifest

TENSOR = ManifestTensor(name="w", dtype="int8", shape=(2, 3), order="C", offset=9, nbytes=6, sha256="1" * 64)
MANIFEST = Manifest.of(
    [FileEntry(path="t", size=20, sha256="0" * 64, format="pickle", role="weights", tensors=(TENSOR,))],
    stream="grok-1",
    revision="r",
    issued=datetime(2026, 1, 1, tzinfo=UTC),
    tool_version="1",
)
KEYS = [SecretKey.generate("ed25519"), SecretKey.generate("ecdsa-p256")]
TRUST = TrustStore.of_keys([key.public for key in KEYS])
SIGNED = [sign_manifest(MANIFEST, [key]) for key in KEYS]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def flipped(data: bytes, place: int, mask: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


def verified_or_refused(data: bytes) -> None:
    """Anything but a refusal of the VerificationError family fails the test by itself."""
    try:
        trusted = verify_manifest(data, TRUST)
    except VerificationError as err:
        assert type(err) in (ManifestError, SignatureError)  # noqa: PT017 - both outcomes are allowed
    else:
        assert trusted.sha256 == sha256_hex(MANIFEST.to_payload())
        assert trusted.manifest == MANIFEST


@given(signed=st.sampled_from(SIGNED), place=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_any_other_byte_of_the_payload_is_refused(signed: bytes, place: int, mask: int) -> None:
    good = Envelope.parse(signed)
    with pytest.raises(SignatureError):
        verify_manifest(
            Envelope(flipped(good.payload, place, mask), good.payload_type, good.signatures).serialize(), TRUST
        )


@given(signed=st.sampled_from(SIGNED), place=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_any_other_byte_of_a_signature_is_refused(signed: bytes, place: int, mask: int) -> None:
    good = Envelope.parse(signed)
    (signature,) = good.signatures
    changed = Signature(flipped(signature.sig, place, mask), signature.keyid)
    with pytest.raises(SignatureError):
        verify_manifest(Envelope(good.payload, good.payload_type, (changed,)).serialize(), TRUST)


@settings(max_examples=300)
@given(signed=st.sampled_from(SIGNED), place=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_any_other_byte_of_the_envelope_is_refused_or_changes_nothing(signed: bytes, place: int, mask: int) -> None:
    verified_or_refused(flipped(signed, place, mask))


@given(signed=st.sampled_from(SIGNED), start=st.integers(0, 3000), length=st.integers(0, 3000), put=st.binary())
def test_any_cut_or_insertion_is_refused_or_changes_nothing(signed: bytes, start: int, length: int, put: bytes) -> None:
    verified_or_refused(signed[:start] + put + signed[start + length :])


@given(data=st.binary() | JSON.map(lambda value: repr(value).replace("'", '"').encode("utf-8", "surrogatepass")))
def test_arbitrary_bytes_are_refused_as_an_envelope(data: bytes) -> None:
    with pytest.raises(VerificationError):
        verify_manifest(data, TRUST)


@given(data=st.binary() | JSON.map(lambda value: repr(value).replace("'", '"').encode("utf-8", "surrogatepass")))
def test_arbitrary_bytes_are_refused_as_a_manifest_even_if_they_are_signed(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(data)


@settings(max_examples=300)
@given(place=st.integers(0, 10**6), mask=st.integers(1, 255))
def test_a_changed_payload_is_another_manifest_or_refused_even_if_it_is_signed(place: int, mask: int) -> None:
    changed = flipped(MANIFEST.to_payload(), place, mask)
    try:
        read = Manifest.parse(changed)
    except ManifestError:
        return
    assert read != MANIFEST
    assert Manifest.parse(read.to_payload()) == read
