"""A signed document means one thing, whoever reads it."""

from __future__ import annotations

import contextlib
import json
import time
import tracemalloc

import pytest

from safeload.errors import ManifestError
from safeload.trust import strict_json


def loads(text: str | bytes, *, max_bytes: int = 10_000, max_depth: int = 8, max_values: int = 1000) -> object:
    data = text.encode("utf-8") if isinstance(text, str) else text
    return strict_json.loads(data, max_bytes=max_bytes, max_depth=max_depth, max_values=max_values)


def refused(text: str | bytes, says: str, **limits: int) -> None:
    with pytest.raises(ManifestError) as caught:
        loads(text, **limits)
    assert [finding.code for finding in caught.value.findings] == ["bad-json"]
    assert says in caught.value.findings[0].message


def test_plain_json_is_read_as_it_is() -> None:
    text = r'{"a": [1, -2, 0, true, false, null], "b": {"c": "x\n\"[{\\", "d": ""}, "é": "😀 😀"}'
    assert loads(text) == json.loads(text)


@pytest.mark.parametrize(
    "text", ['{"a":1,"a":2}', '{"b":{"a":1,"c":2,"a":1}}', '[{"a":1,"\\u0061":2}]', '{"\\u0061":1,"a":1}']
)
def test_a_key_that_appears_twice_is_refused_however_it_is_spelled(text: str) -> None:
    refused(text, '"a" twice')


@pytest.mark.parametrize("text", ["1.0", "1e3", "[1E3]", '{"a":-0.5}', "NaN", "[Infinity]", "-Infinity"])
def test_numbers_that_are_no_integers_are_refused(text: str) -> None:
    refused(text, "integers only")


@pytest.mark.parametrize("number", [2**53, -(2**53), 0])
def test_integers_up_to_two_to_the_53_are_read(number: int) -> None:
    assert loads(f'{{"a":[{number}]}}') == {"a": [number]}


@pytest.mark.parametrize("digits", [str(2**53 + 1), str(-(2**53) - 1), "1" + "0" * 16, "1" * 400, "9" * 5000])
def test_integers_beyond_two_to_the_53_are_refused(digits: str) -> None:
    refused(f'{{"a":[0,{digits}]}}', "integers up to")


@pytest.mark.parametrize(
    "text",
    ["{}", " {}", "-{}", "[{}]", "[0,{}]", "[0, {}]", "[0,\n{}]", "[-{}]", '{{"a":{}}}', '{{"a":\t{}}}', '["{}",{}]'],
)
def test_an_integer_is_bounded_wherever_it_stands(text: str) -> None:
    assert loads(text.format(*[2**53] * 2))
    refused(text.format(*[2**53 + 1] * 2), "integers up to")
    refused(text.format(*["9" * 4900] * 2), "integers up to")


def test_digits_in_a_string_are_no_integer() -> None:
    assert loads('[", 12345678901234567890", ":9999999999999999"]') == [", 12345678901234567890", ":9999999999999999"]
    assert loads('{"12345678901234567890":"12345678901234567890"}') == {"12345678901234567890": "12345678901234567890"}


@pytest.mark.parametrize(
    "strings", ['["",""]', '["a:b,","[{","",","]', '{"":"","\\"":":"}', '[["",""],"]}",{"a":"b"}]']
)
def test_what_is_in_strings_is_no_structure(strings: str) -> None:
    assert loads(strings, max_values=8, max_depth=2) == json.loads(strings)


@pytest.mark.parametrize(
    "text",
    [
        '"\\ud800"',
        '{"\\uDFFF":1}',
        '["\\udc00\\ud800"]',
        '"x\\\\\\ud800"',
        '"\\ud83d\\\\\\ude00"',  # an escaped backslash between the halves
        '"\\ud83d\\ud83d\\ude00"',
        '"\\ud83d\\ude00\\ude00"',
        '["\\ud83d","\\ude00"]',
        '"\\uDBFFa\\uDFFF"',
    ],
)
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    refused(text, "lone surrogate")


def test_a_whole_surrogate_pair_and_an_escaped_backslash_are_read() -> None:
    assert loads(r'["\ud83d\ude00", "\\ud800"]') == ["😀", "\\ud800"]
    assert loads(r'["\\\uD83D\uDE00\\ude00", "\uDBFF\uDFFF\ud800\uDC00"]') == ["\\😀\\ude00", "\U0010ffff\U00010000"]


@pytest.mark.parametrize("data", [b'"\xff"', b'"\xed\xa0\x80"', b'"\xc0\xaf"', '"a"'.encode("utf-16")])
def test_bytes_that_are_no_utf_8_are_refused(data: bytes) -> None:
    refused(data, "UTF-8")


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "[1", "]", "{]", '{"a":1}}', "{'a':1}", "[1,]", "01", '"\n"', "\ufeff1", "1 2", "nul", '\\"', '"'],
)
def test_what_breaks_the_grammar_is_refused(text: str) -> None:
    refused(text, "expected JSON")


def test_the_place_of_a_broken_document_is_counted_in_bytes() -> None:
    with pytest.raises(ManifestError) as caught:
        loads('["é", x]')
    assert caught.value.findings[0].offset == len('["é", '.encode())


