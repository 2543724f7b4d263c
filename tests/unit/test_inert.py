"""A file that is no tensor is what its name says, or refused."""

from __future__ import annotations

from typing import Literal

import pytest

from safeload.errors import FormatError, LimitError
from safeload.formats import MemorySource
from safeload.formats.inert import check_inert
from tests.streams import DEFAULT, Writer, honest_streams, op, policy_with

Content = Literal["json", "text", "opaque"]


def verdict(data: bytes, content: Content) -> tuple[str, int | None] | None:
    parsed = check_inert(MemorySource(data), content, DEFAULT)
    assert (parsed.value, parsed.tensors, parsed.globals) == (None, (), ())
    if parsed.refusal is None:
        return None
    assert type(parsed.refusal) is FormatError
    (finding,) = parsed.refusal.findings
    assert finding.code == "name-contradicts-content"
    return finding.code, finding.offset


def is_refused(data: bytes, content: Content) -> bool:
    return verdict(data, content) is not None


@pytest.mark.parametrize(
    "data", [b"{}", b'{"a": [1, 2.5, null, "\xc3\xa9"]}\n', b"\xef\xbb\xbf{}", b"[]", b"1", b'"x"']
)
def test_json_is_accepted_as_json(data: bytes) -> None:
    assert not is_refused(data, "json")


@pytest.mark.parametrize("data", [b"", b"{", b"{} {}", b"hello", b"[" * 100_000, b"9" * 5000, b"{'a': 1}", b"\0"])
def test_what_is_no_json_is_refused_as_json(data: bytes) -> None:
    assert is_refused(data, "json")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# Title\r\n\ttext\x0c\n",
        "café ☕",
        "a" * 100_000,
        "I am no pickle.",
        "(in brackets)\nmore\n",
        "cat\nsystem\nR",
    ],
)
def test_text_is_accepted_as_text(text: str) -> None:
    assert not is_refused(text.encode(), "text")


@pytest.mark.parametrize("bad", [0x00, 0x07, 0x08, 0x0B, 0x0E, 0x1B, 0x1F, 0x7F, 0x85, 0x9B, 0xFFFE, 0xFFFF])
def test_a_control_character_is_refused_where_it_stands(bad: int) -> None:
    text = "é\n" + chr(bad) + "b"
    assert verdict(text.encode(), "text") == ("name-contradicts-content", 3)


@pytest.mark.parametrize("content", ["json", "text"])
@pytest.mark.parametrize("data", [b"a\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xff\xfea\0"])
def test_what_is_no_utf_8_is_refused(data: bytes, content: Content) -> None:
    assert is_refused(data, content)


@pytest.mark.parametrize(
    ("data", "content", "offset"),
    [
        (b"ab\xff", "text", 2),
        (b"\xef\xbb\xbfab\xff", "text", 5),
        (b"\xef\xbb\xbfab\x1b", "text", 5),
        ('{"é": é}'.encode(), "json", 7),
        (b'\xef\xbb\xbf{"a": }', "json", 9),
    ],
    ids=["utf-8", "utf-8-bom", "control-bom", "json-non-ascii", "json-bom"],
)
def test_an_offset_is_in_bytes_of_the_file(data: bytes, content: Content, offset: int) -> None:
    assert verdict(data, content) == ("name-contradicts-content", offset)


@pytest.mark.parametrize("content", ["json", "text", "opaque"])
@pytest.mark.parametrize("data", [b"PK\x03\x04", b"\x7fELF", b"\x1f\x8b", b"#!/bin/sh", b"<html>", honest_streams()[4]])
def test_an_archive_a_program_or_a_pickle_is_refused_as_anything(data: bytes, content: Content) -> None:
    assert is_refused(data, content)


@pytest.mark.parametrize("content", ["text", "opaque"])
@pytest.mark.parametrize("protocol", [0, 1])
def test_a_pickle_without_header_is_refused_as_anything(protocol: int, content: Content) -> None:
    assert is_refused(honest_streams()[protocol], content)


CALLS = {
    "reduce": op.GLOBAL("os", "getcwd") + op.MARK() + op.TUPLE() + op.REDUCE() + op.STOP(),
    "reduce-then-junk": op.GLOBAL("os", "getcwd") + op.MARK() + op.TUPLE() + op.REDUCE() + b"hello",
    "reduce-then-cut": op.GLOBAL("os", "getcwd") + op.MARK() + op.TUPLE() + op.REDUCE(),
    "reduce-then-data": op.GLOBAL("os", "getcwd") + op.MARK() + op.TUPLE() + op.REDUCE() + op.STOP() + b"\ntext",
    "inst": op.MARK() + op.INST("os", "getcwd") + op.STOP(),
    "obj": op.MARK() + op.GLOBAL("os", "getcwd") + op.OBJ() + op.STOP(),
    "named": op.GLOBAL("os", "getcwd") + op.STOP(),
}
"""What runs, or names, something in any reader that takes the file for a pickle. Harmless names."""


