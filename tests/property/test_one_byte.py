"""One byte, anywhere: what is signed is refused once it changes, and what is not signed never helps.

The whole way is taken each time, from the files on disk to the verdict.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safeload import loading, publishing
from safeload.errors import DigestMismatchError, ManifestError, RejectedError, SignatureError
from safeload.formats.pickles.writing import write_shard
from safeload.manifest import PAYLOAD_TYPE
from safeload.trust.dsse import Envelope, Signature, pae
from safeload.trust.keys import SecretKey

KEYS = [SecretKey.generate("ed25519"), SecretKey.generate("ecdsa-p256")]
STRANGER = SecretKey.generate()
FILES = ("README.md", "config.json", "one-byte.txt", "tensor00000_000", "tokenizer.model")
"""One of each format, and one of the least length."""

PLACE = st.integers(0, 10**6)
MASK = st.integers(1, 255)
KEY = st.sampled_from([0, 1])
HINT = st.sampled_from(["", "junk", *(key.public.keyid for key in (*KEYS, STRANGER))]) | st.text(max_size=8)

many = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def flipped(data: bytes, place: int, mask: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]


class Signed:
    """A checkpoint of a few hundred bytes, and one manifest of it by each key."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "checkpoint"
        self.directory.mkdir()
        with (self.directory / "tensor00000_000").open("wb") as file:
            write_shard(file, np.arange(6, dtype=np.float32).reshape(2, 3))
        (self.directory / "README.md").write_text("# A model\n")
        (self.directory / "config.json").write_text('{"layers": 2}\n')
        (self.directory / "one-byte.txt").write_text("\n")
        (self.directory / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
        assert sorted(path.name for path in self.directory.iterdir()) == sorted(FILES)
        self.envelopes = [
            Envelope.parse(publishing.sign(self.directory, keys=[key], model="m", revision="r")) for key in KEYS
        ]

    def verdict(self, manifest: bytes) -> str:
        return loading.check(
            self.directory, manifest=manifest, trust=[key.public for key in KEYS], policy="numpy-quantized"
        ).verdict

    def refused(self, manifest: bytes) -> RejectedError:
        """Return the refusal, which both verbs have to agree on."""
        arguments: dict[str, Any] = {"manifest": manifest, "trust": [key.public for key in KEYS]}
        assert self.verdict(manifest) == "rejected"
        with pytest.raises(RejectedError) as verifying:
            loading.verify(self.directory, **arguments)
        with pytest.raises(RejectedError) as caught:
            loading.load(self.directory, **arguments)
        assert type(verifying.value) is type(caught.value)
        return caught.value


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return Signed(tmp_path_factory.mktemp("signed"))


def test_unchanged_it_is_accepted(signed: Signed) -> None:
    assert [signed.verdict(envelope.serialize()) for envelope in signed.envelopes] == ["accepted", "accepted"]


@many
@given(key=KEY, place=PLACE, mask=MASK)
def test_any_other_byte_of_the_payload_is_rejected(signed: Signed, key: int, place: int, mask: int) -> None:
    good = signed.envelopes[key]
    changed = Envelope(flipped(good.payload, place, mask), good.payload_type, good.signatures)
    assert type(signed.refused(changed.serialize())) is SignatureError


@many
@given(key=KEY, place=PLACE, mask=MASK)
def test_any_other_byte_of_the_signature_is_rejected(signed: Signed, key: int, place: int, mask: int) -> None:
    good = signed.envelopes[key]
    (signature,) = good.signatures
    changed = Signature(flipped(signature.sig, place, mask), signature.keyid)
    assert type(signed.refused(Envelope(good.payload, good.payload_type, (changed,)).serialize())) is SignatureError


@many
@given(key=KEY, place=PLACE, mask=MASK)
def test_any_other_byte_of_the_payload_type_is_rejected(signed: Signed, key: int, place: int, mask: int) -> None:
    good = signed.envelopes[key]
    kind = flipped(good.payload_type.encode(), place, mask).decode("latin-1")
    assert type(signed.refused(Envelope(good.payload, kind, good.signatures).serialize())) is SignatureError


@many
@given(name=st.sampled_from(FILES), place=PLACE, mask=MASK)
def test_any_other_byte_of_a_file_is_rejected(signed: Signed, name: str, place: int, mask: int) -> None:
    path = signed.directory / name
    good = path.read_bytes()
    path.write_bytes(flipped(good, place, mask))
    try:
        error = signed.refused(signed.envelopes[0].serialize())
    finally:
        path.write_bytes(good)
    assert type(error) is DigestMismatchError
    assert (error.findings[0].file, error.findings[0].code) == (name, "digest-mismatch")


@many
@given(key=KEY, place=PLACE, mask=MASK)
def test_any_other_byte_of_the_envelope_is_rejected_or_stands_outside_the_signature(
    signed: Signed, key: int, place: int, mask: int
) -> None:
    good = signed.envelopes[key]
    changed = flipped(good.serialize(), place, mask)
    if signed.verdict(changed) == "accepted":
        read = Envelope.parse(changed)
        assert (read.payload, read.payload_type) == (good.payload, good.payload_type)
        assert read.signatures[0].sig == good.signatures[0].sig


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.text(max_size=8).filter(lambda name: name not in {"payload", "payloadType", "signatures", "sig", "keyid"})


@st.composite
def dressed(draw: st.DrawFn, payload: bytes, signatures: list[bytes]) -> bytes:
    """Return an envelope in which everything that is not signed is whatever somebody likes."""
    plain = json.loads(Envelope(payload, PAYLOAD_TYPE, tuple(Signature(sig) for sig in signatures)).serialize())
    url_safe = str.maketrans("+/", "-_") if draw(st.booleans()) else {}
    entries = [
        {**draw(st.dictionaries(FIELD, JUNK, max_size=2)), "sig": entry["sig"].translate(url_safe), **hint}
        for entry in plain["signatures"]
        for hint in [draw(st.sampled_from([{}, {"keyid": None}]) | HINT.map(lambda keyid: {"keyid": keyid}))]
    ]
    value = {
        **draw(st.dictionaries(FIELD, JUNK, max_size=3)),
        "payload": plain["payload"].translate(url_safe),
        "payloadType": PAYLOAD_TYPE,
        "signatures": draw(st.permutations(entries)),
    }
    fields = draw(st.permutations(list(value.items())))
    space = draw(st.sampled_from([None, 0, 1, "\t"]))
    text = json.dumps(dict(fields), indent=space, ensure_ascii=draw(st.booleans()))
    return b"\n\r\t "[: draw(st.integers(0, 4))] + text.encode() + b" \n"[: draw(st.integers(0, 2))]


@many
@given(data=st.data(), place=PLACE, mask=MASK)
def test_what_stands_outside_the_signature_never_makes_a_rejected_manifest_accepted(
    signed: Signed, data: st.DataObject, place: int, mask: int
) -> None:
    good = signed.envelopes[0]
    message = pae(PAYLOAD_TYPE, good.payload)
    bad = [
        flipped(good.signatures[0].sig, place, mask),
        STRANGER.sign(message),
        KEYS[0].sign(good.payload),
        KEYS[1].sign(pae("", good.payload)),
        b"",
    ]
    chosen = data.draw(st.lists(st.sampled_from(bad), min_size=1, max_size=4))
    with pytest.raises((SignatureError, ManifestError)):
        loading.verify(
            signed.directory,
            manifest=data.draw(dressed(good.payload, chosen)),
            trust=[key.public for key in KEYS],
        )


@many
@given(data=st.data())
def test_what_stands_outside_the_signature_never_makes_a_good_manifest_another_one(
    signed: Signed, data: st.DataObject
) -> None:
    good = signed.envelopes[0]
    junk = data.draw(st.lists(st.sampled_from([b"", b"junk", STRANGER.sign(b"")]), max_size=3))
    manifest = data.draw(dressed(good.payload, [*junk, good.signatures[0].sig]))
    report = loading.verify(signed.directory, manifest=manifest, trust=[key.public for key in KEYS])
    assert [signer["keyid"] for signer in report.facts["manifest"]["signers"]] == [KEYS[0].public.keyid]