@pytest.mark.parametrize("opened", ["[", '{"a":', '[{"\\"[":'])
def test_nesting_is_allowed_to_the_limit_and_no_deeper(opened: str) -> None:
    levels = opened.count("[") - opened.count('"[') + opened.count("{")
    closed = "".join({"[": "]", "{": "}"}[c] for c in reversed(opened.replace('\\"[', "")) if c in "[{")
    loads(opened * (8 // levels) + "1" + closed * (8 // levels))
    refused(opened * (8 // levels) + "[]" + closed * (8 // levels), "nesting")


def test_brackets_within_strings_are_no_nesting() -> None:
    assert loads(json.dumps(["[" * 100 + '"' + "{" * 100])) == ["[" * 100 + '"' + "{" * 100]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_nesting_that_would_exhaust_the_stack_is_refused_first(text: str) -> None:
    refused(text, "nesting", max_bytes=10**6, max_values=10**6)


def test_a_document_of_the_longest_length_is_read_and_a_longer_one_is_not() -> None:
    assert loads("[1]" + " " * 97, max_bytes=100) == [1]
    refused("[1]" + " " * 98, "at most 100 bytes", max_bytes=100)


def test_values_are_counted_before_any_is_made() -> None:
    assert loads("[" + "1," * 998 + "1]") == [1] * 999
    refused("[" + "1," * 999 + "1]", "at most 1000 values")
    bomb = b"[" + b"[]," * 2_000_000 + b"1]"
    tracemalloc.start()
    try:
        refused(bomb, "at most 1000 values", max_bytes=10**8)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(bomb)  # two million lists take 150 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "pattern",
    [
        b"\\ab",
        b"\\\\",
        b'\\"',
        b"\\u0041",
        b'",,',
        b'","',
        b'",[,',
        b'"a',
        b"[]",
        b"1234567890123456,",
        b":000000000000000 ",
    ],
)
@pytest.mark.parametrize("within", ["", '"'], ids=["bare", "in-a-string"])
def test_what_is_no_document_costs_a_few_times_its_length(
    pattern: bytes, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert strict_json._PIECE_BYTES == 2**20
    monkeypatch.setattr(strict_json, "_PIECE_BYTES", 2**14)  # the documents are shorter than the longest ones as well
    quote = within.encode()
    data = b"[" + quote + pattern * (2**20 // len(pattern)) + quote + b"]"
    tracemalloc.start()
    try:
        with contextlib.suppress(ManifestError):
            loads(data, max_bytes=2**25, max_values=1_000)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(data)
    finally:
        tracemalloc.stop()


def test_many_long_integers_are_looked_at_one_by_one() -> None:
    data = b"[" + b"1234567890123456," * 50_000 + b"]"
    tracemalloc.start()
    try:
        strict_json._check_structure(data, 1, 10**6)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)  # a list of them takes four times the bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("text", ['["a,","[:",{"b":"]"},"",[1]]', '["\\"",["\\\\"],"\\\\\\"]["]'])
def test_where_a_document_is_cut_into_pieces_does_not_matter(
    text: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strict_json, "_PIECE_BYTES", size)
    assert loads(text, max_values=9, max_depth=2) == json.loads(text)
    refused(text, "nesting", max_depth=1)


@pytest.mark.parametrize("character", ["😀", "\\ud83d\\ude00", "\U0010ffff"])
def test_a_long_document_has_no_character_that_widens_all_of_it(
    character: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert strict_json.MAX_WIDE_BYTES == 16 * 1024 * 1024
    monkeypatch.setattr(strict_json, "MAX_WIDE_BYTES", 100)
    fitting = f'["{character}' + "a" * (100 - 4 - len(character.encode())) + '"]'
    assert len(fitting.encode()) == 100
    assert loads(fitting) == json.loads(fitting)
    refused(fitting + " ", "expected at most 100 bytes of JSON with characters beyond U+FFFF, found 101")
    assert loads('["é中' + "a" * 100 + '"]')


def test_the_keys_of_one_object_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strict_json.MAX_KEYS == 16_384
    monkeypatch.setattr(strict_json, "MAX_KEYS", 2)
    assert loads('{"a":{"b":1,"c":2},"d":3}')
    refused('[{"a":1,"b":2,"c":3}]', "at most 2 keys in one object, found 3")


def test_a_repeated_key_among_many_is_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "MAX_KEYS", 10**6)
    text = "{" + ",".join(f'"{n}":0' for n in range(100_000)) + ',"99999":1}'
    start = time.process_time()
    refused(text, '"99999" twice', max_bytes=10**7, max_values=10**6)
    assert time.process_time() - start < 5  # comparing each with each takes minutes


@pytest.mark.parametrize(("text", "read"), [(b"[144.0]", [144]), (b"[0.00]", [0]), (b"[12]", [12])])
def test_a_whole_number_with_a_point_is_read_where_that_is_asked_for(text: bytes, read: object) -> None:
    assert strict_json.loads(text, max_bytes=99, max_depth=2, whole_floats=True) == read


@pytest.mark.parametrize("text", [b"[144.5]", b"[-1.0]", b"[1e3]", b"[1.0e3]", b"[9007199254740993.0]", b"[NaN]"])
def test_no_other_float_is(text: bytes) -> None:
    with pytest.raises(ManifestError) as caught:
        strict_json.loads(text, max_bytes=99, max_depth=2, whole_floats=True)
    assert caught.value.findings[0].code == "bad-json"
