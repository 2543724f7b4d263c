"""Every refused cause has a vector, and every vector is refused for exactly that cause, at exactly that byte."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import safeload
from safeload import errors
from safeload.formats import MemorySource
from safeload.policy import Limits, Policy, load_policy
from safeload.scanning import parse
from tests.vectors.generate import FOLDER, vectors

PACKAGE = Path(safeload.__file__).parent
FILES = sorted(FOLDER.glob("*.vector"))


def read(path: Path) -> tuple[dict[str, str], bytes]:
    head, _, raw = path.read_bytes().partition(b"\n\n")
    return dict(line.split(": ", 1) for line in head.decode().splitlines() if not line.endswith(": ")), raw


def merged(base: Any, change: Any) -> Any:
    if isinstance(change, dict):
        return {**base, **{key: merged(base[key], value) for key, value in change.items()}}
    return tuple(change) if isinstance(change, list) else change


class Beside:
    """The one file that a vector may have beside it."""

    def __init__(self, header: dict[str, str]) -> None:
        self.name, _, self.hex = header.get("beside", "").partition(" ")

    def read(self, name: str, limit: int) -> bytes | None:
        data = bytes.fromhex(self.hex)
        assert len(data) <= limit
        return data if self.name == name else None


def policy_of(header: dict[str, str]) -> Policy:
    base = load_policy(header["policy"])
    change = tomllib.loads(header.get("change", ""))
    return Policy.model_validate(merged(base.model_dump(), change)) if change else base


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_vector_is_refused_for_its_cause_at_its_byte(path: Path) -> None:
    header, raw = read(path)
    _, parsed = parse(MemorySource(raw), header["file"], policy_of(header), Beside(header))
    assert parsed.refusal is not None
    first = parsed.refusal.findings[0]
    found = type(parsed.refusal).__name__, first.code, "-" if first.offset is None else str(first.offset)
    assert found == (header["expect"], header["code"], header["at"])
    assert type(parsed.refusal) is getattr(errors, header["expect"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_refusal_is_one_short_printable_sentence(path: Path) -> None:
    header, raw = read(path)
    _, parsed = parse(MemorySource(raw), header["file"], policy_of(header), Beside(header))
    assert parsed.refusal is not None
    for finding in parsed.refusal.findings:
        # A hint may end with lines to paste.
        for text in (finding.message, *(finding.hint or "").split("\n")):
            assert text.isprintable()
            assert len(text) < 800
            assert "type Refused" not in text


def test_the_generator_makes_exactly_these_files() -> None:
    made = {f"{vector.name}.vector": vector.to_bytes() for vector in vectors()}
    assert len(made) == len(list(vectors()))
    assert made == {path.name: path.read_bytes() for path in FILES}


def codes_in(tree: ast.AST) -> set[str]:
    """The literals that stand where a finding's code stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            code = node.args[0].value
            if name in {"Finding", "refuse", "_refuse", "_fail"} and isinstance(code, str):
                assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", code), code
                found.add(code)
    return found


def test_every_code_has_a_vector() -> None:
    codes: set[str] = set()
    for path in sorted((PACKAGE / "formats").rglob("*.py")):
        codes |= codes_in(ast.parse(path.read_text()))
    decide = {"parse", "_parse_content", "_parse_pickle", "_check_name", "_check_shard"}
    scanning = ast.parse((PACKAGE / "scanning.py").read_text())
    parts = [n for n in scanning.body if isinstance(n, ast.FunctionDef) and n.name in decide]
    assert len(parts) == len(decide)
    codes |= {code for part in parts for code in codes_in(part)}
    # One only ever follows 64 others, so no vector begins with it (`name-many` ends with it); one is met only where
    # parts of a file are staged (test_staging).
    assert codes - {"too-many-findings", "not-staged"} == {read(path)[0]["code"] for path in FILES}


def test_findings_end_at_a_bound() -> None:
    header, raw = read(FOLDER / "name-many.vector")
    _, parsed = parse(MemorySource(raw), header["file"], policy_of(header), Beside(header))
    assert parsed.refusal is not None
    assert [f.code for f in parsed.refusal.findings] == ["global-not-allowed"] * 64 + ["too-many-findings"]


def test_every_limit_has_a_vector_and_is_named_where_it_is_met() -> None:
    named = set()
    for path in FILES:
        header, raw = read(path)
        if header["code"] == "limit-exceeded":
            _, parsed = parse(MemorySource(raw), header["file"], policy_of(header), Beside(header))
            assert parsed.refusal is not None
            named |= set(re.findall(r"`(max_\w+)`", parsed.refusal.findings[0].hint or ""))
    assert named == set(Limits.model_fields)
