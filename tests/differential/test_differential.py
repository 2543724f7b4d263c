"""Either a stream is refused, or it is read as `pickle.load` reads it, bit by bit."""

import base64
import io
import json
import pickle
import pickletools
import random
import subprocess
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safeload.canonical import view
from safeload.formats import MemorySource
from safeload.formats.pickles import parse_pickle
from safeload.formats.pickles.constructors import CONSTRUCTORS
from safeload.policy import Policy, load_policy
from safeload.tensors import DTYPE_ITEMSIZE, ML_DTYPES_ITEMSIZE, TensorSpec
from tests.differential.generator import DrawnChoices, RandomChoices, Stream, generate, mutate
from tests.differential.oracle import QuantizedWeight8bit, Tally, ask, check, normal, wide_policy

N_STREAMS = 4_000
SEED = 20_240_317

Dump = Callable[[Any, int], bytes]


@pytest.fixture(scope="module")
def wide() -> Policy:
    return wide_policy()


@pytest.fixture(scope="module")
def random_streams() -> list[Stream]:
    choices = RandomChoices(random.Random(SEED))  # noqa: S311 - the same streams each time
    return [generate(choices) for _ in range(N_STREAMS)]


@pytest.fixture(scope="module")
def tally(random_streams: list[Stream], wide: Policy) -> Tally:
    return check([s.data for s in random_streams], wide, origins=random_streams)


def assert_none(tally: Tally) -> None:
    shortest = sorted(tally.problems, key=lambda problem: len(problem.stream))[:5]
    assert not tally.problems, f"{len(tally.problems)} problems: " + "\n".join(map(str, shortest))


# ---------------------------------------------------------------- generated streams


def test_each_generated_stream_is_refused_or_read_as_pickle_reads_it(tally: Tally) -> None:
    assert_none(tally)


def test_the_default_policy_reads_what_it_accepts_as_pickle_does(random_streams: list[Stream]) -> None:
    narrow = check([s.data for s in random_streams[:1000]], load_policy("numpy-quantized"))
    assert_none(narrow)
    assert narrow.n_accepted > 250


def test_the_generated_streams_are_no_empty_proof(tally: Tally, random_streams: list[Stream]) -> None:
    """They reach every constructor, dtype and protocol, and are refused for many reasons."""
    assert tally.n_accepted > 0.25 * N_STREAMS
    assert sum(tally.refused.values()) > 0.15 * N_STREAMS
    assert sum(stream.intact for stream in random_streams) > 0.25 * N_STREAMS
    assert len({stream.stricter for stream in random_streams}) == 7
    assert {name for what, name in tally.seen if what == "global"} >= {".".join(pair) for pair in CONSTRUCTORS}
    assert {name for what, name in tally.seen if what == "dtype"} == set(DTYPE_ITEMSIZE)
    assert {name for what, name in tally.seen if what == "protocol"} == set("012345")
    assert len(tally.refused) > 30


collected: list[Stream] = []


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    return generate(DrawnChoices(draw))


@given(stream=streams())
@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
def test_no_stream_that_hypothesis_draws_makes_the_parser_raise(stream: Stream) -> None:
    """And each is kept, so that the next test asks about all at once: a process an example would be too slow."""
    parse_pickle(MemorySource(stream.data), wide_policy())
    collected.append(stream)


def test_each_stream_that_hypothesis_drew_is_refused_or_read_as_pickle_reads_it(wide: Policy) -> None:
    if not collected:
        test_no_stream_that_hypothesis_draws_makes_the_parser_raise()
    result = check([stream.data for stream in collected], wide, origins=collected)
    assert_none(result)
    assert result.n_accepted > 50


def test_damaged_honest_pickles_are_refused_or_read_as_pickle_reads_them(wide: Policy, model_module: None) -> None:
    del model_module
    choices = RandomChoices(random.Random(SEED))  # noqa: S311 - the same streams each time
    honest = [dump(value, protocol) for _, dump in DUMPS for protocol in range(6) for value in honest_values()[::5]]
    damaged = [mutate(choices, choices.choice(honest), choices.choice(honest)) for _ in range(2000)]
    result = check(damaged, wide)
    assert_none(result)
    assert result.n_accepted > 20


# ---------------------------------------------------------------- honest pickles


@pytest.fixture
def model_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `model` with the class of Grok-1's records, as the published shards name it."""
    module = types.ModuleType("model")
    monkeypatch.setitem(sys.modules, "model", module)
    monkeypatch.setattr(QuantizedWeight8bit, "__module__", "model")
    monkeypatch.setattr(module, "QuantizedWeight8bit", QuantizedWeight8bit, raising=False)


def _in_python(value: Any, protocol: int) -> bytes:
    out = io.BytesIO()
    pickle._Pickler(out, protocol).dump(value)
    return out.getvalue()


DUMPS: Sequence[tuple[str, Dump]] = (
    ("C", pickle.dumps),
    ("Python", _in_python),
    ("optimized", lambda value, protocol: pickletools.optimize(pickle.dumps(value, protocol))),
)


