"""A bundle's index is read by one strict reader, and its data files hold what the index says and nothing else.

`REAL` was written by TensorFlow 2.21 itself (`tf.raw_ops.SaveV2` of one float32 and one bfloat16 tensor); everything
else by the writer in `tests.tensorflow_sample`.
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from safeload.digests import sha256_hex
from safeload.errors import FormatError, LimitError, PolicyError, RejectedError
from safeload.formats import MemorySource, Parsed
from safeload.formats import tensorflow as tf
from safeload.policy import Policy, load_policy
from safeload.scanning import scan
from safeload.tensors import ShardIndex
from tests import tensorflow_sample as sample
from tests.tensorflow_sample import BFLOAT16, FLOAT, HALF, INT8, INT64, STRING, Tensor

POLICY = load_policy("numpy-quantized")
DATA = "m.data-00000-of-00001"
REAL: Mapping[str, bytes] = {
    "m.data-00000-of-00001": bytes.fromhex("0000803f0000004000004040000080400000a0400000c040c03f00c0"),
    "m.index": bytes.fromhex(
        "00000608011a020801000a116c617965722f62696173080e12041202080220182804352e4a56f20606136b65726e656c0801"
        "120812020802120208032818357aebf5ab00000000010000000009df3fcd000000000100000000c0f2a1b00001026d004b00"
        "0000000100000000978d351550085d0e00000000000000000000000000000000000000000000000000000000000000000000"
        "000057fb808b247547db"
    ),
}


class Files:
    """A directory in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def read(self, name: str, limit: int) -> bytes | None:
        data = self.files.get(name)
        assert data is None or len(data) <= limit
        return data


def index_of(data: bytes, policy: Policy = POLICY) -> Parsed:
    return tf.parse_bundle_index(MemorySource(data), policy, "m.index")


def data_of(files: Mapping[str, bytes], name: str) -> Parsed:
    return tf.parse_bundle_data(MemorySource(files[name]), name, POLICY, Files(files))


def cause(parsed: Parsed) -> tuple[type[RejectedError], str]:
    assert parsed.refusal is not None
    assert not parsed.tensors
    assert parsed.index is None
    return type(parsed.refusal), parsed.refusal.findings[0].code


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


WEIGHTS = {
    "a": Tensor(FLOAT, (2, 3), floats(*range(6))),
    "b/bias": Tensor(INT8, (4,), b"\x01\x02\x03\x04"),
    "b/biases": Tensor(BFLOAT16, (2,), b"\xc0\x3f\x20\x40", shard=1),
    "c": Tensor(HALF, (), b"\x00\x3c", shard=1),
    "none": Tensor(FLOAT, (0, 3), b"", shard=1),
}


def rows(*more: tuple[bytes, bytes], head: bytes | None = None) -> list[tuple[bytes, bytes]]:
    return [(b"", sample.header() if head is None else head), *more]


def one(value: bytes, *, head: bytes | None = None) -> Parsed:
    """What is said of an index with one entry, called `w`."""
    return index_of(sample.table(rows((b"w", value), head=head)))


VALID = sample.entry(FLOAT, sample.shape_of(2), nbytes=8)


# ---------------------------------------------------------------- what is read


def test_what_tensorflow_writes_is_read() -> None:
    parsed = data_of(REAL, DATA)
    assert parsed.refusal is None
    kernel, bias = parsed.tensors
    assert (bias.name, bias.dtype.name, bias.shape, bias.order) == ("layer/bias", "bfloat16", (2,), "C")
    assert (kernel.name, kernel.dtype.name, kernel.shape, kernel.order) == ("layer/kernel", "float32", (2, 3), "C")
    data = REAL[DATA]
    assert data[kernel.extent.offset :][: kernel.extent.nbytes] == floats(1, 2, 3, 4, 5, 6)
    assert data[bias.extent.offset :][: bias.extent.nbytes] == b"\xc0\x3f\x00\xc0"
    assert index_of(REAL["m.index"]).index == ShardIndex({"layer/bias": DATA, "layer/kernel": DATA})


