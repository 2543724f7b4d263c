import collections
import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from safeload import agreeing
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    ManifestError,
    PolicyError,
    RejectedError,
    ShardingError,
    SignatureError,
    StagingError,
    VerificationError,
)
from safeload.grok1 import (
    PARTITION_RULES,
    GrokConfig,
    name_shards,
    parameter_names,
    restore,
    shard_file,
    shard_table,
)
from safeload.placing import compile_rules
from safeload.publishing import sign
from safeload.records import QuantizedWeight8bit, Record
from safeload.trust.keys import SecretKey
from tests.grok_sample import TINY, sample_value, write_blocks, write_checkpoint, write_value

P: Any = PartitionSpec  # untyped in jax
Quantized: Any = QuantizedWeight8bit
KEY = SecretKey.generate("ed25519")
TABLE = shard_table(TINY)
NORM, GATE, DOWN, ROUTER = 1, 2, 3, 13
"""Indices in the tiny checkpoint of a norm, of two expert matrices and of the router."""


# --- the layout ---------------------------------------------------------------------------------------------------


def test_layers_are_in_the_order_of_their_names_as_strings() -> None:
    names = parameter_names()
    assert len(names) == 770
    assert {i: names[i] for i in (0, 1, 2, 9, 13, 14, 26, 38, 146, 147, 769)} == {
        0: "params/language_model/in_out_embed/embeddings",
        1: "params/language_model/rms_norm/scale",
        2: "params/transformer/decoder_layer_0/moe/linear/w",
        9: "params/transformer/decoder_layer_0/rms_norm/scale",
        13: "params/transformer/decoder_layer_0/router/w",
        14: "params/transformer/decoder_layer_1/moe/linear/w",
        26: "params/transformer/decoder_layer_10/moe/linear/w",
        38: "params/transformer/decoder_layer_11/moe/linear/w",
        146: "params/transformer/decoder_layer_2/moe/linear/w",
        147: "params/transformer/decoder_layer_2/moe/linear_1/w",
        769: "params/transformer/decoder_layer_9/router/w",
    }


@pytest.mark.parametrize("n_layers", [1, 9, 12, 64])
def test_the_order_is_that_in_which_jax_flattens_the_state(n_layers: int) -> None:
    state: dict[str, dict[str, str]] = {}
    for name in sorted(parameter_names(n_layers), key=hash):
        module, parameter = name.removeprefix("params/").rsplit("/", 1)
        state.setdefault(module, {})[parameter] = name
    assert tuple(jax.tree_util.tree_leaves({"params": state})) == parameter_names(n_layers)


def test_the_published_checkpoint_has_770_files_of_eight_sizes() -> None:
    sizes = collections.Counter(shard.size for shard in shard_table())
    assert sizes == {
        3_221_225_637: 1,
        1_611_399_491: 64,
        1_611_137_347: 128,
        37_847_359: 64,
        37_761_334: 64,
        6_293_814: 128,
        196_770: 64,
        24_727: 257,
    }
    assert sum(size * count for size, count in sizes.items()) == 318_239_886_140


def test_the_published_shapes_and_specs() -> None:
    rows = {shard.parameter: (shard.shape, shard.scales_shape, shard.partition) for shard in shard_table()[:14]}
    layer = "params/transformer/decoder_layer_0"
    norm = ((6144,), None, (None,))
    assert rows == {
        "params/language_model/in_out_embed/embeddings": ((131072, 6144), None, (None, ("data", "model"))),
        "params/language_model/rms_norm/scale": norm,
        f"{layer}/moe/linear/w": ((8, 6144, 32768), (8, 1, 32768), (None, "data", "model")),
        f"{layer}/moe/linear_1/w": ((8, 32768, 6144), (8, 8, 6144), (None, "model", "data")),
        f"{layer}/moe/linear_v/w": ((8, 6144, 32768), (8, 1, 32768), (None, "data", "model")),
        f"{layer}/multi_head_attention/key/w": ((6144, 1024), (1, 1024), ("data", "model")),
        f"{layer}/multi_head_attention/linear/w": ((6144, 6144), (8, 6144), ("model", "data")),
        f"{layer}/multi_head_attention/query/w": ((6144, 6144), (1, 6144), ("data", "model")),
        f"{layer}/multi_head_attention/value/w": ((6144, 1024), (1, 1024), ("data", "model")),
        f"{layer}/rms_norm/scale": norm,
        f"{layer}/rms_norm_1/scale": norm,
        f"{layer}/rms_norm_2/scale": norm,
        f"{layer}/rms_norm_3/scale": norm,
        f"{layer}/router/w": ((6144, 8), None, ("data",)),
    }


def test_the_hidden_width_is_a_multiple_of_8() -> None:
    assert GrokConfig().ffn_size == 32768
    assert TINY.ffn_size == 344  # two thirds of 512 are 341


def test_without_quantization_every_file_is_one_float_array() -> None:
    table = shard_table(dataclasses.replace(TINY, quantized=False))
    assert [dict(shard.tensors) for shard in table] == [{"": ("float32", shard.shape)} for shard in TABLE]


def test_the_size_of_a_file_is_what_is_written(checkpoint: Path) -> None:
    assert [shard.size for shard in TABLE] == [(checkpoint / "ckpt-0" / s.file).stat().st_size for s in TABLE]


def test_file_names_hold_index_and_process() -> None:
    assert shard_file(26) == "tensor00026_000"
    assert shard_file(99_999, 7) == "tensor99999_007"
    for index, process in ((100_000, 0), (-1, 0), (0, 1000), (0, -1)):
        with pytest.raises(ValueError, match="no shard"):
            shard_file(index, process)


