import pickle
from pathlib import Path

import numpy as np
import pytest

from safeload.cli import main
from safeload.errors import ConfigError
from safeload.formats.pickles.torch_constructors import ALL_CONSTRUCTORS
from safeload.policy import INTERPRETED_GLOBALS, Policy, load_policy
from safeload.rendering.text import hint_lines
from safeload.scanning import scan

HEAD = 'version = 1\nname = "mine"\ndescription = "for a test"\nextends = "numpy-quantized"\n'
SCALAR = '[[widen.pickle.globals]]\nnames = ["numpy.core.multiarray.scalar"]\nreason = "scalars are data"\n'
BASE = load_policy("numpy-quantized")


def parse(text: str) -> Policy:
    return Policy.parse(text.encode(), source="mine.toml")


def test_a_derivation_that_changes_nothing_is_its_base_under_another_name() -> None:
    policy = parse(HEAD)
    assert policy.additions_to(BASE) == BASE.additions_to(policy) == []
    assert policy.pickle == BASE.pickle
    assert policy.limits == BASE.limits
    assert policy.sha256 != BASE.sha256


def test_only_what_is_said_is_widened() -> None:
    policy = parse(HEAD + SCALAR + "[widen.limits]\nmax_values = 3_000_000\n")
    assert policy.additions_to(BASE) == [
        "global numpy.core.multiarray.scalar",
        "max_values = 3,000,000 (from 2,000,000)",
    ]
    assert BASE.additions_to(policy) == []


def test_only_what_is_said_is_narrowed() -> None:
    narrow = '[narrow]\ninert_patterns = ["*.json"]\n[narrow.pickle]\nprotocols = [0, 1]\n'
    narrow += 'globals = ["__builtin__.object"]\nrecords = ["QuantizedWeight8bit"]\n[narrow.limits]\nmax_depth = 3\n'
    policy = parse(HEAD + narrow)
    assert policy.additions_to(BASE) == []
    assert BASE.additions_to(policy) == [
        "pickle protocol 0",
        "pickle protocol 1",
        "global __builtin__.object",
        "record __main__.QuantizedWeight8bit",
        "record model.QuantizedWeight8bit",
        "files named *.json as json",
        "max_depth = 64 (from 3)",
    ]


def test_rules_for_shards_narrow() -> None:
    shards = '[narrow.shards]\nname = "t[0-9]+"\nholds = ["array"]\narray_dtypes = ["int8"]\n'
    policy = parse(HEAD + shards)
    assert policy.additions_to(BASE) == []
    assert BASE.additions_to(policy) == ["shards other than t[0-9]+ with array"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[widen.pickle]\nprotocols = [4]", "protocol 4 is allowed by the base already"),
        ("[narrow.pickle]\nprotocols = [4, 6]", "protocols"),
        (SCALAR.replace("core.multiarray.scalar", "ndarray"), "global numpy.ndarray is allowed by the base already"),
        ('[narrow.pickle]\nglobals = ["os.system"]', "global os.system is not allowed by the base"),
        ('[narrow.pickle]\nrecords = ["Pair"]', "record Pair is not allowed by the base"),
        ('[narrow]\ninert_patterns = ["*.exe"]', "pattern *.exe is not allowed by the base"),
        ("[widen.limits]\nmax_depth = 64", "does not widen"),
        ("[widen.limits]\nmax_depth = 1", "does not widen"),
        ("[narrow.limits]\nmax_depth = 64", "does not narrow"),
        ("[narrow.limits]\nmax_dept = 1", "there is no limit max_dept"),
        ("[widen.limits]\nmax_depth = 101", "max_depth"),
        ("[pickle]\nprotocols = [4]", "pickle"),
        ("[limits]\nmax_depth = 1", "limits"),
        (SCALAR + SCALAR, "listed 2 times"),
    ],
)
def test_a_change_that_is_none_or_goes_the_wrong_way_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(HEAD + text)
    assert complaint in refused.value.message


def test_only_shipped_policies_can_be_extended() -> None:
    for base in ("./other.toml", "mine", "../grok-1"):
        with pytest.raises(ConfigError):
            parse(HEAD.replace("numpy-quantized", base))