@pytest.mark.parametrize("content", ["text", "opaque"])
@pytest.mark.parametrize("name", CALLS)
def test_a_text_that_would_call_something_is_refused(name: str, content: Content) -> None:
    assert is_refused(CALLS[name], content)


@pytest.mark.parametrize("data", [bytes(range(256)), b"\n\x0b\n", b"model\0\1\2", Writer(4).text("a")])
def test_opaque_bytes_are_accepted(data: bytes) -> None:
    assert not is_refused(data, "opaque")


@pytest.mark.parametrize("content", ["json", "text", "opaque"])
def test_size_is_bounded_before_anything_is_read(content: Content) -> None:
    policy = policy_with(limits={"max_inert_bytes": 2})
    assert check_inert(MemorySource(b"{}"), content, policy).refusal is None

    class Unread(MemorySource):
        def read(self, offset: int, nbytes: int) -> bytes:
            raise AssertionError((offset, nbytes))

    parsed = check_inert(Unread(b"{} "), content, policy)
    assert type(parsed.refusal) is LimitError
    assert parsed.refusal.findings[0].code == "limit-exceeded"
    assert "`max_inert_bytes`" in (parsed.refusal.findings[0].hint or "")


EVIL = b"cos\nsystem\n(S'true'\ntR."
HIDDEN = {
    "proto-in-the-middle": b"N0\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "frame-without-proto": b"]\x95" + bytes(8) + b"0\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "deep-marks": b"(" * 200 + EVIL,
    "hex": b"I0x1\n0" + EVIL,
    "underscore": b"(lp0\nI1_0\na0" + EVIL,
    "surrogate": b"V\\ud800\n0" + EVIL,
    "octal-escape": b"S'\\101'\n0" + EVIL,
    "key-twice": b"(I1\nI2\nI1\nI3\nd0" + EVIL,
    "padded-index": b"Np01\n0" + EVIL,
    "many-names": b"".join(op.GLOBAL("os.path", f"x{n}") for n in range(70)) + EVIL,
    "set": b"\x8f0" + EVIL,
}
"""A call behind something that only our machine stops at, because it is stricter than others."""


@pytest.mark.parametrize("content", ["text", "opaque"])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_call_behind_what_only_we_refuse_is_refused_too(name: str, content: Content) -> None:
    assert is_refused(HIDDEN[name], content)


@pytest.mark.parametrize(
    "text",
    [
        "License: Apache-2.0\n", "I am no pickle.\n", "(c) 2024 Somebody\nAll rights reserved.\n", "For you\n",
        "(in brackets)\nand more\n", "Some text\n", "Version 1\nof this\n", "copyright\nnotice\n", "get started\n",
        "# Title\n", "The model\n", "Because\n", "X\n", "Permission is hereby granted\n", "0.1.0\n", "1\n2\n3\n",
    ],
)  # fmt: skip
def test_honest_beginnings_are_text(text: str) -> None:
    assert not is_refused(text.encode() * 50, "text")


def test_json_of_too_many_values_is_refused_before_it_is_parsed() -> None:
    policy = policy_with(limits={"max_values": 1000})
    parsed = check_inert(MemorySource(b"[" + b"0," * 1000 + b"0]"), "json", policy)
    assert type(parsed.refusal) is LimitError


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0", b"GIF89a\0", b"\xff\xd8\xff\xe0", b"RIFF\4\0\0\0WEBP"])
def test_a_picture_is_opaque_data_and_neither_text_nor_json(data: bytes) -> None:
    assert not is_refused(data, "opaque")
    assert is_refused(data, "text")
    assert is_refused(data, "json")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"k": 1, "j": 2, "k": 1}}]', '{"a": 1, "\\u0061": 2}'])
def test_a_key_that_is_there_twice_is_refused_in_json(text: str) -> None:
    refusal = check_inert(MemorySource(text.encode()), "json", DEFAULT).refusal
    assert isinstance(refusal, FormatError)
    assert [finding.code for finding in refusal.findings] == ["duplicate-key"]


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": 2}]', '{"a": {"a": 1}}', '{"loss": NaN, "max": Infinity}'])
def test_what_python_writes_is_accepted_as_json(text: str) -> None:
    assert not is_refused(text.encode(), "json")
