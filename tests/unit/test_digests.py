"""Claims of `safeload.digests`: SHA-256 always, BLAKE3 where its package is."""

from __future__ import annotations

import hashlib
import sys

import pytest

from safeload.digests import CHUNK_BYTES, HASH_CHUNK_BYTES, has_blake3, new_hasher, sha256_hex
from safeload.errors import ConfigError


def test_sha256_is_that_of_fips_180_4() -> None:
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_hex(b"abc") == expected
    hasher = new_hasher("sha256")
    hasher.update(memoryview(b"ab"))
    hasher.update(memoryview(b"c"))
    assert (hasher.digest().hex(), hasher.hexdigest()) == (expected, expected)


def test_blake3_is_that_of_its_specification() -> None:
    pytest.importorskip("blake3")
    assert has_blake3()
    hasher = new_hasher("blake3")
    hasher.update(memoryview(b"abc"))
    assert hasher.hexdigest() == "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"
    assert len(hasher.digest()) == hashlib.sha256().digest_size


def test_without_its_package_there_is_no_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    assert not has_blake3()
    with pytest.raises(ConfigError, match=r"pip install '\.\[blake3\]' in its repository"):
        new_hasher("blake3")


def test_a_chunk_is_hashed_in_whole_pieces() -> None:
    assert CHUNK_BYTES % HASH_CHUNK_BYTES == 0
