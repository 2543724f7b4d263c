"""Vectors of npy, npz, safetensors, indexes of shards and GGUF. See `tests.vectors.generate`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any

from tests.containers_sample import (
    Member,
    descriptor,
    extra,
    gguf,
    info,
    npy,
    pair,
    safetensors,
    stated,
    text,
    zip64,
    zip_file,
)
from tests.vectors.generate import FORMAT, LIMIT, POLICY, Vector

LOCAL, CENTRAL, END, END64 = b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6"


class Section:
    """Vectors of one kind of file."""

    def __init__(self, prefix: str, file: str) -> None:
        self.prefix = prefix
        self.file = file
        self.made: list[Vector] = []

    def add(
        self, title: str, code: str, raw: bytes, at: int | bytes, comment: str = "", *, by: str = FORMAT, **options: str
    ) -> None:
        """Add one; `at` is an offset, from the end where it is negative, or the bytes that stand there."""
        if isinstance(at, bytes):
            assert raw.count(at) == 1, (title, at)
            at = raw.index(at)
        at = at + len(raw) if at < 0 else at
        self.made.append(Vector(f"{self.prefix}-{title}", by, code, comment, raw, at, file=self.file, **options))


def header(descr: str = "'<f4'", order: str = "False", shape: str = "(2, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


def arrays() -> Iterator[Vector]:
    section = Section("npy", "a.npy")
    whole = npy()
    bad = "npy-bad-header"
    section.add("version", bad, npy(version=(4, 0)), 0, "version 4.0")
    section.add("expression", bad, npy(header(shape="(__import__('os'), )")), b"__import__", "a call as a dimension")
    section.add("arithmetic", bad, npy(header(shape="(10**10, )")), b"**", "an expression as a dimension")
    section.add("negative", bad, npy(header(shape="(-1, 3)")), b"-1", "a negative dimension")
    section.add("octal", bad, npy(header(shape="(010, )")), b"10, )", "a number with a zero in front")
    section.add("dimension-long", bad, npy(header(shape=f"(1{'1' * 18}7, )")), b"7, )", "20 digits")
    section.add("shape-number", bad, npy(header(shape="(6)")), b"), }", "(6) is a number to Python")
    section.add("shape-list", bad, npy(header(shape="[6]")), b"[6]", "a list")
    section.add("order", bad, npy(header(order="1")), b"1, ", "1 for True")
    section.add("no-dict", bad, npy("('descr', )"), b"('descr'", "a tuple")
    section.add("no-colon", bad, npy("{'descr', }"), b", }", "a set")
    section.add("no-comma", bad, npy(header().replace("False, ", "False ")), b"'shape'", "two items in a row")
    section.add("colon-missing", bad, npy(header().replace("'descr':", "'descr'")), b"'<f4'", "a key and its value")
    section.add("brace-missing", bad, npy(header()[1:]), b"'descr'", "no brace in front")
    section.add("brace-open", bad, npy(header()[:-3]), -25, "no brace behind")
    section.add("parenthesis-missing", bad, npy(header(shape="2, 3)")), b"2, 3)", "no parenthesis in front")
    section.add("parenthesis-open", bad, npy(header(shape="(2, 3")), b"}", "no parenthesis behind")
    section.add("double-quotes", bad, npy(header('"<f4"')), b'"<f4"', "numpy writes single quotes")
    section.add("key-twice", bad, npy("{'descr': '<f4', 'descr': 'x', }"), b"'descr': 'x'", "descr twice")
    section.add("key-missing", bad, npy("{'descr': '<f4', 'fortran_order': False}"), 10 + 40, "no shape")
    section.add("key-unknown", bad, npy(header()[:-1] + "'x': 1}"), b"'x': 1}", "a fourth key")
    section.add("behind-dict", bad, npy(header() + " # x"), b" # x", "a comment behind the dict")
    section.add("no-line-feed", bad, npy(header().encode()), -24, "nothing behind the dict")
    section.add("header-long", bad, npy(b" " * 10_001), 8, "10,001 bytes")
    section.add("cut-magic", "truncated", whole[:9], 0)
    section.add("cut-header", "truncated", whole[:60], -1 + 61)
    section.add("cut", "truncated", whole[:-1], len(whole) - 1, "one byte short")
    section.add("behind", "npy-data-behind", whole + b"\0", -1, "one byte long")
    for title, descr in (
        ("object", "'|O'"),
        ("text", "'<U2'"),
        ("dates", "'<M8[D]'"),
        ("void", "'|V2'"),
        ("longdouble", "'<f16'"),
        ("native", "'=f4'"),
        ("order-of-byte", "'<i1'"),
        ("no-order", "'|f4'"),
        ("strange", "'\u00e9'"),
    ):
        section.add(title, "npy-dtype", npy(header(descr)), 10, "no numbers as numpy spells them", by=POLICY)
    section.add("fields", "npy-dtype", npy(header("[('a', '<f4')]")), b"[(", "a record", by=POLICY)
    shape = str((1 << 40,) * 2)
    section.add("overflow", "bad-shape", npy(header(shape=shape)), 10, "2**80 elements")
    shape = str((0, 1 << 40, 1 << 40))
    section.add("overflow-empty", "bad-shape", npy(header(shape=shape), b""), 10, "0 times 2**80 elements")
    section.add("rank", "bad-shape", npy(header(shape=str((1,) * 33)), bytes(4)), 10, "33 dimensions")
    yield from section.made


def ends_of_archives() -> Iterator[Vector]:
    section = Section("zip", "a.npz")
    bad = "zip-bad-end"
    section.add("comment", bad, zip_file(end={"n_comment": 1}, behind=b"x"), -22, "a comment")
    section.add("comment-claimed", bad, zip_file(end={"n_comment": 1}), END, "a comment that is not there")
    section.add("behind", bad, zip_file(behind=b"\0"), -22, "a byte behind the end record")
    section.add("short", bad, LOCAL, 0, "no room for an end record")
    section.add("disks", bad, zip_file(end={"disk": 1}), END, "two parts")
    section.add("count-here", bad, zip_file(end={"n_here": 2}), END, "numbers that differ")
    section.add("before-end", bad, zip_file(before_end=b"x"), END, "a byte before the end record")
    section.add("no-zip64", bad, zip_file(end={"n_here": 65535, "n_all": 65535}), END, "65,535 members")
    section.add("zip64-locator", bad, zip_file(locator={"at": 0}), b"PK\6\7", "it points elsewhere")
    section.add("zip64-disks", bad, zip_file(locator={"n_disks": 2}), b"PK\6\7", "two parts")
    section.add("zip64-extended", bad, zip_file(end64={"rest": 45}), END64, "a longer record")
    section.add("zip64-count", bad, zip_file(end64={"n_here": 2}), END64, "numbers that differ")
    section.add("zip64-disagrees", bad, zip_file(end64={"n_here": 2, "n_all": 2}), END, "one record says 1, one says 2")
    hidden = zip_file(end64={"start": 3}, end={"start": 0xFFFFFFFF})
    section.add("zip64-directory", bad, hidden, END64, "the directory does not end there")
    yield from section.made


def entries() -> Iterator[Vector]:
    section = Section("zip", "a.npz")
    bad = "zip-bad-entry"

    def add(
        title: str, comment: str, code: str = bad, at: bytes | int = CENTRAL, by: str = FORMAT, **member: Any
    ) -> None:
        section.add(title, code, zip_file([Member(**member)]), at, comment, by=by)

    section.add("count-more", bad, zip_file(end={"n_here": 2, "n_all": 2}), END, "one member fewer than stated")
    section.add("count-fewer", bad, zip_file(end={"n_here": 0, "n_all": 0}), CENTRAL, "one member more than stated")
    add("signature", "no member", central={"signature": b"PK\1\1"}, at=b"PK\1\1")
    add("name-overruns", "a name longer than the directory", central={"n_name": 100})
    add("entry-comment", "a comment", central={"n_comment": 1})
    add("entry-disk", "in another part", central={"disk": 1})
    add("stored-lengths", "stored, and longer than it is read", central={"nbytes": 1}, local={"nbytes": 1})
    add("directory-data", "a directory with data", name="a/")
    add("directory-attribute", "a file that some readers take for a directory", central={"attributes": 0x10})
    add("flag-patched", "bit 5", flags=0x20)
    add("flag-level", "compression levels of what is stored", flags=0x02)
    add("encrypted", "bit 0", "zip-encrypted", flags=1, by=POLICY)
    add("encrypted-strong", "bits 0 and 6", "zip-encrypted", flags=0x41, by=POLICY)
    add("encrypted-directory", "bit 13", "zip-encrypted", flags=0x2000, by=POLICY)
    add("method-zstd", "method 93", "zip-method", method=93, by=POLICY)
    add("method-aes", "method 99", "zip-method", method=99, by=POLICY)
    add("extra-cut", "three bytes", central_extra=b"FB\0")
    add("extra-overruns", "longer than there is room", central_extra=b"FB\1\0")
    add("extra-name", "a second name (0x7075)", central_extra=extra(0x7075, b"\1" + bytes(4) + b"b.npy"))
    add("extra-twice", "one field twice", central_extra=extra(0x4246, b"") * 2)
    add("extra-zip64-idle", "zip64 of no number", central_extra=zip64())
    add("extra-zip64-more", "zip64 of a number that fits", central_extra=zip64(1))
    add("extra-zip64-none", "no zip64 for a number that does not fit", central={"header": 0xFFFFFFFF})
    add("local-extra-name", "a second name in the local header", at=0, local_extra=extra(0x7075, b"x"))
    names = "zip-bad-name"
    for title, name in (
        ("parent", "../a.npy"),
        ("parent-inside", "a/../b.npy"),
        ("here", "./a.npy"),
        ("absolute", "/a.npy"),
        ("doubled", "a//b.npy"),
        ("backslash", "a\\b.npy"),
        ("nul", "a\0.npy"),
        ("empty", ""),
    ):
        add(f"name-{title}", "a name that leads elsewhere, or that is spelled in two ways", names, name=name)
    add("name-cp437", "UTF-8 that is not flagged, so code page 437 to some", names, name="é.npy")
    add("name-not-utf-8", "flagged as UTF-8", names, name=b"\x82.npy", flags=0x800)
    add("name-long", "1,025 bytes", "limit-exceeded", name="a" * 1025, by=LIMIT)
    twice = "zip-duplicate-name"

    def add_second(title: str, name: str | bytes, comment: str, first: str = "a.npy") -> None:
        flags = 0 if name.isascii() else 0x800
        raw = zip_file([Member(first), Member(name, flags=flags)])
        section.add(title, twice, raw, raw.rindex(CENTRAL), comment)

    add_second("name-twice", "a.npy", "one name twice")
    add_second("name-case", "A.NPY", "names that differ in case")
    composed = zip_file([Member("é.npy", flags=0x800), Member("e\u0301.npy", flags=0x800)])
    section.add("name-composed", twice, composed, composed.rindex(CENTRAL), "one letter in two spellings")
    yield from section.made


def places() -> Iterator[Vector]:
    section = Section("zip", "a.npz")
    gap = "zip-gap"
    section.add("prefix", gap, zip_file(before=b"PK\3\4junk"), 0, "something in front of the first member")
    section.add("empty-prefix", gap, zip_file([], before=b"PK\3\4junk"), 0, "something, and no member")
    raw = zip_file(before_directory=b"x")
    section.add("between", gap, raw, raw.index(CENTRAL) - 1, "a byte behind the last member")
    raw = zip_file([Member(behind=b"x"), Member("b.npy")])
    section.add("between-members", gap, raw, raw.rindex(LOCAL) - 1, "a byte between members")
    inner = zip_file([Member(data=b"abc", name="c.npy")], end={})
    overlapping = zip_file([Member(data=inner), Member("b.npy", central={"header": 35})])
    section.add("overlap", gap, overlapping, 35, "a member within another")
    raw = zip_file([Member(), Member("b.npy", central={"header": 0})])
    section.add("overlap-whole", gap, raw, 0, "two entries for one member")
    raw = zip_file([Member(central={"header": 1 << 31})])
    section.add("far", gap, raw, 0, "a member behind the file's end")
    bad = "zip-headers-disagree"
    for title, local in (
        ("signature", {"signature": b"PK\3\5"}),
        ("name", {"name": b"b.npy"}),
        ("version", {"version": 21}),
        ("flags", {"flags": 0x800}),
        ("method", {"method": 8}),
        ("time", {"time": 1}),
        ("date", {"date": 34}),
        ("crc32", {"crc32": 1}),
        ("stored", {"stored": 1}),
        ("nbytes", {"nbytes": 1}),
        ("zip64-none", {"stored": 0xFFFFFFFF, "nbytes": 0xFFFFFFFF}),
        ("zeros", {"crc32": 0, "stored": 0, "nbytes": 0}),
    ):
        raw = zip_file([Member(), Member("c.npy", local=local)])
        if title == "name":
            raw = zip_file([Member("c.npy"), Member("a.npy", local=local)])
        at = raw.index(b"PK\3", 1)
        section.add(f"disagree-{title}", bad, raw, at, f"{title} of the local header alone")
    wide = {"stored": 0xFFFFFFFF, "nbytes": 0xFFFFFFFF}
    length = len(npy())
    section.add(
        "disagree-zip64", bad, zip_file([Member(local=wide, local_extra=zip64(length, 1))]), 0, "its zip64 field"
    )
    section.add("disagree-zip64-idle", bad, zip_file([Member(local_extra=zip64())]), 0, "a zip64 field of no number")
    section.add("disagree-zip64-cut", bad, zip_file([Member(local_extra=extra(1, b"x"))]), 0, "a zip64 field of a byte")
    raw = zip_file([Member(local={"n_name": 65535})])
    section.add("name-behind-end", "truncated", raw, 30, "a name longer than the file")
    member = Member(flags=8)
    for title, behind in (
        ("none", b""),
        ("bare", descriptor(member)[4:]),
        ("crc32", descriptor(member, crc32=1)),
        ("stored", descriptor(member, stored=1)),
        ("nbytes", descriptor(member, nbytes=1)),
        ("wide", descriptor(member, wide=True)),
    ):
        raw = zip_file([Member(flags=8, behind=behind)])
        at = raw.index(npy()) + length
        section.add(f"descriptor-{title}", bad, raw, at, "a descriptor that does not repeat the sizes")
    true = zlib.crc32(npy())
    raw = zip_file([Member(flags=8, local={"crc32": true, "stored": 7}, behind=descriptor(member))])
    section.add("descriptor-local", bad, raw, 0, "sizes that are neither zero nor true")
    placed = {"crc32": 0, "stored": 0, "nbytes": 0}
    behind = descriptor(member, wide=True)
    raw = zip_file([Member(flags=8, local=placed, local_extra=zip64(length, 0, 1), behind=behind)])
    section.add("descriptor-place", bad, raw, 0, "an offset of its own that is wrong")
    yield from section.made


def members() -> Iterator[Vector]:
    """What is wrong inside a member."""
    section = Section("npz", "a.npz")
    at = 30 + len("a.npy")
    flipped = {"crc32": 1}
    section.add("checksum", "zip-checksum", zip_file([Member(local=flipped, central=flipped)]), at, "stored")
    raw = zip_file([Member(method=8, local=flipped, central=flipped)])
    section.add("checksum-deflated", "zip-checksum", raw, at, "deflated")
    bad = "zip-bad-data"
    for title, nbytes in (("longer", len(npy()) - 1), ("shorter", len(npy()) + 1), ("bomb", 10)):
        fields = {"nbytes": nbytes}
        raw = zip_file([Member(method=8, local=fields, central=fields)])
        section.add(title, bad, raw, at, "another length than the headers state")

    def raw_member(data: bytes) -> bytes:
        fields = {"method": 8, "nbytes": len(npy()), "crc32": zlib.crc32(npy())}
        return zip_file([Member(data=data, local=fields, central=fields)])

    stream = Member(method=8).stored
    section.add("garbage", bad, raw_member(b"\xff" * 9), at, "no deflate stream")
    section.add("stream-behind", bad, raw_member(stream + b"x"), at, "a byte behind the stream")
    endless = zlib.compressobj(9, zlib.DEFLATED, -15)
    cut = endless.compress(npy()) + endless.flush(zlib.Z_SYNC_FLUSH)
    section.add("stream-open", bad, raw_member(cut), at, "all data, and no end of the stream")
    section.add("pickle", "npy-bad-header", zip_file([Member(data=b"cos\nsystem\n(S'true'\ntR.")]), at, "a pickle")
    evil = npy(header("'|O'"), b"cos\nsystem\n(S'true'\ntR.")
    section.add("object", "npy-dtype", zip_file([Member(data=evil)]), at + 10, "stored", by=POLICY)
    section.add("object-deflated", "npy-dtype", zip_file([Member(data=evil, method=8)]), at, "deflated", by=POLICY)
    section.add("array-behind", "npy-data-behind", zip_file([Member(data=npy() + b"x")]), at + len(npy()), "stored")
    section.add("array-cut", "truncated", zip_file([Member(data=npy()[:-1])]), at + len(npy()) - 1, "stored")
    limits = "limits.max_inline_bytes = 400"
    raw = zip_file([Member(data=npy(header(shape="(1000, )"), bytes(4000)), method=8)])
    section.add("inflated", "limit-exceeded", raw, 0, "more than may be held", by=LIMIT, change=limits)
    raw = zip_file([Member(), Member("b.npy"), Member("c.npy")])
    limits = "limits.max_inline_bytes = 100"
    section.add("headers", "limit-exceeded", raw, raw.index(CENTRAL), "a long directory", by=LIMIT, change=limits)
    yield from section.made


def headers() -> Iterator[Vector]:
    section = Section("safetensors", "model.safetensors")
    bad = "safetensors-bad-header"
    one = {"a": stated("F32", (2,), 0, 8)}
    whole = safetensors(one, bytes(8))
    section.add("cut", "truncated", whole[:-1], len(whole) - 1, "a byte of the last tensor")
    section.add("behind", "safetensors-data-behind", whole + b"\0", -1, "a byte behind the last tensor")
    for title, text_, at in (
        ("json", b'{"a":}', 13),
        ("twice", b'{"a":' + json.dumps(one["a"]).encode() + b',"a":' + json.dumps(one["a"]).encode() + b"}", 8),
        ("tabs-behind", json.dumps(one).encode() + b"\t", 8),
        ("not-utf-8", b'{"\xff":{}}', 10),
        ("float", b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', 8),
        ("nan", b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', 8),
        ("surrogate", b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        ("deep", b'{"a":' + b"[" * 10 + b"]" * 10 + b"}", 8),
    ):
        section.add(title, bad, safetensors(text_, bytes(8)), at, "what is no header")
    for title, header_ in (
        ("metadata-number", {"__metadata__": {"a": 1}, **one}),
        ("metadata-list", {"__metadata__": ["a"], **one}),
        ("metadata-nested", {"__metadata__": {"a": {}}, **one}),
        ("entry-list", {"a": [0, 8]}),
        ("entry-key", {"a": {**one["a"], "x": 1}}),
        ("entry-keys", {"a": {"dtype": "F32", "shape": [2]}}),
        ("offsets-three", {"a": {**one["a"], "data_offsets": [0, 4, 8]}}),
        ("offset-negative", {"a": {**one["a"], "data_offsets": [-8, 0]}}),
        ("dimension-negative", {"a": {**one["a"], "shape": [-2]}}),
        ("dimension-bool", {"a": {**one["a"], "shape": [True, 2]}}),
        ("dtype", {"a": {**one["a"], "dtype": "F128"}}),
        ("dtype-case", {"a": {**one["a"], "dtype": "f32"}}),
        ("dtype-number", {"a": {**one["a"], "dtype": 1}}),
    ):
        section.add(title, bad, safetensors(header_, bytes(8)), 8, "what is no tensor")
    raw = safetensors(b"{" + b" " * 1000 + b"}", b"")
    section.add("header", "limit-exceeded", raw, 0, "a long one", by=LIMIT, change="limits.max_inline_bytes = 1000")
    offsets = "safetensors-bad-offsets"
    for title, header_, comment in (
        ("hole", {"a": stated("F32", (1,), 4, 8)}, "nothing in front of the first"),
        ("hole-between", {"a": stated("U8", (2,), 0, 2), "b": stated("U8", (5,), 3, 8)}, "a byte between"),
        ("overlap", {"a": stated("U8", (5,), 0, 5), "b": stated("U8", (4,), 4, 8)}, "a byte in two"),
        ("same", {"a": stated("U8", (8,), 0, 8), "b": stated("U8", (8,), 0, 8)}, "all bytes in two"),
        ("size", {"a": stated("F32", (1,), 0, 8)}, "twice the bytes"),
        ("backwards", {"a": stated("F32", (2,), 8, 0)}, "the end before the start"),
    ):
        section.add(title, offsets, safetensors(header_, bytes(8)), 8, comment)
    big = 1 << 52
    section.add(
        "overflow", "bad-shape", safetensors({"a": stated("F32", (big, big), 0, 8)}, bytes(8)), 8, "2**106 bytes"
    )
    section.add("rank", "bad-shape", safetensors({"a": stated("U8", (1,) * 33, 0, 1)}, b"x"), 8, "33 dimensions")
    section.add(
        "half-byte", "bad-shape", safetensors({"a": stated("F4", (3,), 0, 1)}, b"x"), 8, "three elements of 4 bits"
    )
    section.add("name-long", "name-too-long", safetensors({"a" * 1025: one["a"]}, bytes(8)), 8, "1,025 characters")
    both = {"a": stated("F4", (2,), 0, 1), "a/packed": stated("U8", (1,), 1, 2)}
    section.add("name-taken", "ambiguous-name", safetensors(both, b"xy"), 8, "the name that packed bytes get")
    yield from section.made


def indexes() -> Iterator[Vector]:
    section = Section("index", "model.safetensors.index.json")
    good = {"a": "model-00001-of-00001.safetensors"}
    for title, value in (
        ("empty-map", {"weight_map": {}}),
        ("no-map", {"metadata": {}}),
        ("other-key", {"weight_map": good, "x": 1}),
        ("list", [good]),
        ("number", {"weight_map": {"a": 1}}),
        ("parent", {"weight_map": {"a": ".."}}),
        ("path", {"weight_map": {"a": "../model.safetensors"}}),
        ("absolute", {"weight_map": {"a": "/etc/passwd"}}),
        ("backslash", {"weight_map": {"a": "a\\b"}}),
        ("no-file", {"weight_map": {"a": ""}}),
        ("total-text", {"metadata": {"total_size": "8"}, "weight_map": good}),
        ("total-negative", {"metadata": {"total_size": -1}, "weight_map": good}),
        ("metadata-list", {"metadata": [], "weight_map": good}),
    ):
        section.add(title, "bad-index", json.dumps(value).encode(), 0, "what is no index")
    section.add("json", "bad-index", b'{"weight_map"}', 13, "what is no JSON")
    # strict_json does not say where these are.
    for title, raw, limit in (
        ("twice", b'{"weight_map":{"a":"b","a":"c"}}', ""),
        ("float", b'{"metadata":{"total_size":1.5},"weight_map":{"a":"b"}}', ""),
        ("values", json.dumps({"weight_map": good}).encode(), "limits.max_values = 1"),
    ):
        section.made.append(
            Vector(f"index-{title}", FORMAT, "bad-index", "", raw, None, file=section.file, change=limit)
        )
    size = json.dumps({"weight_map": good}).encode()
    limit = "limits.max_inert_bytes = 10"
    section.made.append(
        Vector("index-size", LIMIT, "limit-exceeded", "a long one", size, None, file=section.file, change=limit)
    )
    yield from section.made


def models() -> Iterator[Vector]:
    section = Section("gguf", "model.gguf")
    row = info("a", (2,), 0, 0)
    data = bytes(8)
    whole = gguf([row], data)
    for title, version in (("version-1", 1), ("version-4", 4), ("version-0", 0), ("big-endian", 3 << 24)):
        section.add(title, "gguf-version", gguf([row], data, version=version), 4, by=POLICY)
    section.add("cut", "truncated", whole[:-1], len(whole) - 1, "a byte of the last tensor")
    section.add("count-giant", "truncated", gguf([row], data, n_tensors=2**64 - 1), 8, "2**64 - 1 tensors")
    section.add("pairs-giant", "truncated", gguf([row], data, n_pairs=2**63), 8, "2**63 pairs")
    many = [info(f"{n}", (1,), 24, 32 * n) for n in range(20)]
    section.add("values", "limit-exceeded", gguf(many), 8, "20 tensors", by=LIMIT, change="limits.max_values = 19")
    bad = "gguf-bad-metadata"
    string = 8

    def add_pairs(
        title: str, comment: str, *pairs: bytes, at: int | bytes = 24, code: str = bad, **options: str
    ) -> None:
        section.add(title, code, gguf([row], data, pairs), at, comment, **options)

    u32 = (32).to_bytes(4, "little")
    first = pair("x", 4, u32)
    add_pairs("key-twice", "", first, first, at=24 + len(first))
    add_pairs("key-empty", "", pair("", 4, u32))
    add_pairs("key-not-ascii", "", pair("é", 4, u32))
    add_pairs("key-long", "65,536 bytes", pair("x" * 65536, 4, u32))
    add_pairs("type", "type 13", pair("x", 13, u32), at=24 + 13)
    add_pairs("bool", "a bool of 2", pair("x", 7, b"\2"), at=24 + 13)
    add_pairs("alignment-type", "int32", pair("general.alignment", 5, u32))
    for alignment in (0, 4, 24, 1 << 21):
        add_pairs(f"alignment-{alignment}", "", pair("general.alignment", 4, alignment.to_bytes(4, "little")))

    def array(kind: int, items: bytes, count: int) -> bytes:
        return kind.to_bytes(4, "little") + count.to_bytes(8, "little") + items

    nested = array(0, b"", 0)
    for _ in range(5):
        nested = array(9, nested, 1)
    add_pairs("nested", "six arrays in each other", pair("x", 9, nested), at=24 + 13 + 4 * 12)
    strings = pair("x", 9, array(string, text("") * 9, 9))
    add_pairs(
        "strings", "nine", strings, at=24 + 13 + 12, code="limit-exceeded", by=LIMIT, change="limits.max_values = 8"
    )
    bad = "gguf-bad-tensor"
    at = 24
    for title, table, comment in (
        ("name-not-utf-8", info(b"\xff", (2,), 0, 0), ""),
        ("name-giant", info("x" * 65536, (2,), 0, 0), "65,536 bytes"),
        ("rank", info("a", (1,) * 5, 0, 0), "five dimensions"),
        ("zero", info("a", (0,), 0, 0), "a dimension of zero"),
        ("type-unknown", info("a", (2,), 99, 0), "type 99"),
        ("type-given-up", info("a", (32,), 4, 0), "Q4_2"),
        ("unaligned", info("a", (2,), 0, 8), "an offset of 8"),
        ("row", info("a", (16, 2), 2, 0), "rows of half a block"),
    ):
        section.add(title, bad, gguf([table], bytes(36)), at, comment)
    two = [info("a", (2,), 0, 0), info("b", (2,), 0, 64)]
    raw = gguf(two, bytes(72))
    section.add("gap", bad, raw, len(raw) - 8, "32 bytes between")
    two = [info("a", (2,), 0, 0), info("b", (2,), 0, 0)]
    raw = gguf(two, bytes(40))
    section.add("overlap", bad, raw, len(raw) - 40, "one place for two")
    two = [info("a", (2,), 0, 0), info("a", (2,), 0, 32)]
    raw = gguf(two, bytes(40))
    section.add("name-twice", "ambiguous-name", raw, 24 + len(two[0] + two[1]), "")
    raw = gguf([row], data + b"x")
    section.add("behind", "gguf-data-behind", raw, -1, "no padding")
    # BINFLOAT, and by the second byte of a number of tensors UNICODE, whose text ends where the pickle shall begin.
    call = [pair("k", 8, text(b"\nccollections\nOrderedDict\n)R."))]
    raw = gguf([row], data, call, n_tensors=ord("V") << 8)
    section.add("pickle", "ambiguous-format", raw, 0, "a pickle as well")
    raw = gguf([row], data + bytes(25))
    section.add("behind-padding", "gguf-data-behind", raw, len(whole), "more than padding")
    raw = whole.replace(row + b"\0", row + b"\1")
    section.add("before", "gguf-data-behind", raw, 24 + len(row), "no padding in front of the first")
    section.add("name-long", "name-too-long", gguf([info("n" * 1025, (2,), 0, 0)], data), 24, "1,025 characters")
    section.add("overflow", "bad-shape", gguf([info("a", (1 << 40, 1 << 40), 0, 0)], data), 24, "2**82 bytes")
    yield from section.made


def vectors() -> Iterator[Vector]:
    """Yield the vectors of this module."""
    for group in (arrays, ends_of_archives, entries, places, members, headers, indexes, models):
        yield from group()