def test_a_sharded_bundle_is_read_as_it_was_written() -> None:
    files = sample.bundle("m", WEIGHTS, n_shards=2)
    first, second = data_of(files, "m.data-00000-of-00002"), data_of(files, "m.data-00001-of-00002")
    assert first.refusal is second.refusal is None
    found = {}
    for name, parsed in (("m.data-00000-of-00002", first), ("m.data-00001-of-00002", second)):
        assert list(parsed.value) == [spec.name for spec in parsed.tensors]  # type: ignore[arg-type] # a dict
        for spec in parsed.tensors:
            data = files[name][spec.extent.offset :][: spec.extent.nbytes]
            found[spec.name] = (spec.dtype.name, spec.shape, data)
    assert found == {
        "a": ("float32", (2, 3), WEIGHTS["a"].data),
        "b/bias": ("int8", (4,), WEIGHTS["b/bias"].data),
        "b/biases": ("bfloat16", (2,), WEIGHTS["b/biases"].data),
        "c": ("float16", (), WEIGHTS["c"].data),
        "none": ("float32", (0, 3), b""),
    }


def test_an_index_says_which_file_holds_what() -> None:
    parsed = index_of(sample.bundle("m", WEIGHTS, n_shards=2)["m.index"])
    assert parsed.refusal is None
    assert parsed.index is not None
    first, second = "m.data-00000-of-00002", "m.data-00001-of-00002"
    assert parsed.index.files == {"a": first, "b/bias": first, "b/biases": second, "c": second, "none": second}


@pytest.mark.parametrize("per_block", [1, 2, 15, 16, 17, 1000])
def test_prefixes_restarts_and_blocks_do_not_change_what_is_read(per_block: int) -> None:
    many = {f"layer_{i:03d}/kernel": Tensor(FLOAT, (1,), floats(i)) for i in range(50)}
    files = sample.bundle("m", many, per_block=per_block)
    parsed = data_of(files, "m.data-00000-of-00001")
    assert parsed.refusal is None
    assert [spec.name for spec in parsed.tensors] == sorted(many)
    assert [spec.extent.offset for spec in parsed.tensors] == [4 * i for i in range(50)]


def test_payloads_may_be_padded_with_zeros_up_to_a_page() -> None:
    files = sample.bundle("m", {"a": WEIGHTS["b/bias"], "b": WEIGHTS["b/bias"]}, align=4096)
    parsed = data_of(files, "m.data-00000-of-00001")
    assert parsed.refusal is None
    assert [spec.extent.offset for spec in parsed.tensors] == [0, 4096]


def test_a_big_endian_bundle_says_so_of_each_tensor() -> None:
    head = sample.header(endianness=1)
    data = sample.table(rows((b"w", VALID), (b"x", sample.entry(INT8, b"", offset=8, nbytes=1)), head=head))
    parsed = data_of({"m.index": data, "m.data-00000-of-00001": bytes(9)}, "m.data-00000-of-00001")
    assert [spec.dtype.big_endian for spec in parsed.tensors] == [True, False]


def graph(data: bytes, nbytes: int | None = None) -> Parsed:
    """What is said of a data file that holds the object graph alone."""
    value = sample.entry(STRING, b"", nbytes=len(data) if nbytes is None else nbytes)
    files = {"m.index": sample.table(rows((tf.OBJECT_GRAPH_KEY.encode(), value))), "m.data-00000-of-00001": data}
    assert index_of(files["m.index"]).index == ShardIndex({})
    return data_of(files, "m.data-00000-of-00001")


def test_the_object_graph_of_tensorflow_2_is_let_by_and_not_handed_out() -> None:
    parsed = graph(b"\x05abcdhello")
    assert parsed.refusal is None
    assert parsed.tensors == ()
    assert parsed.value == {}


@pytest.mark.parametrize("data", [b"\x04abcdhello", b"\x06abcdhello", b"\x80", b"\x05abc", b"\x85\x00abcdhello"])
def test_the_object_graph_is_one_string_of_its_length(data: bytes) -> None:
    assert cause(graph(data)) == (FormatError, "bundle-extent")


# ---------------------------------------------------------------- what is refused in the index


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_cut_index_is_refused(cut: int) -> None:
    whole = sample.bundle("m", WEIGHTS, n_shards=2)["m.index"]
    for data in (whole[:-cut], whole[cut:]):
        assert cause(index_of(data))[0] is FormatError


def test_each_byte_of_an_index_is_held_by_something() -> None:
    whole = sample.bundle("m", WEIGHTS, n_shards=2)["m.index"]
    for at in range(len(whole)):
        for flip in (1, 0x80, 0xFF):
            changed = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
            assert index_of(changed).refusal is not None, at


BLOCK = sample.block(rows((b"w", VALID)))


def table_with(body: bytes, key: bytes = b"w") -> bytes:
    return sample.table_of_blocks([(key, body)])


