"""A file of rules is read strictly, and no rule can be kept busy for ever by a name."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from safeload.errors import ConfigError
from safeload.mapping_rules import (
    MAX_NAME,
    MAX_RULES_BYTES,
    MappingRules,
    expand,
    literal,
    load_rules,
    shipped_mappings,
)

HEAD = 'version = 1\nname = "mine"\ndescription = "Rules of a test."\n'


def parse(text: str) -> MappingRules:
    return MappingRules.parse((HEAD + text).encode(), source="rules.toml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.message.startswith("mapping rules.toml: ")
    return caught.value.message


def test_every_step_can_be_written_down() -> None:
    rules = parse(
        r"""
        rename = [{ name = 'a\.(\d+)', to = 'b/\1' }, { name = '(?P<x>y)', to = '\g<x>\\z' }]
        exclude = [{ name = 'c', reason = "not a parameter" }]
        transpose = [{ name = 'd', axes = [1, 0] }]
        split = [{ name = 'e(\d)', axis = -1, into = ['f\1', 'g\1'], sizes = [1, 2] }]
        reshape = [{ name = 'l', shape = [2, -1] }]
        squeeze = [{ name = 'm', axes = [0] }]
        tie = [{ name = 'n', also = 'o' }]
        build = [{ name = 'p', kind = "causal-mask" }]
        cast = [{ name = 'q', dtype = "bfloat16" }]
        [[merge]]
        names = ['h(\d)', 'i(\d)']
        into = 'j\1'
        axis = 1
        [[merge]]
        names = ['k\d']
        into = 'k'
        parts = 3
        stack = true
        """
    )
    assert [merge.n_parts for merge in rules.merge] == [2, 3]
    assert rules.reshape[0].shape == (2, -1)
    with pytest.raises(ValueError, match="frozen"):
        rules.rename = ()  # type: ignore[misc] # that is the claim


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("renames = []", "renames: "),
        ("rename = [{ name = 'a', to = 'b', flags = 1 }]", "rename.0.flags: "),
        ("rename = [{ name = 'a' }]", "rename.0.to: "),
        ("rename = [{ name = 1, to = 'b' }]", "rename.0.name: "),
        ("rename = [{ name = '(', to = 'b' }]", "no regular expression"),
        ("rename = [{ name = '', to = 'b' }]", "rename.0.name: "),
        ("rename = [{ name = 'a', to = '' }]", "rename.0.to: "),
        (r"rename = [{ name = 'a', to = '\1' }]", "a group that"),
        (r"rename = [{ name = '(a)', to = '\2' }]", "a group that"),
        (r"rename = [{ name = '(a)', to = '\g<x>' }]", "a group that"),
        (r"rename = [{ name = 'a', to = 'b\d' }]", "a backslash"),
        (r"rename = [{ name = 'a', to = 'b\' }]", "a backslash"),
        (f"rename = [{{ name = '{'a' * 1001}', to = 'b' }}]", "rename.0.name: "),
        ("exclude = [{ name = 'a' }]", "exclude.0.reason: "),
        ("exclude = [{ name = 'a', reason = 'no' }]", "exclude.0.reason: "),
        ("transpose = [{ name = 'a', axes = [] }]", "transpose.0.axes: "),
        ("transpose = [{ name = 'a', axes = [33] }]", "transpose.0.axes.0: "),
        ("transpose = [{ name = 'a', axes = [1.0] }]", "transpose.0.axes.0: "),
        ("split = [{ name = 'a', axis = 0, into = ['b'] }]", "split.0.into: "),
        ("split = [{ name = 'a', axis = 0, into = ['b', 'c'], sizes = [1] }]", "a size for each"),
        (r"split = [{ name = 'a', axis = 0, into = ['b', '\1'] }]", "a group that"),
        ("merge = [{ names = ['a'], into = 'b' }]", "expected `parts`"),
        ("merge = [{ names = [], into = 'b' }]", "merge.0.names: "),
        (r"merge = [{ names = ['(a)', 'b'], into = '\1' }]", "a group that"),
        ("reshape = [{ name = 'a', shape = [-2] }]", "reshape.0.shape.0: "),
        (r"tie = [{ name = 'a', also = '\1' }]", "a group that"),
        ("build = [{ name = 'a', kind = 'zeros' }]", "build.0.kind: "),
        ("cast = [{ name = 'a', dtype = 'int8' }]", "cast.0.dtype: "),
        ("rename = [", "not TOML"),
        ("version = 2", "not TOML"),  # a key that stands twice
    ],
)
def test_what_is_no_rule_is_refused(text: str, what: str) -> None:
    assert what in refusal(text)


@pytest.mark.parametrize("head", [HEAD.replace("1", "2"), HEAD.replace("1", "true"), HEAD.replace("mine", "My rules")])
def test_a_file_of_another_version_or_without_a_name_is_refused(head: str) -> None:
    with pytest.raises(ConfigError):
        MappingRules.parse(head.encode(), source="rules.toml")


def test_bytes_that_are_no_text_and_files_that_are_too_long_are_refused() -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        MappingRules.parse(b"\xff", source="rules.toml")
    with pytest.raises(ConfigError, match="more than"):
        MappingRules.parse(b" " * (MAX_RULES_BYTES + 1), source="rules.toml")


def test_only_the_first_problems_are_told() -> None:
    many = "rename = [" + "{ name = '(', to = 'b' }," * 20 + "]"
    assert refusal(many).endswith("and 12 more")


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a*)*b",
        "(?:a|aa){2,}b",
        "(a|a){20}b",
        "a*a*a*a*b",
        "a{0,9}a{0,9}a{0,9}a{0,9}b",
        "a?" * 29,
        "(a|aa)" * 29,
        r"(a)\1",
        "(?i)a",
        "(?P<x>a)(?P=x)",
        "(a)?(?(1)b|c)",
        "(?<=a)b",
        # What is no class and no quantifier must not hide what follows.
        r"[\][](a+)+]",
        "a{(b+)+}",
        "[]](a+)+]",
        "[^]](a+)+]",
        r"\\(a+)+",
        "(?=(a+)+)a",
    ],
)
def test_an_expression_that_could_take_for_ever_is_refused(pattern: str) -> None:
    assert "rename.0.name" in refusal(f"rename = [{{ name = '{pattern}', to = 'b' }}]")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:transformer\.)?h\.(\d+)\.(attn|mlp)\.(c_attn|c_proj|c_fc)\.(weight|bias)",
        r".*/(\w+)/kernel",
        r"layers_\d{1,3}/[^/]+/scale",
        r"[a+*?|]+[b+*{1,}|]",
        r"\(a\)+",
        r"a{2}b{2}c{2}d{2}e{2}",
        r"(?!bad).*",
        "a{b",
    ],
)
def test_an_expression_that_names_need_is_accepted(pattern: str) -> None:
    assert parse(f"rename = [{{ name = '{pattern}', to = 'b' }}]").rename[0].name == pattern


@pytest.mark.parametrize(
    # Names that make accepted expressions work hardest: three quantifiers without a bound, and many choices.
    ("pattern", "name"),
    [
        (".*a.*a.*b", "a" * MAX_NAME),
        ("a?" * 20 + "a" * 20 + "b", "a" * 39),
        ("(?:a|aa)" * 22 + "b", "a" * 33),
    ],
)
def test_an_accepted_expression_ends_on_the_worst_of_names(pattern: str, name: str) -> None:
    (rule,) = parse(f"rename = [{{ name = '{pattern}', to = 'b' }}]").rename
    started = time.process_time()
    assert re.fullmatch(rule.name, name) is None
    assert time.process_time() - started < 10


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    ("pattern", "name", "template", "made"),
    [
        (r"h\.(\d+)\.w", "h.12.w", r"blocks/\1/weight", "blocks/12/weight"),
        (r"(?P<n>\d+)", "7", r"\g<n>0", "70"),
        (r"(a)?b", "b", r"x\1y", "xy"),
        (r"(a)", "a", r"\\1", r"\1"),
        (r"(\d)", "1", r"\10", "10"),
        # What comes from a name is not read as a template.
        (r"(.*)", r"\1\g<x>", r"\1", r"\1\g<x>"),
    ],
)
def test_a_template_stands_for_what_was_matched(pattern: str, name: str, template: str, made: str) -> None:
    match = re.fullmatch(pattern, name)
    assert match is not None
    assert expand(template, match) == made


def test_a_literal_template_stands_for_itself() -> None:
    match = re.fullmatch("a", "a")
    assert match is not None
    assert expand(literal(r"odd\1 name"), match) == r"odd\1 name"


# ---------------------------------------------------------------- where rules are


def test_every_shipped_mapping_is_valid_and_named_after_its_file() -> None:
    found = dict(shipped_mappings())
    assert set(found) == {"gpt2-huggingface", "gpt2-nested", "gpt2-tensorflow"}
    assert {name: load_rules(name).name for name in found} == {name: name for name in found}


def test_a_path_and_a_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HEAD)
    assert load_rules(path).name == load_rules(str(path)).name == "mine"
    rules = load_rules(path)
    assert load_rules(rules) is rules
    # A file here cannot stand in for a shipped one.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-nested").write_text(HEAD)
    assert load_rules("gpt2-nested").name == "gpt2-nested"
    with pytest.raises(ConfigError, match="no mapping is called") as caught:
        load_rules("mine")
    assert "gpt2-nested" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match="cannot read"):
        load_rules(tmp_path / "nowhere.toml")
