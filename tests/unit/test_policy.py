"""Claims of `safeload.policy`: read strictly, frozen, found where it should be; and what the shipped ones say is so."""

from __future__ import annotations

import io
import pickle
import resource
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from pydantic import ValidationError

from safeload.errors import ConfigError, SafeloadError
from safeload.formats.pickles.torch_constructors import ALL_CONSTRUCTORS
from safeload.policy import (
    DEFAULT_POLICY,
    MAX_POLICY_BYTES,
    InertFiles,
    Limits,
    Policy,
    RecordRule,
    load_policy,
    policy_text,
    shipped_policies,
)
from safeload.records import QuantizedWeight8bit
from safeload.report import Report
from safeload.scanning import scan
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE
from tests.simulator import Exploit, pickled

HEAD = 'version = 1\nname = "mine"\ndescription = "for a test"\n'
RECORD = """
[[pickle.records]]
name = "Pair"
modules = ["m"]
fields = { a = ["int8"], b = ["float32"] }
reason = "two arrays"
"""


def parse(text: str) -> Policy:
    return Policy.parse(text.encode(), source="mine.toml")


def verdicts(report: Report) -> list[str]:
    return [finding.code for finding in report.all_findings]


def scan_bytes(
    folder: Path, data: bytes, policy: str | Policy = DEFAULT_POLICY, name: str = "tensor00000_000"
) -> Report:
    (folder / name).write_bytes(data)
    return scan(folder / name, policy=policy)


def quantized(weight: tuple[int, ...] = (4, 6), scales: tuple[int, ...] = (2, 6), dtype: Any = np.float32) -> bytes:
    fields = {"weight": np.zeros(weight, np.int8), "scales": np.zeros(scales, dtype)}
    return pickled(QuantizedWeight8bit(**fields))


# ---------------------------------------------------------------- reading


def test_an_empty_policy_allows_nothing(tmp_path: Path) -> None:
    policy = parse(HEAD)
    assert verdicts(scan_bytes(tmp_path, pickled(np.ones(2)), policy)) != []
    assert verdicts(scan_bytes(tmp_path, pickled([]), policy)) == ["format-not-allowed"]
    assert verdicts(scan_bytes(tmp_path, b"{}", policy, "a.json")) != []
    assert policy.formats.allow == ()
    assert policy.pickle.global_names == frozenset()


