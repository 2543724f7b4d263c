"""The index of a sharded checkpoint says which file holds which tensor, or is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safeload.errors import FormatError, LimitError
from safeload.formats import MemorySource
from safeload.formats.shard_index import is_index_name, parse_index
from safeload.tensors import ShardIndex
from tests.containers_sample import damaged
from tests.streams import DEFAULT, policy_with

FILES = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def dumped(value: object) -> bytes:
    return json.dumps(value, indent=2).encode()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json", "x.bin.index.json"])
def test_an_index_is_known_by_its_name(name: str) -> None:
    assert is_index_name(name)


@pytest.mark.parametrize("name", ["index.json", "model.index.json", "model.safetensors.index.json.bak", "config.json"])
def test_other_json_is_no_index(name: str) -> None:
    assert not is_index_name(name)


@pytest.mark.parametrize(
    ("metadata", "total"),
    [({}, None), ({"metadata": {}}, None), ({"metadata": {"total_size": 8, "more": ["x"]}}, 8)],
    ids=["none", "empty", "more"],
)
def test_what_an_index_says_is_kept(metadata: dict[str, object], total: int | None) -> None:
    parsed = parse_index(MemorySource(dumped({**metadata, "weight_map": FILES})), DEFAULT)
    assert parsed.refusal is None
    assert parsed.index == ShardIndex(FILES, total)
    assert (parsed.value, parsed.tensors) == (None, ())


def test_an_index_of_the_largest_published_models_is_read() -> None:
    files = {f"model.layers.{n}.weight": "model-00001-of-00163.safetensors" for n in range(92_000)}
    parsed = parse_index(MemorySource(dumped({"weight_map": files})), DEFAULT)
    assert parsed.index == ShardIndex(files, None)


def test_size_is_bounded_before_anything_is_read() -> None:
    class Unread(MemorySource):
        def read(self, offset: int, nbytes: int) -> bytes:
            raise AssertionError((offset, nbytes))

    raw = dumped({"weight_map": FILES})
    assert parse_index(MemorySource(raw), policy_with(limits={"max_inert_bytes": len(raw)})).refusal is None
    refusal = parse_index(Unread(raw), policy_with(limits={"max_inert_bytes": len(raw) - 1})).refusal
    assert type(refusal) is LimitError
    assert "`max_inert_bytes`" in (refusal.findings[0].hint or "")


def test_a_name_has_at_most_255_bytes() -> None:
    for name, is_accepted in (("é" * 127 + "a", True), ("é" * 128, False)):
        parsed = parse_index(MemorySource(dumped({"weight_map": {"a": name}})), DEFAULT)
        assert (parsed.refusal is None) is is_accepted


def test_a_tensor_has_a_name_of_at_most_1024_characters() -> None:
    for length, codes in ((1024, []), (1025, ["name-too-long"])):
        refusal = parse_index(MemorySource(dumped({"weight_map": {"é" * length: "a"}})), DEFAULT).refusal
        assert [finding.code for finding in (refusal.findings if refusal else ())] == codes


def test_a_cut_or_changed_index_is_refused_or_says_what_json_says() -> None:
    for raw in damaged(dumped({"metadata": {"total_size": 80}, "weight_map": FILES})):
        parsed = parse_index(MemorySource(raw), DEFAULT)
        if parsed.refusal is None:
            said = json.loads(raw)
            assert parsed.index == ShardIndex(said["weight_map"], said.get("metadata", {}).get("total_size"))
        else:
            assert type(parsed.refusal) is FormatError
            assert [finding.code for finding in parsed.refusal.findings] in (["bad-index"], ["name-too-long"])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), VALUES, max_size=3))
def test_any_json_is_refused_or_is_an_index(value: dict[str, object]) -> None:
    parsed = parse_index(MemorySource(json.dumps(value).encode()), DEFAULT)
    if parsed.refusal is None:
        assert parsed.index is not None
        assert parsed.index.files == value["weight_map"]
    else:
        assert type(parsed.refusal) is FormatError