def restarted(body: bytes, *restarts: int) -> bytes:
    return body[: -8 if len(body) > 8 else 0] + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(sample.MAGIC, id="magic alone"),
        pytest.param(table_with(BLOCK)[:-8] + bytes(8), id="no magic"),
        pytest.param(sample.table_of_blocks([(b"w", BLOCK)], tail=b"\1"), id="byte in the footer"),
        pytest.param(sample.table_of_blocks([(b"w", BLOCK)], meta=BLOCK), id="filter block"),
        pytest.param(table_with(BLOCK, b"v"), id="index key before the last key"),
        pytest.param(sample.table_of_blocks([(b"x", BLOCK), (b"y", sample.block([(b"x", VALID)]))]), id="next too low"),
        pytest.param(sample.table_of_blocks([(b"w", BLOCK), (b"w", BLOCK)]), id="block twice"),
        pytest.param(sample.table_of_blocks([(b"w", BLOCK), (b"x", sample.block([]))]), id="empty block"),
        pytest.param(table_with(sample.block(rows((b"w", VALID), (b"w", VALID)))), id="key twice"),
        pytest.param(table_with(sample.block(rows((b"w", VALID), (b"v", VALID))), b"x"), id="keys descend"),
        pytest.param(table_with(restarted(BLOCK, 3)), id="first restart is not 0"),
        pytest.param(table_with(restarted(BLOCK, 0, 1)), id="restart in an entry"),
        pytest.param(table_with(restarted(BLOCK, 0, 0)), id="restart twice"),
        pytest.param(table_with(BLOCK[:-4] + bytes(4)), id="no restart"),
        pytest.param(table_with(BLOCK[:-4] + b"\xff\xff\xff\xff"), id="restarts beyond the block"),
        pytest.param(table_with(b"\0\0\0\0"), id="block too short"),
        pytest.param(table_with(b"\0\0\0"), id="block shorter than a number"),
        pytest.param(table_with(sample.block([]), b""), id="no entries"),
        pytest.param(table_with(restarted(b"\1\0\0" + bytes(8), 0)), id="shares a prefix with nothing"),
        pytest.param(table_with(restarted(b"\0\2\0a" + bytes(8), 0)), id="key ends behind its block"),
        pytest.param(table_with(sample.block(rows((b"w" * 4097, VALID))), b"x"), id="key too long"),
        pytest.param(
            table_with(
                restarted(
                    sample.block(rows((b"va", VALID), (b"vb", VALID))), 0, 3 + len(sample.header()) + 5 + len(VALID)
                ),
                b"vb",
            ),
            id="restart at a shared prefix",
        ),
    ],
)
def test_a_broken_table_is_refused(data: bytes) -> None:
    assert cause(index_of(data)) == (FormatError, "bad-table")


def moved(*, before_meta: bytes = b"", before_index: bytes = b"", before_footer: bytes = b"") -> bytes:
    """A table with bytes between its blocks, and handles that say where these are."""
    meta, index = sample.block([]), sample.block([(b"w", sample.handle(0, len(BLOCK)))], interval=1)
    out = BLOCK + sample.trailer(BLOCK) + before_meta
    handles = sample.handle(len(out), len(meta))
    out += meta + sample.trailer(meta) + before_index
    handles += sample.handle(len(out), len(index))
    return out + index + sample.trailer(index) + before_footer + handles.ljust(40, b"\0") + sample.MAGIC


@pytest.mark.parametrize("where", ["before_meta", "before_index", "before_footer"])
def test_nothing_hides_between_the_blocks_at_the_end(where: str) -> None:
    assert index_of(moved()).refusal is None
    assert cause(index_of(moved(**{where: b"\0"}))) == (FormatError, "bad-table")


def test_a_table_without_blocks_is_no_bundle() -> None:
    assert cause(index_of(sample.table_of_blocks([]))) == (FormatError, "bad-bundle")


def test_blocks_leave_no_gap() -> None:
    body = BLOCK + sample.trailer(BLOCK)
    meta = sample.block([])
    rest = meta + sample.trailer(meta)
    index = sample.block([(b"w", sample.handle(1, len(BLOCK)))], interval=1)
    out = b"\0" + body + rest + index + sample.trailer(index)
    ends = sample.handle(1 + len(body), len(meta)) + sample.handle(1 + len(body) + len(rest), len(index))
    assert cause(index_of(out + ends.ljust(40, b"\0") + sample.MAGIC)) == (FormatError, "bad-table")