BROKEN: dict[str, tuple[str, str]] = {
    "not TOML": ("version = ", "not TOML"),
    "a duplicate key": (HEAD + "version = 1", "not TOML"),
    "a duplicate table": (HEAD + "[formats]\n[formats]", "not TOML"),
    "a number that is too long": (HEAD + f"[limits]\nmax_depth = {'9' * 5000}", "mine.toml"),
    "deep nesting": (HEAD + f"x = {'[' * 5000}{']' * 5000}", "mine.toml"),
    "an unknown key": (HEAD + "allow_all = true", "allow_all"),
    "an unknown key below": (HEAD + "[pickle]\nexec = true", "pickle.exec"),
    "an unknown table": (HEAD + "[network]", "network"),
    "a misspelt limit": (HEAD + "[limits]\nmax_deph = 3", "limits.max_deph"),
    "another version": (HEAD.replace("1", "2"), "version"),
    "a version of another type": (HEAD.replace("version = 1", 'version = "1"'), "version"),
    "a version that is a float": (HEAD.replace("version = 1", "version = 1.0"), "version"),
    "a version that is true": (HEAD.replace("version = 1", "version = true"), "version"),
    "no version": (HEAD.replace("version = 1", ""), "version"),
    "no name": (HEAD.replace('name = "mine"', ""), "name"),
    "a name that cannot be typed": (HEAD.replace("mine", "My Policy"), "name"),
    "no description": (HEAD.replace('description = "for a test"', ""), "description"),
    "a limit of 0": (HEAD + "[limits]\nmax_depth = 0", "limits.max_depth"),
    "a negative limit": (HEAD + "[limits]\nmax_depth = -1", "limits.max_depth"),
    "a limit as text": (HEAD + '[limits]\nmax_depth = "64"', "limits.max_depth"),
    "a limit that is true": (HEAD + "[limits]\nmax_depth = true", "limits.max_depth"),
    "a format that is not read": (HEAD + '[formats]\nallow = ["exe"]', "formats.allow.0"),
    "a format as text": (HEAD + '[formats]\nallow = "pickle"', "formats.allow"),
    "protocol 6": (HEAD + "[pickle]\nprotocols = [6]", "pickle.protocols.0"),
    "a global without a reason": (HEAD + '[[pickle.globals]]\nnames = ["numpy.ndarray"]', "pickle.globals.0.reason"),
    "an idle reason": (
        HEAD + '[[pickle.globals]]\nnames = ["numpy.ndarray"]\nreason = "  ok  "',
        "pickle.globals.0.reason",
    ),
    "a global that is a pattern": (
        HEAD + '[[pickle.globals]]\nnames = ["numpy.*"]\nreason = "everything"',
        "pickle.globals.0.names.0",
    ),
    "a global with a line feed": (
        HEAD + '[[pickle.globals]]\nnames = ["a.b\\n"]\nreason = "everything"',
        "pickle.globals.0.names.0",
    ),
    "no global": (HEAD + '[[pickle.globals]]\nnames = []\nreason = "everything"', "pickle.globals.0.names"),
    "a record without fields": (
        HEAD + RECORD.replace('{ a = ["int8"], b = ["float32"] }', "{}"),
        "pickle.records.0.fields",
    ),
    "a record of objects": (HEAD + RECORD.replace("int8", "object"), "pickle.records.0.fields.a.0"),
    "a record without modules": (HEAD + RECORD.replace('["m"]', "[]"), "pickle.records.0.modules"),
    "scales that are no field": (HEAD + RECORD + 'grouped_scales = { weight = "a", scales = "c" }', "pickle.records.0"),
    "an inert pattern with a folder": (
        HEAD + '[[files.inert]]\npatterns = ["a/*"]\ncontent = "text"\nreason = "documents"',
        "files.inert.0.patterns.0",
    ),
    "inert content of another kind": (
        HEAD + '[[files.inert]]\npatterns = ["*"]\ncontent = "any"\nreason = "everything"',
        "files.inert.0.content",
    ),
    "a shard name that is no pattern": (
        HEAD + '[shards]\nname = "("\nholds = ["array"]\narray_dtypes = ["int8"]',
        "shards",
    ),
    "a shard name that no machine can repeat": (
        HEAD + '[shards]\nname = "a{99999999999999999999}"\nholds = ["array"]\narray_dtypes = ["int8"]',
        "shards",
    ),
    "shards of an undeclared record": (
        HEAD + '[shards]\nname = "a"\nholds = ["Pair"]\narray_dtypes = ["int8"]',
        "shards.holds",
    ),
    "a date": (HEAD + "[limits]\nmax_depth = 2020-01-01", "limits.max_depth"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_policy_that_is_wrong_is_a_config_error_that_names_the_place(case: str) -> None:
    text, place = BROKEN[case]
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert type(refused.value) is ConfigError
    assert "mine.toml" in refused.value.message
    assert place in refused.value.message


AMBIGUOUS: dict[str, str] = {
    "two records of one global": HEAD + RECORD + RECORD.replace("two arrays", "other arrays").replace("int8", "int16"),
    "one module twice": HEAD + RECORD.replace('["m"]', '["m", "m"]'),
    "a record that is also a plain global": HEAD
    + RECORD
    + '[[pickle.globals]]\nnames = ["m.Pair"]\nreason = "also this"',
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_policy_that_says_two_things_of_one_global_is_refused(case: str) -> None:
    # The one that comes last would win without a word, and a reviewer may have read the first.
    with pytest.raises(ConfigError, match=r"m\.Pair"):
        parse(AMBIGUOUS[case])


@pytest.mark.parametrize("field", ["class", "None", "items", "__init__"])
def test_a_record_whose_field_breaks_its_class_is_refused_where_it_is_declared(field: str) -> None:
    # A dataclass cannot have it, or it would hide what the loader calls on a record.
    with pytest.raises(ConfigError, match="fields"):
        parse(HEAD + RECORD.replace("a = [", f"{field} = ["))


@pytest.mark.parametrize("data", [b"\xff", b"\xef\xbb\xbf" + HEAD.encode(), HEAD.encode("utf-16"), b"a\0b", b""])
def test_bytes_that_are_no_policy_are_a_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        Policy.parse(data, source="mine.toml")


def test_a_policy_that_is_too_large_is_not_even_parsed() -> None:
    fits = HEAD.encode().ljust(MAX_POLICY_BYTES, b"\n")
    assert Policy.parse(fits, source="x").name == "mine"
    with pytest.raises(ConfigError, match=f"more than {MAX_POLICY_BYTES} bytes"):
        Policy.parse(fits + b"\n", source="x")


def test_the_source_is_shown_escaped() -> None:
    with pytest.raises(ConfigError) as refused:
        Policy.parse(b"x", source="a\x1b[31m.toml")
    assert "\x1b" not in str(refused.value)


# ---------------------------------------------------------------- frozen


def frozen_spots() -> dict[str, Callable[[Policy], object]]:
    return {
        "name": lambda p: setattr(p, "name", ()),
        "a new attribute": lambda p: setattr(p, "other", ()),
        "protocols": lambda p: setattr(p.pickle, "protocols", ()),
        "limits": lambda p: setattr(p.limits, "max_depth", ()),
        "names of a global": lambda p: setattr(p.pickle.globals[0], "names", ()),
        "fields": lambda p: setattr(p.pickle.records[0], "fields", ()),
        "inert": lambda p: setattr(p.files, "inert", ()),
    }


@pytest.mark.parametrize("spot", frozen_spots())
def test_a_policy_cannot_be_changed_after_it_was_read(spot: str) -> None:
    with pytest.raises(ValidationError):
        frozen_spots()[spot](load_policy(DEFAULT_POLICY))


def test_a_policy_is_frozen_all_the_way_down() -> None:
    policy = load_policy(DEFAULT_POLICY)
    (rule,) = policy.pickle.records
    with pytest.raises(TypeError):
        rule.fields["weight"] = ("float64",)  # type: ignore[index] # that is the claim
    with pytest.raises(TypeError):
        policy.pickle.records_by_global["os.system"] = rule  # type: ignore[index] # that is the claim


def test_lists_are_tuples() -> None:
    policy = load_policy(DEFAULT_POLICY)
    (rule,) = policy.pickle.records
    for found in (policy.pickle.globals, policy.pickle.globals[0].names, policy.files.inert[0].patterns):
        assert isinstance(found, tuple)
    assert isinstance(rule.fields["weight"], tuple)


# ---------------------------------------------------------------- where a policy is found


def test_a_shipped_name_cannot_be_shadowed_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = load_policy("grok-1")
    monkeypatch.chdir(tmp_path)
    for name in ("grok-1", "grok-1.toml", "policies/grok-1.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(HEAD)
    assert load_policy("grok-1") == genuine
    assert load_policy("grok-1").source == "grok-1"
    # A path says so by its / or its ending.
    assert load_policy("./grok-1").name == load_policy("grok-1.toml").name == load_policy(Path("grok-1")).name == "mine"


@pytest.mark.parametrize(
    "name", ["", ".", "mine", "GROK-1", "grok-1 ", "./none", "none.toml", "../x", "a\0b", "a\0/b", "/", "x" * 300]
)
def test_a_policy_that_is_not_there_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text(HEAD)
    with pytest.raises(ConfigError):
        load_policy(name)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as refused:
        load_policy("grok")
    assert refused.value.hint is not None
    for name, _ in shipped_policies():
        assert name in refused.value.hint


def test_a_policy_file_that_never_ends_is_refused_and_not_read_whole() -> None:
    with pytest.raises(ConfigError, match=f"more than {MAX_POLICY_BYTES} bytes"):
        _bounded(lambda: load_policy("/dev/zero"))


def _bounded(act: Callable[[], object]) -> None:
    """Run with an address space that a read without end exceeds at once, so that it cannot hurt the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        act()
    except MemoryError:
        pytest.fail("read on without end")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_policy_object_is_taken_as_it_is() -> None:
    policy = parse(HEAD)
    assert load_policy(policy) is policy


def test_equal_rules_have_equal_digests_and_others_have_others() -> None:
    one = parse(HEAD)
    assert one.sha256 == parse("# a comment\n" + HEAD).sha256
    assert one.sha256 != parse(HEAD + "[limits]\nmax_depth = 3").sha256
    assert len({load_policy(name).sha256 for name, _ in shipped_policies()}) == len(list(shipped_policies()))


# ---------------------------------------------------------------- the shipped ones


@pytest.mark.parametrize("name", [name for name, _ in shipped_policies()])
def test_a_shipped_policy_is_named_as_its_file(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == policy.source == name
    assert policy_text(name)[0].startswith(b"#")


@pytest.mark.parametrize("name", [name for name, _ in shipped_policies()])
def test_a_shipped_policy_allows_only_globals_that_have_a_constructor(name: str) -> None:
    known = {".".join(pair) for pair in ALL_CONSTRUCTORS}
    assert load_policy(name).pickle.global_names <= known


def test_a_policy_cannot_teach_new_calls() -> None:
    text = HEAD + '[formats]\nallow = ["pickle"]\n[[pickle.globals]]\nnames = ["posix.system"]\nreason = "I insist"'
    with pytest.raises(ConfigError, match=r"no constructor for posix\.system"):
        parse(text)


def test_a_record_cannot_stand_for_a_function(tmp_path: Path) -> None:
    text = HEAD + '[formats]\nallow = ["pickle"]\n' + RECORD.replace("Pair", "system").replace('"m"', '"posix"')
    assert "global-not-allowed" not in verdicts(scan_bytes(tmp_path, pickled(Exploit()), parse(text)))
    assert scan_bytes(tmp_path, pickled(Exploit()), parse(text)).verdict == "rejected"


def test_the_grok_policy_is_nowhere_wider_than_the_default() -> None:
    default, grok = load_policy(DEFAULT_POLICY), load_policy("grok-1")
    assert grok.pickle.global_names <= default.pickle.global_names
    assert set(grok.pickle.protocols) <= set(default.pickle.protocols)
    for full, rule in grok.pickle.records_by_global.items():
        wider = default.pickle.records_by_global[full]
        assert rule.grouped_scales == wider.grouped_scales
        assert {name: set(d) - set(wider.fields[name]) for name, d in rule.fields.items()} == {
            "weight": set(),
            "scales": set(),
        }
    assert {p for entry in grok.files.inert for p in entry.patterns} <= {
        p for entry in default.files.inert for p in entry.patterns
    }
    assert grok.limits == default.limits == Limits()


# ---------------------------------------------------------------- numpy-quantized


def dtypes() -> list[str]:
    return [name for name in DTYPE_ITEMSIZE if name not in ML_DTYPES_ITEMSIZE or hasattr(ml_dtypes, name)]


@pytest.mark.parametrize("protocol", range(6))
def test_the_default_accepts_every_numeric_array_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    for name in dtypes():
        array = np.zeros((2, 3), getattr(ml_dtypes, name) if name in ML_DTYPES_ITEMSIZE else name)
        report = scan_bytes(tmp_path, pickled(array, protocol))
        assert verdicts(report) == [], name
        assert [spec.dtype.name for spec in report.files[0].tensors] == [name]


@pytest.mark.parametrize("protocol", range(6))
def test_the_default_accepts_plain_containers_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    value = {
        "tree": OrderedDict(a=[np.ones(2), (np.zeros((0, 3)),)], b={}),
        "plain": [1, -1.5, None, True, "text", b"", b"bytes", 1 << 100, (), {3: 4, None: 5}],
        "jax-like": {"weight": np.ones((2, 2), ml_dtypes.bfloat16)},
    }
    assert verdicts(scan_bytes(tmp_path, pickled(value, protocol))) == []


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("module", ["__main__", "model"])
def test_the_default_accepts_the_record_as_any_pickler_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, protocol: int
) -> None:
    genuine = type("QuantizedWeight8bit", (), {"__module__": module})
    holder = sys.modules["__main__"] if module == "__main__" else type(sys)("model")
    monkeypatch.setitem(sys.modules, module, holder)
    monkeypatch.setattr(holder, "QuantizedWeight8bit", genuine, raising=False)
    value = genuine()
    value.weight, value.scales = np.ones((4, 6), np.int8), np.ones((2, 6), ml_dtypes.bfloat16)
    for pickler in (pickle.Pickler, pickle._Pickler):  # the second is written in Python
        stream = io.BytesIO()
        pickler(stream, protocol).dump({"linear": value})
        report = scan_bytes(tmp_path, stream.getvalue())
        assert verdicts(report) == []
        assert [spec.name for spec in report.files[0].tensors] == ["linear/weight", "linear/scales"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b"{}"),
        ("README.md", "# Modèle\n".encode()),
        ("notes.txt", b"\xef\xbb\xbfa\r\n\tb\x0c"),
        ("LICENSE", b"Free"),
        ("LICENSE.apache", b"Free"),
        ("NOTICE", b""),
        ("chat.jinja", b"{{ a }}"),
        ("tokenizer.model", bytes(range(1, 200))),
        ("vocab.spm", b"\n\x0e"),
    ],
)
def test_the_default_accepts_files_that_are_no_tensors(tmp_path: Path, name: str, data: bytes) -> None:
    assert verdicts(scan_bytes(tmp_path, data, name=name)) == []


@pytest.mark.parametrize("name", ["run.py", "config.JSON", "json", "LICENSEX", "tokenizer.model.bak", "x.jsonl"])
def test_the_default_refuses_files_that_it_does_not_name(tmp_path: Path, name: str) -> None:
    assert verdicts(scan_bytes(tmp_path, b"{}", name=name)) == ["not-a-pickle"]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (np.array([object()], object), "dtype-not-numeric"),
        (np.array(["a"]), "dtype-not-numeric"),
        (np.zeros(1, [("a", "i4")]), "dtype-not-numeric"),
        (np.zeros(1, "M8[s]"), "dtype-not-numeric"),
        (np.ma.masked_array([1]), "global-not-allowed"),
        (np.ones(1).view(np.recarray), "global-not-allowed"),
        ({1, 2}, None),
        (1j, "global-not-allowed"),
        (Path("x"), "global-not-allowed"),
        (slice(1), "global-not-allowed"),
        (print, "global-not-allowed"),
        (Exploit(), "global-not-allowed"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_the_default_refuses_what_is_no_plain_data(tmp_path: Path, value: object, code: str | None) -> None:
    report = scan_bytes(tmp_path, pickle.dumps(value if not isinstance(value, complex) else [value]))
    assert report.verdict == "rejected"
    if code is not None:
        assert code in verdicts(report)


# ---------------------------------------------------------------- the record's rule

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool]] = {
    "one group": ((4, 6), (1, 6), True),
    "a group a row": ((4, 6), (4, 6), True),
    "stacked": ((3, 8, 6), (3, 2, 6), True),
    "a group too many": ((4, 6), (3, 6), False),
    "more groups than rows": ((4, 6), (8, 6), False),
    "no group": ((4, 6), (0, 6), False),
    "another width": ((4, 6), (2, 5), False),
    "another rank": ((4, 6), (6,), False),
    "another stack": ((3, 8, 6), (2, 2, 6), False),
    "vectors": ((6,), (6,), False),
}


@pytest.mark.parametrize("policy", ["numpy-quantized", "grok-1"])
@pytest.mark.parametrize("case", SHAPES)
def test_scales_belong_to_their_weight(tmp_path: Path, policy: str, case: str) -> None:
    weight, scales, fits = SHAPES[case]
    assert verdicts(scan_bytes(tmp_path, quantized(weight, scales), policy)) == ([] if fits else ["bad-record"])


@pytest.mark.parametrize(
    ("dtype", "default", "grok"),
    [
        (np.float32, [], []),
        (ml_dtypes.bfloat16, [], []),
        (np.float16, [], ["bad-record"]),
        (np.float64, ["bad-record"], ["bad-record"]),
        (np.int8, ["bad-record"], ["bad-record"]),
    ],
)
def test_scales_are_of_a_declared_dtype(tmp_path: Path, dtype: Any, default: list[str], grok: list[str]) -> None:
    assert verdicts(scan_bytes(tmp_path, quantized(dtype=dtype))) == default
    assert verdicts(scan_bytes(tmp_path, quantized(dtype=dtype), "grok-1")) == grok


# ---------------------------------------------------------------- grok-1's shards


@pytest.mark.parametrize("name", ["tensor00000_000", "tensor00769_000", "tensor99999_999"])
def test_grok_accepts_a_shard(tmp_path: Path, name: str) -> None:
    for data in (quantized(), pickled(np.ones(3, np.float32)), pickled(np.ones(3, ml_dtypes.bfloat16))):
        assert verdicts(scan_bytes(tmp_path, data, "grok-1", name)) == []


@pytest.mark.parametrize(
    "name",
    [
        "tensor0_000",
        "tensor000000_000",
        "tensor00000_0000",
        "tensor00000_000.bak",
        "xtensor00000_000",
        "Tensor00000_000",
        "tensor00000_000\n",
        "tensor\u0660\u0660\u0660\u0660\u0660_000",
        "weights",
    ],
)
def test_grok_refuses_another_name(tmp_path: Path, name: str) -> None:
    assert verdicts(scan_bytes(tmp_path, quantized(), "grok-1", name)) == ["shard-name"]


@pytest.mark.parametrize(
    "value", [[], {}, 1, None, "text", b"bytes", [np.ones(3, np.float32)], {"weight": np.ones((2, 2), np.int8)}, ()]
)
def test_grok_refuses_other_content(tmp_path: Path, value: object) -> None:
    assert verdicts(scan_bytes(tmp_path, pickled(value), "grok-1")) == ["shard-content"]
    assert verdicts(scan_bytes(tmp_path, pickled(value), "grok-1", "a")) == ["shard-name", "shard-content"]


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64", ">f4", "uint16", "bool"])
def test_grok_refuses_another_dtype(tmp_path: Path, dtype: str) -> None:
    assert verdicts(scan_bytes(tmp_path, pickled(np.ones(3, dtype)), "grok-1")) == ["shard-dtype"]


@pytest.mark.parametrize("protocol", [0, 1])
def test_grok_refuses_the_protocols_of_python_2(tmp_path: Path, protocol: int) -> None:
    assert verdicts(scan_bytes(tmp_path, pickled(np.ones(3, np.float32), protocol), "grok-1")) != []


def test_every_rule_says_where_it_stands(tmp_path: Path) -> None:
    for data, name in ((quantized(), "a"), (pickled([]), "tensor00000_000"), (pickled(np.ones(3)), "tensor00000_000")):
        (finding,) = scan_bytes(tmp_path, data, "grok-1", name).all_findings
        assert finding.hint is not None
        assert "[shards]" in finding.hint


# ---------------------------------------------------------------- limits

TIGHT: dict[str, tuple[int, object]] = {
    "max_operations": (10, [1] * 20),
    "max_depth": (3, [[[[[]]]]]),
    # Held once a window of 64 KiB, so that it costs nothing; a smaller bound than that may be exceeded by a window.
    "max_memo_entries": (5, [str(n) for n in range(20_000)]),
    "max_stack_items": (5, tuple(range(30_000))),
    "max_values": (5, [1] * 20),
}


@pytest.mark.parametrize("limit", TIGHT)
def test_each_limit_holds_and_is_named(tmp_path: Path, limit: str) -> None:
    bound, value = TIGHT[limit]
    text = HEAD + f'[formats]\nallow = ["pickle"]\n[limits]\n{limit} = {bound}\n'
    (finding,) = scan_bytes(tmp_path, pickled(value), parse(text)).all_findings
    assert finding.code == "limit-exceeded"
    assert finding.hint is not None
    assert f"`{limit}`" in finding.hint
    assert verdicts(scan_bytes(tmp_path, pickled(value))) == []


def test_the_limit_of_inert_files_holds(tmp_path: Path) -> None:
    inert = '[[files.inert]]\npatterns = ["*.json"]\ncontent = "json"\nreason = "documents"\n'
    policy = parse(HEAD + inert + "[limits]\nmax_inert_bytes = 4")
    assert verdicts(scan_bytes(tmp_path, b"[12]", policy, "a.json")) == []
    assert verdicts(scan_bytes(tmp_path, b"[123]", policy, "a.json")) == ["limit-exceeded"]


# ---------------------------------------------------------------- nouns


def test_the_first_entry_that_fits_a_name_counts() -> None:
    text = "".join(
        f'[[files.inert]]\npatterns = ["{pattern}"]\ncontent = "{content}"\nreason = "documents"\n'
        for pattern, content in (("a.*", "text"), ("*.json", "json"))
    )
    files = parse(HEAD + text).files

    def content(name: str) -> str | None:
        found: InertFiles | None = files.inert_for(name)
        return found.content if found else None

    assert [content(name) for name in ("a.json", "b.json", "A.JSON", "b")] == ["text", "json", None, None]


def test_a_record_rule_stands_for_its_name_in_each_module() -> None:
    policy = parse(HEAD + RECORD.replace('["m"]', '["m", "n.o"]'))
    rules: dict[str, RecordRule] = dict(policy.pickle.records_by_global)
    assert set(rules) == {"m.Pair", "n.o.Pair"}


def test_config_errors_are_ours() -> None:
    assert issubclass(ConfigError, SafeloadError)
    assert ConfigError.exit_code == 2