def test_grok_1_is_narrower_than_the_default_and_not_the_other_way_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_policy("grok-1").additions_to(BASE) == []
    assert main(["policy", "diff", "numpy-quantized", "grok-1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "accepted"
    assert main(["policy", "diff", "grok-1", "numpy-quantized"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("rejected: ")


def test_the_resolved_policy_is_a_policy_file_of_the_same_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + SCALAR)
    assert main(["policy", "show", str(path)]) == 0
    shown = capsys.readouterr()
    again = Policy.parse(shown.out.encode(), source="again")
    assert again.sha256 == load_policy(path).sha256
    assert again.sha256 in shown.err
    assert "extends" not in shown.out


def test_the_digest_is_that_of_what_is_allowed_and_not_of_the_comments() -> None:
    assert parse("# why\n" + HEAD).sha256 == parse(HEAD).sha256
    assert parse(HEAD + SCALAR).sha256 != parse(HEAD).sha256


def test_what_a_policy_can_list_is_what_has_a_constructor() -> None:
    assert {f"{module}.{name}" for module, name in ALL_CONSTRUCTORS} == INTERPRETED_GLOBALS


def test_a_policy_cannot_teach_a_call() -> None:
    with pytest.raises(ConfigError, match=r"no constructor for os\.system"):
        parse(HEAD + SCALAR.replace("numpy.core.multiarray.scalar", "os.system"))


ORDERED = """version = 1
name = "x"
description = "for a test"
[[files.inert]]
patterns = ["{}"]
content = "{}"
reason = "first of two"
[[files.inert]]
patterns = ["{}"]
content = "{}"
reason = "second of two"
"""


def test_the_order_of_patterns_is_part_of_what_a_policy_allows() -> None:
    strict = parse(ORDERED.format("*.json", "json", "c.json", "opaque"))
    loose = parse(ORDERED.format("c.json", "opaque", "*.json", "json"))
    assert loose.additions_to(strict) == ["files named c.json as opaque"]
    assert strict.sha256 != loose.sha256


def test_the_order_of_a_record_s_fields_is_part_of_what_a_policy_allows() -> None:
    record = """version = 1
name = "x"
description = "for a test"
[[pickle.records]]
name = "Pair"
modules = ["m"]
fields = {{ {} = ["int8"], {} = ["int8"] }}
reason = "two arrays"
"""
    one, other = parse(record.format("a", "b")), parse(record.format("b", "a"))
    assert one.sha256 != other.sha256
    assert one.additions_to(other) == ["record m.Pair with the fields a, b"]


def test_what_is_narrowed_away_fits_no_later_pattern() -> None:
    policy = parse(HEAD + '[narrow]\ninert_patterns = ["*.json"]')
    assert BASE.files.inert_for("LICENSE.json") is not None
    assert policy.files.inert_for("LICENSE.json") is None
    assert policy.files.inert_for("LICENSE.txt") is not None
    assert policy.additions_to(BASE) == []


def pasted(hint: str) -> str:
    """The lines that a terminal shows below a hint."""
    return "\n".join(list(hint_lines(hint))[1:])


@pytest.mark.parametrize("name", ["notes.rst", "a[1]*?.x", 'quo"te\\.x', "é\u202e\n.x", "x\U000e0001"])
def test_the_lines_of_a_hint_admit_the_file_that_was_refused_and_no_other(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"Hello\n")
    (finding,) = scan(tmp_path / name).files[0].findings
    lines = pasted(finding.hint or "")
    policy = parse(HEAD + lines + "\n" + lines.replace('patterns = ["', 'patterns = ["other'))
    assert scan(tmp_path / name, policy=policy).is_accepted
    assert len(policy.additions_to(BASE)) == 2
    assert parse(HEAD + lines).files.inert_for("a1bc.x") is None


def test_the_lines_of_a_hint_fit_a_policy_that_stands_alone(tmp_path: Path) -> None:
    alone = Policy.parse(BASE.to_toml().encode(), source="alone.toml")
    (tmp_path / "notes.rst").write_bytes(b"Hello\n")
    (finding,) = scan(tmp_path / "notes.rst", policy=alone).files[0].findings
    wider = Policy.parse((BASE.to_toml() + "\n" + pasted(finding.hint or "")).encode(), source="alone.toml")
    assert scan(tmp_path / "notes.rst", policy=wider).is_accepted


def test_the_lines_of_a_hint_admit_a_global_that_was_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(pickle.dumps(np.ones(2), 4))
    narrow = parse(HEAD + '[narrow.pickle]\nglobals = ["numpy._core.multiarray._reconstruct"]\n')
    alone = Policy.parse(narrow.to_toml().encode(), source="alone.toml")
    findings = scan(tmp_path / "a", policy=alone).files[0].findings
    lines = pasted(next(f.hint for f in findings if "_reconstruct" in f.message) or "")
    wider = Policy.parse((narrow.to_toml() + "\n" + lines).encode(), source="alone.toml")
    assert scan(tmp_path / "a", policy=wider).is_accepted