def test_a_wrong_checksum_is_refused_at_its_block() -> None:
    whole = table_with(BLOCK)
    parsed = index_of(bytes([whole[0] ^ 1]) + whole[1:])
    assert cause(parsed) == (FormatError, "table-checksum")
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].offset == 0


@pytest.mark.parametrize(("kind", "noun"), [(1, "Snappy"), (2, "zlib"), (7, "type 7")])
def test_a_compressed_block_is_refused_by_name(kind: int, noun: str) -> None:
    whole = table_with(BLOCK)
    parsed = index_of(BLOCK + sample.trailer(BLOCK, kind) + whole[len(BLOCK) + 5 :])
    assert cause(parsed) == (PolicyError, "format-not-supported")
    assert noun in str(parsed.refusal)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(VALID + sample.field(8, 1), "bad-protobuf", id="unknown field"),
        pytest.param(VALID + sample.field(1, 1), "bad-protobuf", id="field twice"),
        pytest.param(VALID + sample.field(2, b""), "bad-protobuf", id="message twice"),
        pytest.param(VALID + sample.field(3, b""), "bad-protobuf", id="wrong wire type"),
        pytest.param(sample.entry(FLOAT, b"")[:-1], "bad-protobuf", id="cut in a fixed number"),
        pytest.param(b"\x12\x05", "bad-protobuf", id="message behind its end"),
        pytest.param(b"\x08\x81\x00", "bad-varint", id="number with a byte too many"),
        pytest.param(b"\x08" + b"\xff" * 9 + b"\x02", "bad-varint", id="more than 64 bits"),
        pytest.param(b"\x08" + b"\xff" * 10 + b"\x01", "bad-varint", id="eleven bytes"),
        pytest.param(b"\x08", "bad-varint", id="no number"),
        pytest.param(sample.entry(FLOAT, sample.field(3, 1)), "bad-bundle", id="unknown rank"),
        pytest.param(sample.entry(FLOAT, sample.shape_of(*[1] * 33), nbytes=4), "bad-bundle", id="33 dimensions"),
        pytest.param(sample.entry(FLOAT, sample.shape_of((1 << 64) - 1)), "bad-bundle", id="length -1"),
        pytest.param(sample.entry(FLOAT, sample.shape_of(0, 1 << 59)), "bad-bundle", id="too many but for a zero"),
        pytest.param(sample.entry(FLOAT, sample.shape_of(2), nbytes=4), "bundle-extent", id="too few bytes"),
        pytest.param(sample.entry(FLOAT, sample.shape_of(2), nbytes=9), "bundle-extent", id="too many bytes"),
        pytest.param(sample.entry(FLOAT, b"", 1, nbytes=4), "bundle-extent", id="no such data file"),
        pytest.param(sample.entry(FLOAT, b"", 0, (1 << 63) - 3, 4), "bundle-extent", id="ends behind 2**63"),
    ],
)
def test_a_broken_entry_is_refused(value: bytes, expected: str) -> None:
    assert cause(one(value)) == (FormatError, expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(sample.entry(STRING, b"", nbytes=6), "bundle-dtype", id="strings"),
        pytest.param(sample.entry(sample.QINT8, b"", nbytes=1), "bundle-dtype", id="quantized"),
        pytest.param(sample.entry(20, b"", nbytes=1), "bundle-dtype", id="resource"),
        pytest.param(sample.entry(29, b"", nbytes=1), "bundle-dtype", id="int4"),
        pytest.param(sample.entry(0, b""), "bundle-dtype", id="no type"),
        pytest.param(sample.entry(99, b""), "bundle-dtype", id="type to come"),
        pytest.param(VALID + sample.field(7, b""), "bundle-sliced", id="slices"),
    ],
)
def test_what_is_no_tensor_of_numbers_is_refused_by_name(value: bytes, expected: str) -> None:
    assert cause(one(value)) == (PolicyError, expected)


def test_a_piece_of_a_variable_is_refused_by_its_key() -> None:
    data = sample.table(rows((b"\0\1w\0\1", VALID)))
    assert cause(index_of(data)) == (PolicyError, "bundle-sliced")


def test_strings_are_let_by_only_under_the_name_of_the_object_graph_and_as_a_scalar() -> None:
    key = tf.OBJECT_GRAPH_KEY.encode()
    for name, shape in ((key + b"2", b""), (key, sample.shape_of(1))):
        data = sample.table(rows((name, sample.entry(STRING, shape, nbytes=6))))
        assert cause(index_of(data)) == (PolicyError, "bundle-dtype")