def test_names_and_layouts_need_no_jax() -> None:
    code = "import sys, safeload.grok1 as g; g.parameter_names(); g.shard_table(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- names for a manifest -----------------------------------------------------------------------------------------


def test_blocks_of_one_tensor_have_one_name() -> None:
    files = [f"tensor{i:05d}_{process:03d}" for process in (1, 0, 2) for i in range(14)]
    named = name_shards(files)
    assert set(named) == set(files)
    assert [named[f"tensor00003_{process:03d}"] for process in range(3)] == [parameter_names(1)[3]] * 3


def test_the_rules_say_of_every_parameter_what_the_table_says() -> None:
    find = compile_rules(PARTITION_RULES)
    assert {shard.parameter: find(shard.parameter) for shard in shard_table()} == {
        shard.parameter: shard.partition for shard in shard_table()
    }


@pytest.mark.parametrize("folder", ["", "ckpt-0/"])
def test_shards_are_named_by_their_index(folder: str) -> None:
    files = [f"{folder}tensor{i:05d}_000" for i in range(2 + 12 * 11)]
    others = ["tokenizer.model", "README.md", "ckpt-0/notes.txt", "tensor1_000", "tensor00000_000.json"]
    named = name_shards([*others, *reversed(files)])
    assert named == dict(zip(files, parameter_names(11), strict=True))
    assert named[f"{folder}tensor00026_000"] == "params/transformer/decoder_layer_10/moe/linear/w"


