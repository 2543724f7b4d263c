"""A policy that allows more never refuses what one that allows less accepts."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.records import QuantizedWeight8bit
from safeload.scanning import scan
from tests.simulator import Exploit, pickled

WIDE = load_policy(DEFAULT_POLICY).model_dump()

ARRAY = np.ones((2, 3), np.float32)
VALUES: tuple[Any, ...] = (
    1,
    [[[["deep"]]]],
    ["text"] * 30,
    ARRAY,
    np.ones(2, ml_dtypes.bfloat16),
    np.ones(0),
    OrderedDict(a=ARRAY, b=b"bytes"),
    {"a": ARRAY, "b": [ARRAY, np.asfortranarray(np.ones((3, 2), ">i2"))]},
    Exploit(),
)
FILES = {
    **{f"tensor{n:05}_{p:03}": pickled(v, p) for n, v in enumerate(VALUES) for p in (0, 2, 4)},
    **{
        f"tensor{90 + n:05}_000": pickled(
            QuantizedWeight8bit(weight=np.ones((4, 2), np.int8), scales=np.ones((2, 2), dtype))  # type: ignore[call-arg]
        )
        for n, dtype in enumerate((np.float32, np.float16, ml_dtypes.bfloat16))
    },
    "a.json": b"{}",
    "a.md": b"text",
    "b.md": b"\0",
    "tokenizer.model": b"\n\x05",
    "noise": b"\xfe",
}


@st.composite
def narrower(draw: st.DrawFn, wide: dict[str, Any]) -> dict[str, Any]:
    """Take something away from a policy: some entries, dtypes, names or protocols, or a part of a limit."""

    def some(entries: tuple[Any, ...], *, at_least: int = 0) -> tuple[Any, ...]:
        # Most stay, so that most files still pass.
        kept = tuple(entry for entry in entries if draw(st.integers(0, 9)) > 0)
        return kept if len(kept) >= at_least else entries

    made = {**wide, "pickle": {**wide["pickle"]}, "files": {"inert": some(wide["files"]["inert"])}}
    made["pickle"]["protocols"] = some(wide["pickle"]["protocols"])
    made["pickle"]["globals"] = tuple(
        {**entry, "names": some(entry["names"], at_least=1)} for entry in some(wide["pickle"]["globals"])
    )
    made["pickle"]["records"] = tuple(
        {**rule, "fields": {name: some(found) for name, found in rule["fields"].items()}}
        # What a rule for shards names must stay declared.
        for rule in (some(wide["pickle"]["records"]) if wide["shards"] is None else wide["pickle"]["records"])
    )
    if draw(st.booleans()):
        limit = draw(st.sampled_from(sorted(wide["limits"])))
        made["limits"] = {**wide["limits"], limit: draw(st.integers(1, min(60, wide["limits"][limit])))}
    if wide["shards"] is None and draw(st.booleans()):
        holds = ("array", "QuantizedWeight8bit") if made["pickle"]["records"] else ("array",)
        made["shards"] = {"name": "tensor.*", "holds": some(holds, at_least=1), "array_dtypes": ("float32", "bfloat16")}
    return made


def accepted(folder: Path, rules: dict[str, Any]) -> set[str]:
    policy = Policy.model_validate(rules)
    return {Path(file.path).name for file in scan(folder, policy=policy).files if file.verdict == "accepted"}


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_allowing_more_refuses_nothing_more(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "noise").exists():
        for name, content in FILES.items():
            (tmp_path / name).write_bytes(content)
    middle = data.draw(narrower(WIDE))
    narrow = data.draw(narrower(middle))
    assume(narrow != WIDE)
    by_narrow, by_middle, by_wide = (accepted(tmp_path, rules) for rules in (narrow, middle, WIDE))
    assert by_narrow <= by_middle <= by_wide
    assert len(by_wide) >= 27
    assert "noise" not in by_wide
    assert "b.md" not in by_wide