def test_big_endian_bfloat16_is_refused_because_nothing_could_read_it() -> None:
    value = sample.entry(BFLOAT16, b"", nbytes=2)
    assert one(value).refusal is None
    assert cause(one(value, head=sample.header(endianness=1))) == (PolicyError, "bundle-dtype")


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (sample.header(0), (FormatError, "bad-bundle")),
        (sample.header(100_000), (FormatError, "bad-bundle")),
        (sample.header(endianness=2), (FormatError, "bad-bundle")),
        (sample.header(version=sample.field(1, 2)), (PolicyError, "format-not-supported")),
        (sample.header(version=sample.field(2, 2)), (PolicyError, "format-not-supported")),
        (sample.header(version=sample.field(3, 1)), (PolicyError, "format-not-supported")),
    ],
)
def test_a_header_of_another_kind_is_refused(head: bytes, expected: tuple[type[RejectedError], str]) -> None:
    assert cause(one(VALID, head=head)) == expected


def test_a_table_without_the_header_is_no_bundle() -> None:
    assert cause(index_of(sample.table([(b"w", VALID)]))) == (FormatError, "bad-bundle")


def test_a_name_is_utf8() -> None:
    assert cause(index_of(sample.table(rows((b"\xff", VALID))))) == (FormatError, "bad-bundle")


def test_payloads_do_not_overlap() -> None:
    at_zero, inside = sample.entry(FLOAT, sample.shape_of(2), nbytes=8), sample.entry(FLOAT, b"", offset=4, nbytes=4)
    data = sample.table(rows((b"a", at_zero), (b"b", inside)))
    assert cause(index_of(data)) == (FormatError, "bundle-overlap")
    empty = sample.entry(FLOAT, sample.shape_of(0), offset=4)
    assert cause(index_of(sample.table(rows((b"a", at_zero), (b"b", empty))))) == (FormatError, "bundle-overlap")
    beside = sample.entry(FLOAT, b"", 1, 4, 4)
    assert index_of(sample.table(rows((b"a", at_zero), (b"b", beside), head=sample.header(2)))).refusal is None


def limited(**limits: int) -> Policy:
    return POLICY.model_copy(update={"limits": POLICY.limits.model_copy(update=limits)})


def test_an_index_is_bounded_in_entries_in_the_length_of_its_names_and_in_its_own() -> None:
    empty = sample.entry(FLOAT, sample.shape_of(0))
    data = sample.table(rows(*((b"w" * n, empty) for n in range(1, 40))))
    assert index_of(data, limited(max_values=39, max_inline_bytes=len(data))).refusal is None
    assert cause(index_of(data, limited(max_values=38))) == (LimitError, "limit-exceeded")
    short = sample.table(rows((b"w", empty)))
    assert index_of(short, limited(max_inline_bytes=len(short))).refusal is None
    assert cause(index_of(short, limited(max_inline_bytes=len(short) - 1))) == (LimitError, "limit-exceeded")
    # Keys that share all but their last byte are long in memory and short in the file.
    long = sample.table(rows(*((b"w" * 400 + bytes([n]), empty) for n in range(1, 100))))
    assert len(long) < 10_000 < 400 * 100
    parsed = index_of(long, limited(max_inline_bytes=len(long)))
    assert cause(parsed) == (LimitError, "limit-exceeded")
    assert "max_inline_bytes" in str(parsed.refusal)


# ---------------------------------------------------------------- what is refused in a data file


@pytest.fixture
def files() -> dict[str, bytes]:
    return sample.bundle("m", {"a": WEIGHTS["a"], "b": WEIGHTS["b/bias"]})


def test_a_data_file_needs_its_index_beside_it(files: dict[str, bytes]) -> None:
    del files["m.index"]
    assert cause(data_of(files, DATA)) == (FormatError, "bundle-index-missing")


def test_a_data_file_shares_the_fate_of_its_index_and_points_at_no_byte_of_its_own(files: dict[str, bytes]) -> None:
    files["m.index"] = files["m.index"][:-1]
    parsed = data_of(files, DATA)
    assert cause(parsed) == (FormatError, "bad-table")
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].offset is None
    assert parsed.refusal.findings[0].message.startswith("its index: ")