FOURTEEN = [f"tensor{i:05d}_000" for i in range(14)]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "none at all"),
        (["README.md"], "none at all"),
        ([f"elsewhere/{file}" for file in FOURTEEN], "found elsewhere/"),
        ([f"a/ckpt-0/{file}" for file in FOURTEEN], "found a/ckpt-0/"),
        ([*FOURTEEN, "ckpt-0/tensor00000_000"], "found ., ckpt-0/"),
        ([*FOURTEEN, "backup/tensor00000_000"], "found ., backup/"),
        ([*FOURTEEN, "tensor00000_001"], "2 process(es) without a gap, found no tensor00001_001"),
        ([f"{file[:-3]}007" for file in FOURTEEN], "found no tensor00000_000"),
        (FOURTEEN[:5] + FOURTEEN[6:], "found no tensor00005_000"),
        ([*FOURTEEN[:-1], "tensor00014_000"], "found no tensor00013_000"),
        (FOURTEEN[:13], "found 13"),
        ([*FOURTEEN, "tensor00014_000"], "found 15"),
        (FOURTEEN[:2], "found 2"),
    ],
)
def test_what_is_no_complete_checkpoint_is_not_named(paths: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        name_shards(paths)
    assert message in str(caught.value)


# --- restore ------------------------------------------------------------------------------------------------------


class TrainingState(NamedTuple):
    params: Any


def nested(leaves: Mapping[str, Any]) -> TrainingState:
    """Return the state that the published model code makes: modules by path, each with its parameters."""
    params: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        module, parameter = name.removeprefix("params/").rsplit("/", 1)
        params.setdefault(module, {})[parameter] = leaf
    return TrainingState(params)


def shapes(**changes: Any) -> dict[str, Any]:
    leaves = {shard.parameter: jax.ShapeDtypeStruct(shard.shape, np.float32) for shard in TABLE}
    return leaves | changes


SPECS: dict[str, Any] = {shard.parameter: P(*shard.partition) for shard in TABLE}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("data", "model"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grok")
    write_checkpoint(folder / "ckpt-0")
    return folder


def signed(directory: Path, parameters: Mapping[str, str] | None = None) -> bytes:
    if parameters is None:
        parameters = name_shards([path.relative_to(directory).as_posix() for path in directory.rglob("*")])
    return sign(directory, keys=[KEY], model="tiny", revision="1", parameters=parameters)


@pytest.fixture(scope="module")
def manifest(checkpoint: Path) -> bytes:
    return signed(checkpoint)


Restore = Callable[..., Any]


@pytest.fixture(scope="module")
def restored(checkpoint: Path, manifest: bytes, mesh: Mesh) -> Restore:
    """Call `restore` as the published code is called, with some arguments replaced."""

    def call(**changes: Any) -> Any:
        arguments: dict[str, Any] = {
            "checkpoint_path": str(checkpoint),
            "state_shapes": nested(shapes()),
            "mesh": mesh,
            "between_hosts_config": (1, 1),
            "state_sharding": nested(SPECS),
            "init_state": None,
            "params_only": True,
            "manifest": manifest,
            "trust": KEY.public,
        }
        return restore(**(arguments | changes))

    return call


def leaf(state: Any, index: int) -> Any:
    module, parameter = TABLE[index].parameter.removeprefix("params/").rsplit("/", 1)
    return state[module][parameter]


def test_every_parameter_has_its_values_and_lies_as_its_spec_says(restored: Restore, mesh: Mesh) -> None:
    params = restored()
    assert {f"params/{module}/{name}" for module, below in params.items() for name in below} == shapes().keys()
    for shard in TABLE:
        made: Any = leaf(params, shard.index)
        expected: Any = sample_value(shard)
        pairs = [(made, expected)]
        if isinstance(expected, Record):
            assert type(made) is QuantizedWeight8bit
            pairs = list(zip(dict(made.items()).values(), dict(expected.items()).values(), strict=True))
        for array, values in pairs:
            assert array.sharding == NamedSharding(mesh, P(*shard.partition)), shard
            assert array.dtype == values.dtype, shard
            assert np.asarray(array).tobytes() == values.tobytes(), shard
    gate, down = leaf(params, GATE), leaf(params, DOWN)
    assert {shard.data.shape for shard in gate.weight.addressable_shards} == {(8, 64, 43)}
    assert {shard.data.shape for shard in down.scales.addressable_shards} == {(8, 1, 64)}


def test_the_published_arguments_may_stand_by_position(checkpoint: Path, manifest: bytes, mesh: Mesh) -> None:
    state = restore(
        str(checkpoint),
        nested(shapes()),
        mesh,
        (1, 1),
        False,
        nested(SPECS),
        manifest=manifest,
        trust=KEY.public,
    )
    assert type(state) is TrainingState
    np.testing.assert_array_equal(leaf(state.params, NORM), sample_value(TABLE[NORM]))


def test_the_manifest_may_be_of_ckpt_0_or_of_the_folder_above(checkpoint: Path, restored: Restore) -> None:
    for made in (restored(), restored(manifest=signed(checkpoint / "ckpt-0"))):
        np.testing.assert_array_equal(leaf(made, NORM), sample_value(TABLE[NORM]))


def test_files_that_are_no_tensors_may_lie_beside_them(checkpoint: Path, restored: Restore, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "README.md").write_text("a model\n")
    (tmp_path / "c" / "ckpt-0" / "config.json").write_text("{}")
    assert restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c"))


def test_none_is_replicated(restored: Restore) -> None:
    made = restored(state_sharding=nested(SPECS | {TABLE[GATE].parameter: None}))
    assert leaf(made, GATE).weight.is_fully_replicated
    assert leaf(made, GATE).scales.is_fully_replicated


def test_quantized_weights_are_made_of_the_users_class(restored: Restore) -> None:
    @jax.tree_util.register_pytree_node_class
    @dataclasses.dataclass
    class Mine:
        weight: Any
        scales: Any

        def tree_flatten(self) -> tuple[list[Any], None]:
            return [self.weight, self.scales], None

        @classmethod
        def tree_unflatten(cls, _: None, children: list[Any]) -> "Mine":
            return cls(*children)

    made = leaf(restored(quantized_class=Mine), DOWN)
    assert type(made) is Mine
    assert (made.weight.dtype, made.scales.shape) == (np.int8, (8, 8, 64))


def test_a_quantized_weight_may_stand_for_any_float_that_the_state_says(restored: Restore) -> None:
    name = TABLE[GATE].parameter
    assert restored(state_shapes=nested(shapes(**{name: jax.ShapeDtypeStruct((8, 64, 344), ml_dtypes.bfloat16)})))


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_a_quantized_weight_does_not_stand_for_integers(restored: Restore, dtype: str) -> None:
    name = TABLE[GATE].parameter
    with pytest.raises(PolicyError) as caught:
        restored(state_shapes=nested(shapes(**{name: jax.ShapeDtypeStruct((8, 64, 344), np.dtype(dtype))})))
    assert [finding.code for finding in caught.value.findings] == ["dtype-mismatch"]


def test_a_bfloat16_array_is_taken_where_the_state_says_bfloat16(
    checkpoint: Path, restored: Restore, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    write_value(tmp_path / "c" / "ckpt-0" / TABLE[NORM].file, np.ones(64, ml_dtypes.bfloat16))
    made = restored(
        checkpoint_path=tmp_path / "c",
        manifest=signed(tmp_path / "c"),
        state_shapes=nested(shapes(**{TABLE[NORM].parameter: jax.ShapeDtypeStruct((64,), ml_dtypes.bfloat16)})),
    )
    assert leaf(made, NORM).dtype == ml_dtypes.bfloat16


# --- a checkpoint that is signed, and wrong -----------------------------------------------------------------------


def weight(shape: tuple[int, ...], scales: tuple[int, ...], dtype: Any = ml_dtypes.bfloat16) -> Any:
    return Quantized(np.ones(shape, np.int8), np.ones(scales, dtype))


@pytest.mark.parametrize(
    ("index", "value", "code", "expected", "found"),
    [
        (NORM, np.ones(32, np.float32), "shape-mismatch", "(64,)", "(32,)"),
        (NORM, np.ones((64, 1), np.float32), "shape-mismatch", "(64,)", "(64, 1)"),
        (NORM, np.ones(64, np.float64), "dtype-mismatch", "float32", "float64"),
        (NORM, np.ones(64, ml_dtypes.bfloat16), "dtype-mismatch", "float32", "bfloat16"),
        (NORM, weight((8, 8), (1, 8)), "shape-mismatch", "(64,)", "(8, 8)"),
        (GATE, np.ones((8, 64, 344), np.int8), "dtype-mismatch", "float32", "int8"),
        (GATE, weight((8, 344, 64), (8, 1, 64)), "shape-mismatch", "(8, 64, 344)", "(8, 344, 64)"),
        (ROUTER, np.ones((8, 64), np.float32), "shape-mismatch", "(64, 8)", "(8, 64)"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(
    *,
    checkpoint: Path,
    restored: Restore,
    tmp_path: Path,
    index: int,
    value: Any,
    code: str,
    expected: str,
    found: str,
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    write_value(tmp_path / "c" / "ckpt-0" / TABLE[index].file, value)
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c"), policy="numpy-quantized")
    (finding,) = caught.value.findings
    assert (finding.code, finding.file) == (code, f"ckpt-0/{TABLE[index].file}")
    assert TABLE[index].parameter in finding.message
    wanted, met = finding.message.split("; found ")
    assert expected in wanted
    assert found in met


def loose_policy(path: Path) -> Path:
    """Write a policy that has no opinion about the shapes and the dtypes of a record's fields."""
    text = (Path(__file__).parents[2] / "policies" / "numpy-quantized.toml").read_text()
    for line, other in (
        ('grouped_scales = { weight = "weight", scales = "scales" }\n', ""),
        ('weight = ["int8"]', 'weight = ["int8", "int16"]'),
        ('"bfloat16", "float16"] }', '"bfloat16", "float16", "int8"] }'),
    ):
        assert line in text
        text = text.replace(line, other)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("weight_dtype", "scales_dtype", "scales_shape", "code"),
    [  # for a weight of (8, 64, 344)
        ("int8", "float32", (8, 1, 344), None),
        ("int8", "float16", (8, 64, 344), None),
        ("int16", "float32", (8, 1, 344), "dtype-mismatch"),
        ("int8", "int8", (8, 1, 344), "dtype-mismatch"),
        ("int8", "float32", (8, 3, 344), "shape-mismatch"),
        ("int8", "float32", (8, 0, 344), "shape-mismatch"),
        ("int8", "float32", (8, 1, 43), "shape-mismatch"),
        ("int8", "float32", (1, 1, 344), "shape-mismatch"),
        ("int8", "float32", (1, 344), "shape-mismatch"),
        ("int8", "float32", (), "shape-mismatch"),
    ],
)
def test_scales_that_do_not_belong_to_their_weight_are_refused_whatever_the_policy(
    *,
    checkpoint: Path,
    restored: Restore,
    tmp_path: Path,
    weight_dtype: str,
    scales_dtype: str,
    scales_shape: tuple[int, ...],
    code: str | None,
) -> None:
    policy = loose_policy(tmp_path / "loose.toml")
    shutil.copytree(checkpoint, tmp_path / "c")
    value = Quantized(np.ones((8, 64, 344), weight_dtype), np.ones(scales_shape, scales_dtype))
    write_value(tmp_path / "c" / "ckpt-0" / TABLE[GATE].file, value)
    names = name_shards([f"ckpt-0/{shard.file}" for shard in TABLE])
    envelope = sign(tmp_path / "c", keys=[KEY], model="tiny", revision="1", policy=policy, parameters=names)
    call = {"checkpoint_path": tmp_path / "c", "manifest": envelope, "policy": policy}
    if code is None:
        assert leaf(restored(**call), GATE).scales.shape == scales_shape
        return
    with pytest.raises(PolicyError) as caught:
        restored(**call)
    assert [finding.code for finding in caught.value.findings] == [code]


def test_a_quantized_vector_has_no_rows_to_group(checkpoint: Path, restored: Restore, tmp_path: Path) -> None:
    policy = loose_policy(tmp_path / "loose.toml")
    shutil.copytree(checkpoint, tmp_path / "c")
    write_value(tmp_path / "c" / "ckpt-0" / TABLE[NORM].file, weight((64,), (64,)))
    names = name_shards([f"ckpt-0/{shard.file}" for shard in TABLE])
    envelope = sign(tmp_path / "c", keys=[KEY], model="tiny", revision="1", policy=policy, parameters=names)
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=envelope, policy=policy)
    assert [finding.code for finding in caught.value.findings] == ["shape-mismatch"]


def test_a_dict_with_the_right_tensors_is_no_quantized_weight(
    checkpoint: Path, restored: Restore, tmp_path: Path
) -> None:
    import pickle

    shutil.copytree(checkpoint, tmp_path / "c")
    fields = dict(weight((8, 64, 344), (8, 1, 344)).items())
    (tmp_path / "c" / "ckpt-0" / TABLE[GATE].file).write_bytes(pickle.dumps(fields, 4))
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c"), policy="numpy-quantized")
    (finding,) = caught.value.findings
    assert (finding.code, finding.file) == ("dtype-mismatch", f"ckpt-0/{TABLE[GATE].file}")


def test_tensors_of_one_shape_in_each_others_place_are_refused(checkpoint: Path, restored: Restore) -> None:
    names = dict(name_shards([f"ckpt-0/{shard.file}" for shard in TABLE]))
    first, second = (f"ckpt-0/{TABLE[index].file}" for index in (GATE, GATE + 2))
    names[first], names[second] = names[second], names[first]
    with pytest.raises(PolicyError) as caught:
        restored(manifest=signed(checkpoint, names))
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [
        ("parameter-name-mismatch", first),
        ("parameter-name-mismatch", second),
    ]
    assert names[first] in caught.value.findings[0].message
    assert names[second] in caught.value.findings[0].message


def test_files_in_each_others_place_are_refused(
    checkpoint: Path, restored: Restore, manifest: bytes, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    first, second = (tmp_path / "c" / "ckpt-0" / TABLE[index].file for index in (GATE, GATE + 2))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(DigestMismatchError):
        restored(checkpoint_path=tmp_path / "c", manifest=manifest)


def test_a_manifest_without_names_is_refused(checkpoint: Path, restored: Restore) -> None:
    with pytest.raises(PolicyError) as caught:
        restored(manifest=signed(checkpoint, {}))
    assert {finding.code for finding in caught.value.findings} == {"parameter-name-mismatch"}
    assert len(caught.value.findings) == len(TABLE)
    assert "--layout grok-1" in str(caught.value)


def without(leaves: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {name: value for name, value in leaves.items() if name != TABLE[index].parameter}


def test_a_tensor_that_the_code_lacks_is_named(restored: Restore) -> None:
    with pytest.raises(PolicyError) as caught:
        restored(
            state_shapes=nested(without(shapes(), ROUTER)),
            state_sharding=nested(without(SPECS, ROUTER)),
        )
    summary, finding = caught.value.findings
    assert (finding.code, finding.file) == ("unexpected-tensor", f"ckpt-0/{TABLE[ROUTER].file}")
    assert TABLE[ROUTER].parameter in finding.message
    assert summary.code == "parameters-differ"
    assert summary.message.endswith(f"missing in the checkpoint: none; missing in the code: {TABLE[ROUTER].parameter}")
    assert TABLE[ROUTER].parameter in str(caught.value)


def test_a_tensor_that_the_checkpoint_lacks_is_named(checkpoint: Path, restored: Restore, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "ckpt-0" / TABLE[ROUTER].file).unlink()
    names = {f"ckpt-0/{shard.file}": shard.parameter for shard in TABLE[:ROUTER]}
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c", names))
    summary, finding = caught.value.findings
    assert (finding.code, finding.file) == ("missing-tensor", f"ckpt-0/{TABLE[ROUTER].file}")
    assert TABLE[ROUTER].parameter in finding.message
    assert summary.code == "parameters-differ"
    assert f"missing in the checkpoint: {TABLE[ROUTER].parameter}; missing in the code: none" in str(caught.value)


def test_every_difference_is_in_one_refusal(checkpoint: Path, restored: Restore, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    folder = tmp_path / "c" / "ckpt-0"
    write_value(folder / TABLE[NORM].file, np.ones(32, ml_dtypes.bfloat16))
    (folder / TABLE[DOWN].file).unlink()
    write_value(folder / "tensor00014_000", np.ones(4, np.float32))
    names = {f"ckpt-0/{shard.file}": shard.parameter for shard in TABLE if shard.index != DOWN}
    names[f"ckpt-0/{TABLE[0].file}"] = "params/other"
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c", names))
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [
        ("parameters-differ", None),
        ("parameter-name-mismatch", "ckpt-0/tensor00000_000"),
        ("dtype-mismatch", "ckpt-0/tensor00001_000"),
        ("shape-mismatch", "ckpt-0/tensor00001_000"),
        ("missing-tensor", "ckpt-0/tensor00003_000"),
        ("unexpected-tensor", "ckpt-0/tensor00014_000"),
    ]


def test_what_the_manifest_can_tell_is_told_before_a_tensor_is_read(
    restored: Restore, manifest: bytes, tmp_path: Path
) -> None:
    wrong = nested(shapes(**{TABLE[NORM].parameter: jax.ShapeDtypeStruct((65,), np.float32)}))
    with pytest.raises(PolicyError):
        restored(checkpoint_path=tmp_path / "there-is-nothing", manifest=manifest, state_shapes=wrong)


def test_the_policy_holds_though_the_files_are_signed(checkpoint: Path, restored: Restore, tmp_path: Path) -> None:
    # Signed under a policy that takes a norm in a dict; this policy does not.
    import pickle

    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "ckpt-0" / TABLE[NORM].file).write_bytes(pickle.dumps({"": np.ones(64, np.float32)}, 4))
    with pytest.raises(RejectedError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c"))
    assert [finding.file for finding in caught.value.findings] == [f"ckpt-0/{TABLE[NORM].file}"]


def test_another_key_is_not_trusted(restored: Restore) -> None:
    with pytest.raises(SignatureError):
        restored(trust=SecretKey.generate("ed25519").public)


# --- a state, a mesh or a call that does not fit ------------------------------------------------------------------


@pytest.mark.parametrize("init_state", [None, object()])
def test_names_of_the_state_and_of_its_specs_are_compared_whatever_init_state(
    restored: Restore, init_state: Any
) -> None:
    specs = without(SPECS, ROUTER) | {"params/language_model/head/w": P()}
    with pytest.raises(ShardingError) as caught:
        restored(state_sharding=nested(specs), init_state=init_state)
    assert "without a shape: params/language_model/head/w;" in str(caught.value)
    assert f"without a sharding: {TABLE[ROUTER].parameter}" in str(caught.value)


def test_a_spec_that_does_not_fit_is_refused_before_anything_is_read(restored: Restore) -> None:
    with pytest.raises(ShardingError, match=TABLE[NORM].parameter):
        restored(state_sharding=nested(SPECS | {TABLE[NORM].parameter: P("absent")}), manifest=b"")


def test_scales_that_do_not_divide_are_named(restored: Restore) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))
    with pytest.raises(ShardingError, match="tensor00002_000/scales"):
        restored(mesh=mesh)


@pytest.mark.parametrize(
    "wrong",
    [{"between_hosts_config": (1, 0)}, {"state_shapes": None}, {"load_exclude_rules": ["("]}],
    ids=["mesh", "state", "rule"],
)
def test_wrong_arguments_in_one_process_are_told_to_the_others(
    restored: Restore, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    told: dict[str, str] = {}

    class Client:
        def key_value_set(self, key: str, value: str) -> None:
            told[key] = value

        def blocking_key_value_get(self, key: str, _timeout_in_ms: int) -> str:
            return told.get(key, "")

    monkeypatch.setattr(agreeing, "_connect", lambda: (Client(), 0, 2))
    with pytest.raises((ConfigError, ShardingError)) as caught:
        restored(**wrong)
    (stop,) = (value for key, value in told.items() if key.endswith("/stop"))
    assert f'"error": "{type(caught.value).__name__}"' in stop


@pytest.mark.parametrize("between_hosts_config", [(2, 1), (1, 2), (1,), (1, 0), (1, 1, 1)])
def test_a_number_of_hosts_that_do_not_run_is_refused(restored: Restore, between_hosts_config: tuple[int, ...]) -> None:
    with pytest.raises(ShardingError, match="between_hosts_config"):
        restored(between_hosts_config=between_hosts_config)


def test_a_tensor_that_only_the_code_lacks_moves_no_other(restored: Restore) -> None:
    # Every later leaf has another index than its file; that is one difference and not thirteen.
    with pytest.raises(PolicyError) as caught:
        restored(state_shapes=nested(without(shapes(), NORM)), state_sharding=nested(without(SPECS, NORM)))
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [
        ("parameters-differ", None),
        ("unexpected-tensor", f"ckpt-0/{TABLE[NORM].file}"),
    ]


def test_many_names_are_cut(restored: Restore) -> None:
    leaves = {f"params/other_{i:02d}/w": jax.ShapeDtypeStruct((8,), np.float32) for i in range(25)}
    with pytest.raises(PolicyError) as caught:
        restored(state_shapes=nested(leaves), state_sharding=nested(dict.fromkeys(leaves)))
    message = caught.value.findings[0].message
    assert "params/other_19/w and 5 more; missing in the code: params/language_model" in message


def test_two_files_of_one_parameter_are_refused(checkpoint: Path, restored: Restore) -> None:
    names = dict(name_shards([f"ckpt-0/{shard.file}" for shard in TABLE]))
    first, second = (f"ckpt-0/{TABLE[index].file}" for index in (GATE, GATE + 2))
    names[second] = names[first]
    with pytest.raises(PolicyError) as caught:
        restored(manifest=signed(checkpoint, names))
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [("parameter-twice", second)]


def test_a_state_without_params_or_shapes_is_refused(restored: Restore) -> None:
    with pytest.raises(ConfigError, match="no attribute params"):
        restored(state_shapes=nested(shapes()).params)
    with pytest.raises(ConfigError, match=TABLE[NORM].parameter):
        restored(state_shapes=nested(shapes(**{TABLE[NORM].parameter: 1.0})))


def test_two_leaves_of_one_name_are_refused(restored: Restore) -> None:
    leaf = jax.ShapeDtypeStruct((4,), np.float32)
    spec = PartitionSpec(None)
    with pytest.raises(ConfigError, match="found a/b twice"):
        restored(
            params_only=False,
            state_shapes={"a": {"b": leaf}, "a/b": leaf},
            state_sharding={"a": {"b": spec}, "a/b": spec},
        )


def test_a_restore_can_be_held_to_one_manifest(restored: Restore) -> None:
    with pytest.raises(ManifestError) as refused:
        restored(pin="sha256:" + "0" * 64)
    assert [finding.code for finding in refused.value.findings] == ["pin-mismatch"]


def test_trust_and_policy_in_the_checkpoint_are_refused_here_as_in_load(checkpoint: Path, restored: Restore) -> None:
    inside = checkpoint / "ckpt-0" / "trust.json"
    for options in ({"trust": inside}, {"policy": inside}):
        with pytest.raises(ConfigError, match="lies in the checkpoint"):
            restored(**options)


def test_a_restore_keeps_to_its_memory_budget(restored: Restore) -> None:
    params = restored(memory_budget=500_000)  # the files have 584,039
    for index in (0, NORM, ROUTER):
        np.testing.assert_array_equal(leaf(params, index), np.asarray(sample_value(TABLE[index])))
    with pytest.raises(StagingError):
        restored(memory_budget=4096)


# --- a state that is loaded in part -------------------------------------------------------------------------------

HEAD = "params/language_model/head/w"


def values(**changes: Any) -> dict[str, Any]:
    """Return a state as model code makes it before training: every array as the code shapes it."""
    return {shard.parameter: np.zeros(shard.shape, np.float32) for shard in TABLE} | changes


def test_what_the_checkpoint_lacks_comes_from_init_state(restored: Restore, mesh: Mesh) -> None:
    head = np.arange(16, dtype=np.float32).reshape(2, 8)
    params = restored(
        state_shapes=nested(shapes(**{HEAD: jax.ShapeDtypeStruct((2, 8), np.float32)})),
        state_sharding=nested(SPECS | {HEAD: P(None, "model")}),
        init_state=nested(values(**{HEAD: head})),
    )
    made = params["language_model/head"]["w"]
    assert made.sharding == NamedSharding(mesh, P(None, "model"))
    np.testing.assert_array_equal(made, head)
    # The new leaf comes before the others, whose index it moves: they are found by name.
    np.testing.assert_array_equal(leaf(params, NORM), sample_value(TABLE[NORM]))


def test_without_init_state_what_the_checkpoint_lacks_is_an_error(restored: Restore) -> None:
    with pytest.raises(PolicyError, match=f"missing in the checkpoint: {HEAD}; missing in the code: none"):
        restored(
            state_shapes=nested(shapes(**{HEAD: jax.ShapeDtypeStruct((2, 8), np.float32)})),
            state_sharding=nested(SPECS | {HEAD: None}),
        )


def test_init_state_does_not_excuse_what_the_code_lacks(restored: Restore) -> None:
    state = {"state_shapes": nested(without(shapes(), ROUTER)), "state_sharding": nested(without(SPECS, ROUTER))}
    with pytest.raises(PolicyError) as caught:
        restored(init_state=nested(without(values(), ROUTER)), **state)
    assert [finding.code for finding in caught.value.findings] == ["parameters-differ", "unexpected-tensor"]
    # A rule does.
    params = restored(init_state=nested(without(values(), ROUTER)), load_exclude_rules=["router/w$"], **state)
    np.testing.assert_array_equal(leaf(params, NORM), sample_value(TABLE[NORM]))


def test_what_a_rule_excludes_comes_from_init_state(restored: Restore) -> None:
    params = restored(init_state=nested(values()), load_exclude_rules=["moe/linear/w", "router"])
    assert not np.asarray(leaf(params, ROUTER)).any()
    assert not np.asarray(leaf(params, GATE)).any()
    np.testing.assert_array_equal(leaf(params, NORM), sample_value(TABLE[NORM]))
    with pytest.raises(ConfigError, match="init_state does not have it"):
        restored(load_exclude_rules=["router"])
    with pytest.raises(ConfigError, match="init_state does not have it"):
        restored(init_state=nested(without(values(), ROUTER)), load_exclude_rules=["router"])


def test_what_a_rule_renames_is_found_by_the_other_name(restored: Restore) -> None:
    name = TABLE[ROUTER].parameter
    new = name.replace("router", "a_gate")  # sorted before all others of its layer
    params = restored(
        state_shapes=nested(without(shapes(), ROUTER) | {new: jax.ShapeDtypeStruct(TABLE[ROUTER].shape, np.float32)}),
        state_sharding=nested(without(SPECS, ROUTER) | {new: P(*TABLE[ROUTER].partition)}),
        load_rename_rules=[("absent", "x"), ("a_(gate)/w", "router/w"), ("router", "never")],
    )
    np.testing.assert_array_equal(
        params["transformer/decoder_layer_0/a_gate"]["w"], np.asarray(sample_value(TABLE[ROUTER]))
    )


@pytest.mark.parametrize(
    "value", [np.zeros((4, 4), np.float32), np.zeros((64, 8), np.float64), 3.0, weight((4, 4), (1, 4))]
)
def test_an_initial_leaf_that_is_not_what_the_state_says_is_refused(restored: Restore, value: Any) -> None:
    with pytest.raises(ConfigError, match="init_state: params/transformer/decoder_layer_0/router/w: expected"):
        restored(init_state=nested(values(**{TABLE[ROUTER].parameter: value})), load_exclude_rules=["router"])


def test_initial_scales_that_do_not_divide_are_refused(restored: Restore) -> None:
    state = nested(values(**{TABLE[DOWN].parameter: weight(TABLE[DOWN].shape, (8, 4, 64))}))
    with pytest.raises(ShardingError, match="moe/linear_1/w: does not fit"):
        restored(init_state=state, load_exclude_rules=["moe/linear_1/w"])


def test_rules_that_give_one_parameter_to_two_leaves_are_refused(restored: Restore) -> None:
    with pytest.raises(ConfigError, match="rms_norm/scale and to params/transformer/decoder_layer_0/rms_norm_1/scale"):
        restored(load_rename_rules=[("rms_norm_1", "rms_norm")])


def test_a_quantized_leaf_of_init_state_is_one_leaf(restored: Restore, mesh: Mesh) -> None:
    kept = weight(TABLE[GATE].shape, (8, 1, 344))
    params = restored(init_state=nested(values(**{TABLE[GATE].parameter: kept})), load_exclude_rules=["moe/linear/w"])
    made = leaf(params, GATE)
    assert isinstance(made, QuantizedWeight8bit)
    assert dict(made.items())["weight"].sharding == NamedSharding(mesh, P(*TABLE[GATE].partition))


# --- blocks that several hosts saved ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    write_blocks(folder / "ckpt-0", n_hosts=2)
    return folder


def test_blocks_of_two_hosts_make_the_whole_on_another_mesh(blocks: Path, restored: Restore, mesh: Mesh) -> None:
    params = restored(
        checkpoint_path=blocks, manifest=signed(blocks), saved_between_hosts_config=(1, 2), saved_mesh_config=(1, 8)
    )
    for shard in TABLE:
        made: Any = leaf(params, shard.index)
        expected: Any = sample_value(shard)
        pairs = [(made, expected)]
        if isinstance(expected, Record):
            pairs = list(zip(dict(made.items()).values(), dict(expected.items()).values(), strict=True))
        for array, values in pairs:
            assert array.sharding == NamedSharding(mesh, P(*shard.partition)), shard
            assert np.asarray(array).tobytes() == values.tobytes(), shard


def test_blocks_of_another_number_of_hosts_are_refused(blocks: Path, restored: Restore) -> None:
    manifest = signed(blocks)
    for hosts in ((1, 1), (1, 4)):
        with pytest.raises(ShardingError, match=f"expected one block of each of {hosts[1]} hosts, found 2"):
            restored(checkpoint_path=blocks, manifest=manifest, saved_between_hosts_config=hosts)
    with pytest.raises(ShardingError, match="expected a mesh that 2 hosts divide along model, found 3"):
        restored(
            checkpoint_path=blocks,
            manifest=manifest,
            saved_between_hosts_config=(1, 2),
            saved_mesh_config=(1, 3),
        )


def test_a_block_of_another_shape_is_refused(blocks: Path, restored: Restore, tmp_path: Path) -> None:
    shutil.copytree(blocks, tmp_path / "c")
    other = f"ckpt-0/{TABLE[GATE].file[:-3]}001"
    write_value(tmp_path / "c" / other, weight((8, 64, 86), (8, 1, 86)))
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=signed(tmp_path / "c"), saved_between_hosts_config=(1, 2))
    assert [(finding.code, finding.file) for finding in caught.value.findings] == [("shape-mismatch", other)]


def test_blocks_that_do_not_make_the_leaf_are_refused(blocks: Path, restored: Restore) -> None:
    name = TABLE[GATE].parameter
    wide = jax.ShapeDtypeStruct((8, 64, 688), np.float32)
    with pytest.raises(PolicyError) as caught:
        restored(
            checkpoint_path=blocks,
            manifest=signed(blocks),
            saved_between_hosts_config=(1, 2),
            state_shapes=nested(shapes(**{name: wide})),
        )
    (finding,) = caught.value.findings
    assert (finding.code, finding.file) == ("shape-mismatch", f"ckpt-0/{TABLE[GATE].file}")
    assert "(8, 64, 344)" in finding.message


# --- each kind of damage that the published code loads, runs or does not explain ----------------------------------


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch executed",)


def pickled(value: Any, path: Path) -> None:
    import pickle

    path.write_bytes(pickle.dumps(value, 4))


def exchange(folder: Path) -> None:
    first, second = (folder / TABLE[index].file for index in (GATE, GATE + 2))
    aside = first.read_bytes()
    second.rename(first)
    second.write_bytes(aside)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


FILE = {index: f"ckpt-0/{TABLE[index].file}" for index in range(len(TABLE))}
AFTER: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "two tensors of one shape swapped": (exchange, "digest-mismatch", FILE[GATE]),
    "one bit of a payload flipped": (lambda f: flip(f / TABLE[GATE].file), "digest-mismatch", FILE[GATE]),
    "bytes after the end of the pickle": (
        lambda f: (f / TABLE[NORM].file).write_bytes((f / TABLE[NORM].file).read_bytes() + b"more"),
        "size-mismatch",
        FILE[NORM],
    ),
    "a file too many": (
        lambda f: shutil.copy(f / TABLE[NORM].file, f / "tensor00014_000"),
        "unlisted-file",
        "ckpt-0/tensor00014_000",
    ),
    "a symbolic link": (lambda f: link(f / TABLE[NORM].file), "symlink", FILE[NORM]),
    "a missing file": (lambda f: (f / TABLE[NORM].file).unlink(), "missing-file", FILE[NORM]),
    "an empty file": (lambda f: (f / TABLE[NORM].file).write_bytes(b""), "empty-file", FILE[NORM]),
    "a truncated file": (
        lambda f: (f / TABLE[NORM].file).write_bytes((f / TABLE[NORM].file).read_bytes()[:-9]),
        "size-mismatch",
        FILE[NORM],
    ),
    "a pickle that runs a command": (lambda f: pickled(Hostile(), f / TABLE[NORM].file), "size-mismatch", FILE[NORM]),
}
SIGNED: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "a norm of another length": (
        lambda f: write_value(f / TABLE[NORM].file, np.ones(32, np.float32)),
        "shape-mismatch",
        FILE[NORM],
    ),
    "a norm of another dtype": (
        lambda f: write_value(f / TABLE[NORM].file, np.ones(64, np.float64)),
        "dtype-mismatch",
        FILE[NORM],
    ),
    "a nested dict in place of a tensor": (
        lambda f: pickled({"a": {"b": np.ones(64, np.float32)}}, f / TABLE[NORM].file),
        "dtype-mismatch",
        FILE[NORM],
    ),
    "None in place of a tensor": (lambda f: pickled(None, f / TABLE[NORM].file), "dtype-mismatch", FILE[NORM]),
    "a weight where a norm belongs": (
        lambda f: write_value(f / TABLE[NORM].file, weight((8, 8), (1, 8))),
        "shape-mismatch",
        FILE[NORM],
    ),
    "a tensor too few": (lambda f: (f / TABLE[ROUTER].file).unlink(), "missing-tensor", FILE[ROUTER]),
    "a tensor too many": (
        lambda f: write_value(f / "tensor00014_000", np.ones(64, np.float32)),
        "unexpected-tensor",
        "ckpt-0/tensor00014_000",
    ),
    "names in another order than the files": (lambda _: None, "parameter-name-mismatch", FILE[GATE]),
}


@pytest.mark.parametrize("kind", AFTER)
def test_damage_after_signing_is_refused_by_name(
    *, checkpoint: Path, restored: Restore, manifest: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    damage, code, file = AFTER[kind]
    shutil.copytree(checkpoint, tmp_path / "c")
    damage(tmp_path / "c" / "ckpt-0")
    with pytest.raises(VerificationError) as caught:
        restored(checkpoint_path=tmp_path / "c", manifest=manifest)
    assert (code, file) in [(finding.code, finding.file) for finding in caught.value.findings]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("kind", SIGNED)
def test_damage_that_was_signed_is_refused_by_name(
    checkpoint: Path, restored: Restore, tmp_path: Path, kind: str
) -> None:
    damage, code, file = SIGNED[kind]
    folder = tmp_path / "c"
    shutil.copytree(checkpoint, folder)
    damage(folder / "ckpt-0")
    names = {FILE[shard.index]: shard.parameter for shard in TABLE if (folder / FILE[shard.index]).exists()}
    if "order" in kind:
        names[FILE[GATE]], names[FILE[GATE + 2]] = names[FILE[GATE + 2]], names[FILE[GATE]]
    with pytest.raises(PolicyError) as caught:
        restored(checkpoint_path=folder, manifest=signed(folder, names), policy="numpy-quantized")
    assert (code, file) in [(finding.code, finding.file) for finding in caught.value.findings]


def test_a_pickle_that_runs_a_command_cannot_even_be_signed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "c")
    pickled(Hostile(), tmp_path / "c" / "ckpt-0" / TABLE[NORM].file)
    with pytest.raises(PolicyError) as caught:
        signed(tmp_path / "c")
    assert [(f.code, f.file) for f in caught.value.findings] == [
        ("global-not-allowed", str(tmp_path / "c" / FILE[NORM]))
    ]
    assert not (tmp_path / "executed").exists()


def test_seventeen_kinds_of_damage_are_tested() -> None:
    # Nine that the published code loads silently, four that it fails on, most of them without saying where, one that it
    # runs, and three that it has no check for: a tensor too few or too many, and names in another order.
    assert len(AFTER) + len(SIGNED) == 9 + 4 + 1 + 3
