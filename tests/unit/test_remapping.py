"""Every tensor ends in one place, everything demanded is given, and all that is wrong is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from safeload import remapping, sign
from safeload.decoding import PartialTensor
from safeload.errors import ConfigError, Finding, LimitError, PolicyError, StagingError
from safeload.formats.safetensors_writing import write_safetensors
from safeload.grok1 import get_load_path_str
from safeload.loading import load_host
from safeload.mapping_rules import MAX_NAME, MappingRules
from safeload.records import QuantizedWeight8bit
from safeload.remapping import (
    MappingReport,
    Origin,
    canonical_blocks,
    remap,
    remap_and_report,
    rules_of_lookup,
    same_value,
    survey,
)
from safeload.tensors import DType, Extent, TensorSpec
from safeload.trust.keys import SecretKey

KEY = SecretKey.generate("ed25519")
HEAD = 'version = 1\nname = "mine"\ndescription = "Rules of a test."\n'


def rules(text: str = "") -> MappingRules:
    return MappingRules.parse((HEAD + text).encode(), source="rules.toml")


def demand(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def mapped(tensors: Mapping[str, Any], text: str = "", target: Any = None) -> dict[str, Any]:
    return remap({"file": tensors}, rules(text), target=target)


def findings(tensors: Mapping[str, Any], text: str = "", target: Any = None) -> tuple[Finding, ...]:
    """Return what is refused, having seen that `survey` says just that and `remap` raises it."""
    told = survey({"file": tensors}, rules(text), target=target).findings
    with pytest.raises(PolicyError) as caught:
        mapped(tensors, text, target)
    assert caught.value.findings == told
    return told


def codes(tensors: Mapping[str, Any], text: str = "", target: Any = None) -> list[str]:
    return [finding.code for finding in findings(tensors, text, target)]


# ---------------------------------------------------------------- each step


def test_names_are_split_into_a_nested_dict() -> None:
    tree = mapped({"a/b": array(2), "a/c": array(3), "d.e": array(1)})
    assert {key: sorted(value) if isinstance(value, dict) else "leaf" for key, value in tree.items()} == {
        "a": ["b", "c"],
        "d.e": "leaf",
    }


def test_rename_takes_the_first_rule_that_matches_the_whole_name_and_only_once() -> None:
    text = r"""rename = [{ name = 'a', to = 'b' }, { name = 'b', to = 'a' }, { name = 'h(\d)', to = 'x/\1' },
        { name = 'h.', to = 'never' }]"""
    tree = mapped({"a": array(1), "b": array(2), "h7": array(3), "h77": array(4)}, text)
    assert tree["b"].shape == (1,)
    assert tree["a"].shape == (2,)
    assert tree["x"]["7"].shape == (3,)
    assert tree["h77"].shape == (4,)


def test_exclude_leaves_out_by_the_new_name_and_keeps_the_reason() -> None:
    text = "rename = [{ name = 'a', to = 'b' }]\nexclude = [{ name = 'b', reason = 'it is a constant' }]"
    tree, report = remap_and_report({"file": {"a": array(1), "c": array(1)}}, rules(text))
    assert list(tree) == ["c"]
    assert report.excluded == {"b": "it is a constant"}


def test_transpose_split_and_squeeze_are_views_with_the_right_values() -> None:
    source = array(1, 4, 6)
    text = """
    transpose = [{ name = 'w', axes = [0, 2, 1] }]
    split = [{ name = 'w', axis = 1, into = ['q', 'k', 'v'] }]
    squeeze = [{ name = '[qkv]', axes = [0] }]
    """
    tree, report = remap_and_report({"file": {"w": source}}, rules(text))
    for number, name in enumerate("qkv"):
        np.testing.assert_array_equal(tree[name], source[0, :, 2 * number : 2 * number + 2].T)
        assert np.shares_memory(tree[name], source)
        assert not tree[name].flags.writeable
        assert report.tensors[name].steps == ("transpose", "split", "squeeze")
        assert report.tensors[name].origins == (Origin("file", "w"),)
    assert report.copied_bytes == 0
    assert source.flags.writeable  # the caller's own array stays as it was


def test_split_takes_sizes_and_counts_axes_from_the_end() -> None:
    tree = mapped({"w": array(2, 6)}, "split = [{ name = 'w', axis = -1, into = ['a', 'b'], sizes = [1, 5] }]")
    assert (tree["a"].shape, tree["b"].shape) == ((2, 1), (2, 5))
    np.testing.assert_array_equal(np.concatenate([tree["a"], tree["b"]], 1), array(2, 6))


def test_merge_puts_parts_together_in_the_order_of_its_names() -> None:
    parts = {"v0": array(2, 3) + 2, "q0": array(2, 3), "k0": array(2, 3) + 1}
    text = r"merge = [{ names = ['q(\d)', 'k(\d)', 'v(\d)'], into = 'qkv\1', axis = 1 }]"
    tree, report = remap_and_report({"file": parts}, rules(text))
    np.testing.assert_array_equal(tree["qkv0"], np.concatenate([parts["q0"], parts["k0"], parts["v0"]], 1))
    assert not tree["qkv0"].flags.writeable
    assert [origin.name for origin in report.tensors["qkv0"].origins] == ["q0", "k0", "v0"]
    assert report.copied_bytes == tree["qkv0"].nbytes


def test_merge_stacks_by_number_and_not_by_letter() -> None:
    parts = {f"h{number}": np.full(2, number, np.float32) for number in (10, 9, 1, 0, 2, 3, 4, 5, 6, 7, 8)}
    tree = mapped(parts, r"merge = [{ names = ['h\d+'], into = 'h', parts = 11, stack = true }]")
    np.testing.assert_array_equal(tree["h"][:, 0], np.arange(11))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("q", "k"), "names = ['q', 'k', 'v'], into = 'x'"),
        (("q", "k", "k2"), "names = ['q', 'k.?', 'v'], into = 'x'"),
        (("q", "q2", "k"), "names = ['q.?', 'k'], into = 'x', parts = 3"),
        (("q", "q2"), "names = ['q.?', 'k'], into = 'x', parts = 2"),
        (("h0", "h1"), r"names = ['h\d'], into = 'x', parts = 3"),
        (("h0", "h1", "h2", "h3"), r"names = ['h\d'], into = 'x', parts = 3"),
    ],
)
def test_a_merge_that_lacks_a_part_or_has_one_too_many_is_refused(parts: tuple[str, ...], text: str) -> None:
    assert codes({name: array(2) for name in parts}, f"merge = [{{ {text} }}]") == ["merge-incomplete"]


def test_a_merge_of_two_dtypes_is_refused_and_casts_nothing() -> None:
    text = "merge = [{ names = ['a', 'b'], into = 'c' }]"
    assert codes({"a": array(2), "b": array(2, dtype=np.float64)}, text) == ["rule-does-not-fit"]
    assert codes({"a": array(2), "b": array(2, 2)}, text) == ["rule-does-not-fit"]


def test_reshape_is_a_view_where_the_layout_allows_it_and_a_counted_copy_where_not() -> None:
    source = array(2, 3, 4)
    tree, report = remap_and_report({"file": {"w": source}}, rules("reshape = [{ name = 'w', shape = [6, -1] }]"))
    assert np.shares_memory(tree["w"], source)
    assert report.copied_bytes == 0
    text = "transpose = [{ name = 'w', axes = [2, 1, 0] }]\nreshape = [{ name = 'w', shape = [12, 2] }]"
    tree, report = remap_and_report({"file": {"w": source}}, rules(text))
    np.testing.assert_array_equal(tree["w"], source.T.reshape(12, 2))
    assert not np.shares_memory(tree["w"], source)
    assert report.copied_bytes == source.nbytes
    assert not tree["w"].flags.writeable


def test_tie_is_one_array_under_two_names() -> None:
    text = "tie = [{ name = 'wte', also = 'head/weight' }]"
    tree, report = remap_and_report({"file": {"wte": array(3, 2)}}, rules(text))
    assert tree["head"]["weight"] is tree["wte"]
    assert report.ties == {"head/weight": "wte"}
    tree = mapped({"wte": array(3, 2), "head/weight": array(3, 2)}, text)
    assert tree["head"]["weight"] is tree["wte"]


@pytest.mark.parametrize(
    "copy", [array(3, 2) + 1, array(2, 3), array(3, 2, dtype=np.float64), np.where(array(3, 2) == 0, -0.0, array(3, 2))]
)
def test_a_copy_that_is_not_equal_to_what_it_is_tied_to_is_refused(copy: Any) -> None:
    text = "tie = [{ name = 'wte', also = 'head' }]"
    assert codes({"wte": array(3, 2), "head": copy}, text) == ["tie-differs"]


def test_cast_changes_the_dtype_by_rule_alone_and_keeps_ties() -> None:
    text = """
    tie = [{ name = 'a', also = 'b' }]
    cast = [{ name = '[ab]', dtype = "bfloat16" }, { name = 'c', dtype = "float32" }]
    """
    tree, report = remap_and_report({"file": {"a": array(3), "c": array(3), "d": array(3)}}, rules(text))
    assert tree["a"].dtype == ml_dtypes.bfloat16
    assert tree["a"] is tree["b"]
    assert not tree["a"].flags.writeable
    np.testing.assert_array_equal(tree["a"].astype(np.float32), array(3))
    assert report.tensors["a"].copied_bytes == 6
    assert report.tensors["c"].copied_bytes == 0  # it was that already
    assert codes({"c": array(2, dtype=np.complex64)}, text) == ["rule-does-not-fit"]


def test_steps_run_in_one_order_whatever_the_order_in_the_file() -> None:
    steps = [
        "cast = [{ name = 'new', dtype = 'float64' }]",
        "tie = [{ name = 'new', also = 'other' }]",
        "squeeze = [{ name = 'new', axes = [0] }]",
        "transpose = [{ name = 'new', axes = [1, 2, 0] }]",
        "rename = [{ name = 'old', to = 'new' }]",
    ]
    for text in ("\n".join(steps), "\n".join(reversed(steps))):
        tree = mapped({"old": array(2, 1, 3)}, text)
        assert tree["new"].shape == (3, 2)
        assert tree["new"].dtype == np.float64
        assert tree["other"].dtype == np.float32


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("transpose = [{ name = 'w', axes = [0, 1] }]", "axes"),
        ("transpose = [{ name = 'w', axes = [0, 0, 1] }]", "axis"),
        ("split = [{ name = 'w', axis = 0, into = ['a', 'b', 'c'] }]", "equal parts"),
        ("split = [{ name = 'w', axis = 3, into = ['a', 'b'] }]", ""),
        ("split = [{ name = 'w', axis = 0, into = ['a', 'b'], sizes = [1, 2] }]", "the sum of"),
        ("reshape = [{ name = 'w', shape = [5, -1] }]", "reshape"),
        ("squeeze = [{ name = 'w', axes = [0] }]", ""),
    ],
)
def test_a_rule_that_does_not_fit_a_tensor_is_refused_by_name(text: str, why: str) -> None:
    (finding,) = findings({"w": array(2, 3, 4)}, text)
    assert finding.code == "rule-does-not-fit"
    assert finding.file == "file"
    assert finding.message.startswith("w: ")
    assert why in finding.message


# ---------------------------------------------------------------- buffers


BUILD = "build = [{ name = '.*mask', kind = 'causal-mask' }]"


def test_a_buffer_that_the_file_lacks_is_built_by_rule() -> None:
    target = {"w": demand(2), "mask": demand(1, 1, 3, 3, dtype=np.uint8)}
    tree, report = remap_and_report({"file": {"w": array(2)}}, rules(BUILD), target=target)
    np.testing.assert_array_equal(tree["mask"], [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]])
    assert tree["mask"].dtype == np.uint8
    assert not tree["mask"].flags.writeable
    assert (report.built, report.compared) == (("mask",), ())


def test_a_buffer_that_no_rule_builds_is_missing() -> None:
    target = {"w": demand(2), "mask": demand(3, 3, dtype=np.bool_)}
    (finding,) = findings({"w": array(2)}, "", target)
    assert finding.code == "missing-tensor"
    assert "build rule" in (finding.hint or "")


@pytest.mark.parametrize("target", [None, {"mask": demand(3, 3, dtype=np.bool_)}])
def test_a_buffer_that_the_file_has_must_have_the_values_of_the_rule(target: Any) -> None:
    good = np.tri(3, dtype=np.float32)
    _, report = remap_and_report({"file": {"mask": good}}, rules(BUILD), target=target)
    assert report.compared == ("mask",)
    bad = good.copy()
    bad[0, 1] = 1
    assert codes({"mask": bad}, BUILD, target) == ["buffer-differs"]
    assert codes({"mask": np.triu(good, 1)}, BUILD, target) == ["buffer-differs"]


def test_a_buffer_of_no_such_shape_is_refused() -> None:
    assert codes({"mask": array(3)}, BUILD) == ["rule-does-not-fit"]
    assert codes({"w": array(1)}, BUILD, {"w": demand(1), "mask": demand(2, 3)}) == [
        "rule-does-not-fit",
        "missing-tensor",
    ]
    assert codes({"w": array(1)}, BUILD, {"w": demand(1), "mask": demand(2, 3, 3)}) == [
        "rule-does-not-fit",
        "missing-tensor",
    ]


# ---------------------------------------------------------------- what is demanded


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def test_a_target_may_be_any_tree_of_containers() -> None:
    target = {"layers": [Layer(demand(2, 2), demand(2)), Layer(demand(2, 2), None)]}
    names = {"layers/0/kernel": array(2, 2), "layers/0/bias": array(2), "layers/1/kernel": array(2, 2)}
    tree = mapped(names, target=target)
    assert sorted(tree["layers"]["0"]) == ["bias", "kernel"]


def test_all_differences_are_told_in_one_go_with_paths_and_near_names() -> None:
    target = {
        "block": {"attention": demand(4, 2), "norm": demand(2), "kernel": demand(2, 3), "scale": demand(2)},
        "head": demand(7),
    }
    tensors = {
        "block/attentoin": array(4, 2),
        "block/norm": array(3),
        "block/kernel": array(3, 2),
        "block/scale": array(2, dtype=np.float64),
        "extra/thing": array(1),
    }
    told = {(f.code, f.message.split(",")[0].split(" of ")[0]): f for f in findings(tensors, "", target)}
    assert {code for code, _ in told} == {
        "missing-tensor",
        "unexpected-tensor",
        "shape-mismatch",
        "dtype-mismatch",
    }
    assert len(told) == 7
    missing = told["missing-tensor", "expected block/attention"]
    assert "block/attentoin" in (missing.hint or "")
    assert "float32[4, 2]" in missing.message
    assert "build rule" in (told["missing-tensor", "expected head"].hint or "")
    unexpected = [f for f in told.values() if f.code == "unexpected-tensor"]
    assert {f.file for f in unexpected} == {"file"}
    assert any("rename it to block/attention" in (f.hint or "") for f in unexpected)
    assert "transpose" in (told["shape-mismatch", "expected block/kernel"].hint or "")
    assert "transpose" not in (told["shape-mismatch", "expected block/norm"].hint or "")
    assert "float32" in (told["dtype-mismatch", "expected block/scale"].hint or "")


def test_what_a_rule_excludes_and_the_model_demands_is_missing_by_that_rule() -> None:
    (finding,) = findings({"a": array(1)}, "exclude = [{ name = 'a', reason = 'not wanted' }]", {"a": demand(1)})
    assert (finding.code, finding.hint) == ("missing-tensor", "a rule excludes it")


def test_two_tensors_that_become_one_are_refused() -> None:
    (finding,) = findings({"a": array(1), "b": array(1)}, "rename = [{ name = '[ab]', to = 'c' }]")
    assert finding.code == "name-twice"
    assert "a and b" in finding.message
    assert codes({"w": array(2), "a": array(1)}, "split = [{ name = 'w', axis = 0, into = ['a', 'b'] }]") == [
        "name-twice"
    ]
    assert codes({"q": array(2), "k": array(2), "c": array(2)}, "merge = [{ names = ['q', 'k'], into = 'c' }]") == [
        "name-twice"
    ]


def test_a_tensor_that_is_a_level_of_the_tree_as_well_is_refused() -> None:
    assert codes({"a": array(1), "a/b": array(1)}) == ["name-conflict"]
    both = {"a": demand(1), "a/b": demand(1)}
    assert codes({"a": array(1), "a/b": array(1)}, "", both) == ["name-conflict"]


def test_suggestions_are_made_for_as_many_names_as_can_be_afforded() -> None:
    many = {f"{number:04}/something": array(1) for number in range(200)}
    target = {f"{number:04}": {"something_else": demand(1)} for number in range(200)}
    told = findings(many, "", target)
    assert len(told) == 400
    hints = [finding.hint or "" for finding in told if "did you mean" in (finding.hint or "")]
    assert hints == [f"did you mean {number:04}/something? Rename it" for number in range(50)]


def test_a_hostile_name_is_shown_escaped() -> None:
    (finding,) = findings({"a\x1b[2J": array(1), "b": array(1)}, "", {"b": demand(1)})
    assert "\x1b" not in finding.message
    assert r"a\x1b[2J" in finding.message


def test_a_name_that_is_too_long_for_rules_is_refused() -> None:
    assert mapped({"a" * MAX_NAME: array(1)})
    with pytest.raises(LimitError) as caught:
        mapped({"a" * (MAX_NAME + 1): array(1)})
    assert [(f.code, f.file) for f in caught.value.findings] == [("name-too-long", "file")]


# ---------------------------------------------------------------- what there is


def test_host_tensors_of_several_files_keep_their_origin(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            write_safetensors(file, {name: array(2, 2)})
    envelope = sign(tmp_path, keys=[KEY], model="m", revision="r")
    _, held = load_host(tmp_path, manifest=envelope, trust=KEY.public)
    tree, report = remap_and_report(held, rules("rename = [{ name = 'b', to = 'c' }]"))
    assert tree["c"] is held["model-1.safetensors"]["b"].array
    assert report.tensors["c"].origins == (Origin("model-1.safetensors", "b"),)


def test_names_that_several_files_have_stand_behind_their_paths() -> None:
    report = survey({"x/a": {"w": array(1)}, "y/a": {"w": array(1)}}, rules())
    assert sorted(report.tensors) == ["x/a/w", "y/a/w"]


def test_a_bare_array_is_named_after_its_parameter_or_its_file() -> None:
    assert list(remap({"tensor0": array(1)}, rules(), parameters={"tensor0": "head"})) == ["head"]
    assert list(remap({"w.npy": array(1)}, rules())) == ["w"]


def test_fields_of_a_record_are_tensors_and_plain_values_are_listed() -> None:
    made: Any = QuantizedWeight8bit
    value = made(weight=array(2, 2, dtype=np.int8), scales=array(1, 2))
    report = survey({"f": {"w": value, "step": 3, "list": [array(1), None]}}, rules())
    assert sorted(report.tensors) == ["list/0", "w/scales", "w/weight"]
    assert report.plain == ("f/step", "f/list/1")


def test_rules_that_match_nothing_are_listed() -> None:
    text = """
    rename = [{ name = 'a', to = 'b' }, { name = 'c', to = 'd' }]
    merge = [{ names = ['x', 'y'], into = 'z' }]
    """
    report: MappingReport = survey({"f": {"a": array(1)}}, rules(text))
    assert report.unused == ("rename c", "merge x + y")


def test_a_big_endian_array_has_the_dtype_that_it_has() -> None:
    source = array(3).astype(">f4")
    tree = mapped({"w": source}, target={"w": demand(3)})
    assert np.shares_memory(tree["w"], source)


@pytest.mark.parametrize(
    ("loaded", "target"),
    [
        ([array(1)], None),
        ({"f": {"w": object()}}, None),
        ({"f": {"w": jax.numpy.zeros(1)}}, None),
        ({"f": {"w": np.array(["text"])}}, None),
        ({"f": {"w": np.array([object()])}}, None),
        ({"f": {1: array(1), "1": array(1)}}, None),
        ({1: {"w": array(1)}}, None),
        ({"f": {"w": array(1)}}, {"w": 3}),
        ({"f": {"w": array(1)}}, {"w": np.array(["text"])}),
        ({"f": {"w": array(1)}}, {"w": SimpleNamespace(dtype=np.dtype(np.int8), shape=None)}),
        ({"f": {"w": array(1)}}, {"w": SimpleNamespace(dtype=np.dtype(np.int8), shape=(None,))}),
        ({"f": {"w": array(1)}}, {"a": {"b": demand(1)}, "a/b": demand(1)}),
    ],
)
def test_arguments_of_other_kinds_are_refused(loaded: Any, target: Any) -> None:
    with pytest.raises(ConfigError):
        remap(loaded, rules(), target=target)


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: dict[str, Any] = {}
    tree["again"] = tree
    with pytest.raises(ConfigError, match="levels"):
        remap({"f": tree}, rules())
    with pytest.raises(ConfigError, match="levels"):
        remap({"f": array(1)}, rules(), target=tree)


@pytest.mark.parametrize("levels", [64, 65])
def test_a_tree_may_have_64_levels(levels: int) -> None:
    tree: Any = array(1)
    target: Any = demand(1)
    for _ in range(levels):
        tree, target = {"a": tree}, {"a": target}
    if levels == 64:
        assert remap({"f": tree}, rules(), target=target)
        return
    with pytest.raises(ConfigError, match="levels"):
        remap({"f": tree}, rules())
    with pytest.raises(ConfigError, match="levels"):
        remap({"f": array(1)}, rules(), target=target)


def test_a_tensor_that_was_read_in_part_is_refused() -> None:
    spec = TensorSpec("w", DType("float32"), (1,), "C", Extent(0, 4))
    with pytest.raises(StagingError, match="only a part"):
        remap({"f": {"w": PartialTensor("f", spec, (), array(1))}}, rules())


# ---------------------------------------------------------------- Grok-1's rules


def test_rules_for_loading_of_grok_1_are_a_special_case() -> None:
    rename = [(r"^new_(\w+)", r"old_\1"), ("twin", "old_a")]
    exclude = ["rng"]
    code = ["new_a", "new_b", "same", "twin", "rng_key"]
    made = rules_of_lookup(code, lambda name: get_load_path_str(name, rename, exclude))
    checkpoint = {"old_a": array(1), "old_b": array(2), "same": array(3)}
    tree = remap({"f": checkpoint}, made, target={name: demand(n) for name, n in zip(code, (1, 2, 3, 1), strict=False)})
    for name in code[:-1]:
        source = get_load_path_str(name, rename, exclude)
        assert source is not None
        np.testing.assert_array_equal(tree[name], checkpoint[source])
    assert tree["twin"] is tree["new_a"]


def test_a_lookup_takes_names_literally() -> None:
    made = rules_of_lookup([r"a\1", "b"], {r"a\1": "x(.*)+", "b": "y|z"}.get)
    tree = remap({"f": {"x(.*)+": array(1), "y|z": array(2)}}, made)
    assert sorted(tree) == [r"a\1", "b"]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value",
    [
        array(3, 5).T,
        array(3, 5).astype(">f4"),
        array(3, 5)[:, ::2],
        np.float32(3.0),
        np.zeros((0, 3), np.int8),
        array(4).astype(ml_dtypes.bfloat16),
        np.broadcast_to(np.float32(1), (3, 4)),
    ],
)
def test_canonical_blocks_are_the_c_order_little_endian_bytes(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safeload.remapping._BLOCK_BYTES", 8)
    value = np.asarray(value)
    little = value.astype(value.dtype.newbyteorder("<")) if value.dtype.byteorder == ">" else value
    assert b"".join(bytes(block) for block in canonical_blocks(value)) == little.tobytes("C")


def test_values_are_the_same_by_dtype_shape_and_bits() -> None:
    one = array(3, 4)
    assert same_value(one, np.asfortranarray(one))
    assert same_value(one, one.astype(">f4"))
    assert same_value(np.array([np.nan]), np.array([np.nan]))
    assert not same_value(one, one.reshape(4, 3))
    assert not same_value(one, one.astype(np.float64))
    assert not same_value(one, one.view(np.int32))
    assert not same_value(np.array([0.0]), np.array([-0.0]))


@pytest.mark.parametrize("numbers", [("0", "2", "3"), ("1", "01"), ("0", "1", "5", "6")])
def test_a_merge_whose_order_numbers_do_not_give_is_refused(numbers: tuple[str, ...]) -> None:
    parts = {f"h.{number}.w": array(2) for number in numbers}
    text = f"[[merge]]\nnames = ['h\\.\\d+\\.w']\ninto = 'w'\nparts = {len(numbers)}\n"
    assert codes(parts, text) == ["merge-order"]


def test_a_merge_takes_even_steps_a_grid_and_parts_in_the_order_of_their_names() -> None:
    def merged(text: str, *names: str) -> list[int]:
        made = mapped({name: np.array([at], np.int32) for at, name in enumerate(names)}, f"[[merge]]\n{text}")
        return [int(each) for each in made["w"]]

    step = "names = ['h\\.\\d+']\ninto = 'w'\nparts = 3\n"
    assert merged(step, "h.5", "h.3", "h.1") == [2, 1, 0]
    grid = "names = ['h\\.\\d+\\.\\d+']\ninto = 'w'\nparts = 4\n"
    assert merged(grid, "h.0.7", "h.10.3", "h.10.7", "h.0.3") == [3, 0, 1, 2]
    assert merged("names = ['h\\.3', 'h\\.0', 'h\\.2']\ninto = 'w'\n", "h.0", "h.2", "h.3") == [2, 0, 1]


@pytest.mark.parametrize(
    "text",
    [
        "[[rename]]\nname = '(9+)'\nto = '\\1\\1'\n",
        "[[split]]\nname = '(9+)'\naxis = 0\ninto = ['a', '\\1\\1']\n",
        "[[merge]]\nnames = ['(9+)']\nparts = 2\ninto = '\\1\\1'\n",
        "[[tie]]\nname = '(9+)'\nalso = '\\1\\1'\n",
    ],
)
def test_a_name_that_a_rule_makes_is_not_longer_than_rules_are_tried_on(text: str) -> None:
    short = "9" * (MAX_NAME // 2)
    survey({"file": {short: array(2)}}, rules(text))
    with pytest.raises(LimitError) as caught:
        survey({"file": {short + "9": array(2)}}, rules(text))
    assert caught.value.findings[0].code == "name-too-long"


def test_a_mask_that_is_larger_than_memory_is_refused_and_not_made() -> None:
    text = "[[build]]\nname = 'mask'\nkind = 'causal-mask'\n"
    assert "rule-does-not-fit" in codes({"w": array(2)}, text, {"w": demand(2), "mask": demand(1 << 22, 1 << 22)})


def test_a_name_that_no_rule_knows_is_told_the_nearest_that_one_does() -> None:
    text = "[[rename]]\nname = 'h\\.(\\d)\\.attn\\.weight'\nto = 'blocks/\\1/attention'\n"
    model = {"blocks": {str(number): {"attention": demand(2)} for number in range(2)}}
    told = findings({"h.0.attn.weight": array(2), "h.1.attn.wieght": array(2)}, text, model)
    (hint,) = [finding.hint for finding in told if finding.code == "unexpected-tensor"]
    assert hint == "did you mean a name like h.0.attn.weight, which becomes blocks/0/attention?"


def test_canonical_blocks_of_a_view_are_short_whatever_its_first_dimensions_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remapping, "_BLOCK_BYTES", 64)
    view = array(1, 2, 40, 8).transpose(0, 1, 3, 2)
    blocks = [bytes(block) for block in canonical_blocks(view)]
    assert max(map(len, blocks)) <= 160  # a row of 40 numbers; the whole is 2560
    assert b"".join(blocks) == view.tobytes()