@pytest.mark.parametrize("name", ["m.data-00001-of-00001", "m.data-00000-of-00002", "m.data-00002-of-00002"])
def test_the_name_of_a_data_file_is_one_that_the_index_counts(files: dict[str, bytes], name: str) -> None:
    files[name] = files[DATA]
    assert cause(data_of(files, name)) == (FormatError, "bundle-file-name")


def test_a_data_file_is_called_like_one(files: dict[str, bytes]) -> None:
    files["m.data-0-of-1"] = files[DATA]
    assert cause(data_of(files, "m.data-0-of-1")) == (FormatError, "bundle-file-name")


@pytest.mark.parametrize("cut", [1, 4, 5, 27, 28])
def test_a_data_file_that_is_cut_short_is_refused(files: dict[str, bytes], cut: int) -> None:
    files[DATA] = files[DATA][:-cut]
    assert cause(data_of(files, DATA)) == (FormatError, "bundle-extent")


@pytest.mark.parametrize("more", [b"\1", b"\0\1", bytes(4096), bytes(4095) + b"\1", b"\x80\x04N."])
def test_bytes_behind_the_last_payload_are_refused_but_for_few_zeros(files: dict[str, bytes], more: bytes) -> None:
    files[DATA] += bytes(4095)
    assert data_of(files, DATA).refusal is None
    files[DATA] = files[DATA][:-4095] + more
    assert cause(data_of(files, DATA)) == (FormatError, "bundle-unlisted-bytes")


def test_bytes_between_payloads_are_refused_but_for_zeros() -> None:
    files = sample.bundle("m", {"a": WEIGHTS["b/bias"], "b": WEIGHTS["b/bias"]}, align=16)
    assert data_of(files, DATA).refusal is None
    files[DATA] = files[DATA][:9] + b"!" + files[DATA][10:]
    parsed = data_of(files, DATA)
    assert cause(parsed) == (FormatError, "bundle-unlisted-bytes")
    assert parsed.refusal is not None
    assert parsed.refusal.findings[0].offset == 4


def test_two_bundles_of_one_directory_are_told_apart() -> None:
    both = {**sample.bundle("m", {"a": WEIGHTS["a"]}), **sample.bundle("n", {"i": Tensor(INT64, (1,), bytes(8))})}
    assert [spec.name for spec in data_of(both, "n.data-00000-of-00001").tensors] == ["i"]
    assert [spec.name for spec in data_of(both, DATA).tensors] == ["a"]


def test_crc32c_is_that_of_the_rfc() -> None:
    # RFC 3720, B.4: 32 bytes of zeros, of ones, and ascending.
    assert tf.crc32c(bytes(32)) == 0x8A9136AA
    assert tf.crc32c(b"\xff" * 32) == 0x62A8AB43
    assert tf.crc32c(bytes(range(32))) == 0x46DD794E


@given(
    changes=st.lists(st.tuples(st.integers(0, len(BLOCK) - 1), st.integers(0, 255)), max_size=4),
    head=st.binary(max_size=3),
)
def test_a_block_of_any_bytes_with_its_checksum_is_refused_or_lies_inside(
    changes: list[tuple[int, int]], head: bytes
) -> None:
    body = bytearray(head + BLOCK)
    for at, byte in changes:
        body[at] = byte
    files = {"m.index": table_with(bytes(body)), DATA: bytes(8)}
    parsed = data_of(files, DATA)
    for spec in parsed.tensors:
        assert spec.extent.nbytes == spec.n_elements * spec.dtype.itemsize
        assert 0 <= spec.extent.offset <= spec.extent.offset + spec.extent.nbytes <= 8
    event("accepted" if parsed.refusal is None else "refused")


@given(st.binary(max_size=200))
def test_any_bytes_before_the_magic_number_are_refused(data: bytes) -> None:
    assert index_of(data + sample.MAGIC).refusal is not None


def test_an_index_of_many_shards_is_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """99,999 shards that each go through a quarter of a million entries would take minutes."""
    bundle = vars(tf)["_Bundle"]
    real = bundle.check_places
    looked: list[int] = []

    def check_places(self: object, shard: int) -> object:
        looked.append(shard)
        return real(self, shard)

    monkeypatch.setattr(bundle, "check_places", check_places)
    rows = [(b"", sample.header(99_999)), (b"a", sample.entry(FLOAT, sample.shape_of(0), 7))]
    rows.append((b"b", sample.entry(FLOAT, sample.shape_of(0), 99_998)))
    assert tf.parse_bundle_index(MemorySource(sample.table(rows)), POLICY).refusal is None
    assert looked == [7, 99_998]