def _arrays(name: str) -> list[np.ndarray[Any, np.dtype[Any]]]:
    dtype = np.dtype(getattr(ml_dtypes, name) if name in ML_DTYPES_ITEMSIZE else name)
    size = dtype.itemsize
    block = np.frombuffer(bytes(i * 37 % (2 if name == "bool" else 251) for i in range(24 * size)), dtype=dtype)
    cube = block.reshape(2, 3, 4)
    made = [
        cube,
        np.asfortranarray(cube),
        cube[:, ::2],
        cube[0, 0, 0].reshape(()),
        cube[:0],
        block,
        cube.reshape((1,) * 29 + (2, 3, 4)),
    ]
    if name not in ML_DTYPES_ITEMSIZE and size > 1:
        made += [cube.astype(dtype.newbyteorder(">")), np.asfortranarray(cube).astype(dtype.newbyteorder(">"))]
    return made


def honest_values() -> list[Any]:
    arrays = [array for name in DTYPE_ITEMSIZE for array in _arrays(name)]
    weight, scales = np.arange(24, dtype=np.int8).reshape(2, 6, 2), np.ones((2, 3, 2), ml_dtypes.bfloat16)
    record = QuantizedWeight8bit(weight=weight, scales=scales)
    shared = [arrays[0], "\u00e9", "\U0001f600\n\\"]
    containers: list[Any] = [
        {"a": arrays[0], "b": [arrays[1], (arrays[2], None, True, -1.5, 1 << 70)], 3: b"", "bytes": b"\xff" * 300},
        OrderedDict([("x", record), ("y", {})]),
        [shared, shared, {"again": shared}],
        record,
        {"layers": [record, QuantizedWeight8bit(weight=weight[:1], scales=scales[:1].astype(np.float32))]},
        [np.float32(1.5), np.int8(-3), np.bool_(True), ml_dtypes.bfloat16(2), np.complex128(1j)],
    ]
    return [*arrays, *containers]


@pytest.mark.parametrize("dump", [dump for _, dump in DUMPS], ids=[name for name, _ in DUMPS])
def test_every_honest_pickle_is_accepted_and_read_as_pickle_reads_it(
    dump: Dump, wide: Policy, model_module: None
) -> None:
    del model_module
    values = honest_values()
    pickles = [dump(value, protocol) for protocol in range(6) for value in values]
    result = check(pickles, wide)
    assert_none(result)
    assert result.n_accepted == len(pickles), result.refused
    assert {name for what, name in result.seen if what == "dtype"} == set(DTYPE_ITEMSIZE)


def test_the_oracle_reads_back_what_was_dumped(model_module: None) -> None:
    """Otherwise it would agree with anything."""
    del model_module
    values = [honest_values()[-6:], None, 1.5, float("nan"), 1, True, "1", b"1"]
    for value, (in_c, in_python) in zip(values, ask([pickle.dumps(value) for value in values]), strict=True):
        assert in_c == in_python == json.loads(json.dumps(normal(value)))
    assert len({json.dumps(normal(value)) for value in values}) == len(values)


def test_the_oracle_outlives_a_stream_that_kills_its_worker() -> None:
    """And resolves nothing but the harmless parts."""
    nested = b"\x80\x04" + b"]" * 400_000 + b"a" * 399_999 + b"."
    (_, _), (foreign, _), (none, _) = ask([nested, b"cos\ngetpid\n)R.", b"N."])
    assert foreign[:2] == ["error", "UnpicklingError"]
    assert none == ["none"]


JAX_WRITER = """
import base64, json, pickle, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
names = ["bool", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64", "complex64",
         "float8_e4m3fn", "float8_e5m2"]
for name in names:
    for shape in [(), (0, 3), (2, 3)]:
        array = jnp.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 2, dtype=name)
        host = np.asarray(array)
        for protocol in range(2, 6):
            row = [name, list(shape), host.tobytes().hex(), base64.b64encode(pickle.dumps(array, protocol)).decode()]
            print(json.dumps(row))
"""


@pytest.mark.slow
def test_jax_arrays_are_read_as_the_numpy_arrays_that_they_hold() -> None:
    pytest.importorskip("jax")
    written = subprocess.run([sys.executable, "-c", JAX_WRITER], capture_output=True, check=True, timeout=300)
    rows = [json.loads(line) for line in written.stdout.splitlines()]
    assert len(rows) == 13 * 3 * 4
    policy = load_policy("numpy-quantized")
    for name, shape, data, encoded in rows:
        stream = base64.b64decode(encoded)
        parsed = parse_pickle(MemorySource(stream), policy)
        assert parsed.refusal is None, (name, shape, parsed.refusal)
        assert isinstance(parsed.value, TensorSpec)
        extent = parsed.value.extent
        payload = stream[extent.offset :][: extent.nbytes] if extent.inline is None else extent.inline
        array = view(payload, parsed.value)
        assert (array.dtype.name, list(array.shape), array.tobytes().hex()) == (name, shape, data)
