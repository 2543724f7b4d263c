"""Every code that an audit can meet is explained, and no code is that it cannot."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import safeload
from safeload.errors import Finding
from safeload.rendering.rules import RULES, Rule, is_known, known_reasons, rule_of
from safeload.report import FileReport, Report

PACKAGE = Path(safeload.__file__).parent
AUDITED = (
    *(
        "auditing",
        "comparing",
        "expecting",
        "files",
        "interchange",
        "loading",
        "manifest",
        "oms",
        "scanning",
        "staging",
    ),
    *("verifying", "formats", "trust"),
)
"""What an audit calls, by file or folder. Fetching, planning and restoring have reports of their own."""

MAKERS = {"Finding", "_fail", "_refuse", "_refusal", "refuse", "fail"}


def sources() -> Iterator[Path]:
    for name in AUDITED:
        yield from [PACKAGE / f"{name}.py"] if (PACKAGE / f"{name}.py").is_file() else (PACKAGE / name).rglob("*.py")


def codes() -> dict[str, str]:
    """Return each literal code that is given to what makes findings, and a file that does so."""
    found = {}
    for file in sources():
        for node in ast.walk(ast.parse(file.read_bytes())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for part in ast.walk(node.args[0]):
                literal = part.value if isinstance(part, ast.Constant) else None
                if called in MAKERS and isinstance(literal, str) and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", literal):
                    found[literal] = str(file.relative_to(PACKAGE))
    return found


def test_every_code_of_what_an_audit_calls_has_a_rule() -> None:
    missing = {code: file for code, file in codes().items() if code not in RULES}
    assert missing == {}


def test_every_rule_is_of_a_code_that_there_is() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in sources())
    assert [code for code in RULES if f'"{code}"' not in text] == []


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_says_what_and_what_to_do(rule: Rule) -> None:
    assert len(rule.title.split()) >= 3
    assert not rule.title.endswith(".")
    assert rule.help.endswith(".")
    assert rule.help.count("`") % 2 == 0


def test_an_unknown_code_is_told_in_its_own_words() -> None:
    assert (rule_of("from-the-future").title, rule_of("from-the-future").kind) == ("from the future", "other")


def test_known_is_what_the_baseline_of_an_audit_lists() -> None:
    known = {"code": "a-b", "path": "x", "sha256": "0" * 64, "reason": "looked at"}
    report = Report((FileReport("x", "pickle", 1, findings=(Finding("a-b", "m"),)),), (), {"audit": {"known": [known]}})
    reasons = known_reasons(report)
    assert reasons == {("x", "a-b"): "looked at"}
    assert is_known(Finding("a-b", "m", file="x"), reasons)
    assert not is_known(Finding("a-b", "m", file="y"), reasons)
    assert not is_known(Finding("a-b", "m"), reasons)
    assert known_reasons(Report(())) == {}