@pytest.mark.parametrize(
    "places",
    [(9,), (0, 5), (0, 9, 9), (0, 0), (9, 0), (0, 9, 5), (0, 9, 24), (0, 9, 1 << 31)],
    ids=["not the first", "within one", "twice", "the first twice", "backwards", "back inside", "the end", "far"],
)
def test_a_search_starts_at_entries_in_their_order(places: tuple[int, ...]) -> None:
    def table_with(*places: int) -> bytes:
        """Entries at bytes 0 and 9 of the block, which end at byte 24."""
        value = sample.entry(FLOAT, sample.shape_of(0))
        entries = b"\0\0" + sample.varint(6) + sample.header() + b"\0\1" + sample.varint(len(value)) + b"w" + value
        assert (entries.index(b"\0\1" + sample.varint(len(value))), len(entries)) == (9, 24)
        return sample.table_of_blocks([(b"w", entries + struct.pack(f"<{len(places) + 1}I", *places, len(places)))])

    assert index_of(table_with(0)).refusal is None
    assert index_of(table_with(0, 9)).refusal is None
    assert cause(index_of(table_with(*places))) == (FormatError, "bad-table")


@pytest.mark.parametrize("name", ["tensor00000_000", "m.safetensors", "m.index.bak"])
def test_an_index_under_another_name_is_refused(name: str) -> None:
    parsed = tf.parse_bundle_index(MemorySource(REAL["m.index"]), POLICY, name)
    assert cause(parsed) == (FormatError, "bundle-file-name")


def peak_of(data: bytes) -> tuple[Parsed, int]:
    """What is said of an index, and how many bytes that took at the worst, the index itself aside."""
    index_of(REAL["m.index"])  # what is made once
    tracemalloc.start()
    try:
        return index_of(data), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LONG_KEY = b"k" * 4093


def long_keys(count: int, value: bytes) -> bytes:
    """A block whose keys have 4096 bytes each, all but three of them shared with the one before."""
    block = sample.varint(0) + sample.varint(4096) + sample.varint(len(value)) + LONG_KEY + bytes(3) + value
    head = sample.varint(4093) + sample.varint(3) + sample.varint(len(value))
    block += b"".join(
        head + bytes([number >> 14, number >> 7 & 127, number & 127]) + value for number in range(1, count)
    )
    return block + struct.pack("<II", 0, 1)


def test_long_keys_of_a_block_are_not_held_before_somebody_counts_them() -> None:
    """9 GB of keys would fit into an index of 16 MiB."""
    data = sample.table_of_blocks([(b"z", long_keys(3_000, b""))])
    parsed, peak = peak_of(data)
    assert cause(parsed) == (FormatError, "bad-bundle")
    assert peak < 1_000_000


@pytest.mark.parametrize("character", ["n", "\U0001f600"])
def test_a_name_is_as_long_as_in_every_other_format(character: str) -> None:
    empty = sample.entry(FLOAT, sample.shape_of(0))
    assert index_of(sample.table(rows(((character * 1024).encode(), empty)))).refusal is None
    longer = index_of(sample.table(rows((b"n" * 1025, empty))))
    assert cause(longer) == (FormatError, "name-too-long")


def test_long_keys_of_the_index_block_are_not_held_either() -> None:
    meta = sample.block([])
    body = meta + sample.trailer(meta)
    index = long_keys(3_000, sample.handle(0, len(meta)))
    handles = sample.handle(0, len(meta)) + sample.handle(len(body), len(index))
    body += index + sample.trailer(index)
    parsed, peak = peak_of(body + handles.ljust(40, b"\0") + sample.MAGIC)
    assert cause(parsed) == (FormatError, "bad-table")
    assert peak < 1_000_000


@pytest.mark.parametrize("field", [2, 7], ids=["dimensions", "slices"])
def test_a_message_of_many_parts_is_refused_without_holding_them(field: int) -> None:
    """A gigabyte of places would fit into an index of 16 MiB."""
    many = sample.field(2, b"") * 20_000
    value = sample.entry(FLOAT, many) if field == 2 else VALID + sample.field(7, b"") * 20_000
    parsed, peak = peak_of(sample.table(rows((b"w", value))))
    assert cause(parsed) == ((FormatError, "bad-bundle") if field == 2 else (PolicyError, "bundle-sliced"))
    assert peak < 1_000_000


def test_places_to_start_from_are_not_held() -> None:
    head = sample.varint(0) * 2 + sample.varint(len(sample.header())) + sample.header()
    places = struct.pack("<10000I", *range(0, 40_000, 4))
    data = sample.table_of_blocks([(b"z", head + places + struct.pack("<I", 10_000))])
    parsed, peak = peak_of(data)
    assert cause(parsed) == (FormatError, "bad-table")
    assert peak < 500_000


def fresh_memory(monkeypatch: pytest.MonkeyPatch, *, entries: int) -> list[str]:
    """Give the module an empty memory of so many entries, and return the list of what it parses from now on."""
    real = vars(tf)["_bundle"]
    parsed: list[str] = []

    def bundle(data: bytes, *limits: int) -> object:
        parsed.append(sha256_hex(data))
        return real(data, *limits)

    monkeypatch.setattr(tf, "_bundle", bundle)
    monkeypatch.setattr(tf, "MAX_REMEMBERED_ENTRIES", entries)
    monkeypatch.setattr(tf, "_REMEMBERED", vars(tf)["_Remembered"]())
    return parsed


def named(name: bytes, n_entries: int = 1) -> bytes:
    empty = sample.entry(FLOAT, sample.shape_of(0))
    return sample.table(rows(*((name + b"%05d" % number, empty) for number in range(n_entries))))


def test_the_indexes_used_last_are_remembered_up_to_a_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = fresh_memory(monkeypatch, entries=1000)
    a, b, c, long = named(b"a", 400), named(b"b", 400), named(b"c", 400), named(b"d", 1500)
    for data, n_parsed in [(a, 1), (b, 2), (a, 2), (c, 3), (a, 3), (b, 4), (long, 5), (long, 5), (b, 6)]:
        assert index_of(data).refusal is None
        assert len(parsed) == n_parsed


def test_small_indexes_and_refused_ones_are_forgotten_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_memory(monkeypatch, entries=1000)
    for number in range(50):
        assert index_of(named(b"%d" % number)).refusal is None
        assert cause(index_of(b"%d" % number + sample.MAGIC)) == (FormatError, "bad-table")
    assert 5 <= len(vars(vars(tf)["_REMEMBERED"])["_readings"]) <= 10
    # A long one is held with its bytes, and counts by them where it has no entries.
    assert cause(index_of(bytes(120_000) + sample.MAGIC)) == (FormatError, "table-checksum")
    assert len(vars(vars(tf)["_REMEMBERED"])["_readings"]) == 1


def test_an_index_is_judged_by_the_limits_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = fresh_memory(monkeypatch, entries=1000)
    limits = POLICY.limits.model_copy(update={"max_values": 3})
    strict = POLICY.model_copy(update={"limits": limits})
    data = named(b"a", 4)
    assert index_of(data).refusal is None
    assert cause(index_of(data, strict)) == (LimitError, "limit-exceeded")
    assert cause(index_of(data, strict)) == (LimitError, "limit-exceeded")
    assert len(parsed) == 2


def test_a_bundle_on_disk_has_digests_whatever_lies_behind_its_first_payload(tmp_path: Path) -> None:
    """TensorFlow 2 writes the object graph, which is no tensor, among the payloads; others pad them."""
    text = b"graph" * 10
    string = bytes([len(text)]) + b"crc!" + text
    first, second = np.arange(3, dtype="<f4"), np.arange(5, dtype="<i8")
    at = len(first.tobytes()) + len(string)
    rows = [
        (b"", sample.header()),
        (b"A", sample.entry(FLOAT, sample.shape_of(3), 0, 0, 12)),
        (tf.OBJECT_GRAPH_KEY.encode(), sample.entry(STRING, b"", 0, 12, len(string))),
        (b"v", sample.entry(INT64, sample.shape_of(5), 0, at + 3, 40)),
    ]
    (tmp_path / "m.index").write_bytes(sample.table(rows))
    data = first.tobytes() + string + bytes(3) + second.tobytes() + bytes(2)
    (tmp_path / DATA).write_bytes(data)
    report = scan(tmp_path, digests=True)
    assert report.is_accepted, report.all_findings
    digests = {spec.name: spec.sha256 for file in report.files for spec in file.tensors}
    assert digests == {"A": sha256_hex(first.tobytes()), "v": sha256_hex(second.tobytes())}
    assert {file.sha256 for file in report.files if file.tensors} == {sha256_hex(data)}
