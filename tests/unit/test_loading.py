"""Claims of `safeload.loading`: the whole chain, from a directory that anybody may change to arrays, or a refusal."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from safeload import loading, publishing
from safeload.digests import CHUNK_BYTES
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    FormatError,
    ManifestError,
    PolicyError,
    RejectedError,
    SafeloadError,
    SignatureError,
    StagingError,
)
from safeload.files import Root
from safeload.manifest import Manifest
from safeload.records import Record
from safeload.scanning import admit
from safeload.trust.dsse import Envelope
from safeload.trust.keys import SecretKey
from safeload.verifying import read_manifest
from tests.simulator import (
    CONFIG,
    MODEL,
    NESTED,
    PLAIN,
    QUANTIZED,
    README,
    TOKENIZER,
    CheckpointSimulator,
    Exploit,
    pickled,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointSimulator:
    return CheckpointSimulator(tmp_path)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in containers, types, dtypes, shapes and bits; the order in memory too."""
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, Record):
        assert isinstance(found, Record)
        assert_same(dict(found.items()), dict(expected.items()))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


def arrays_of(tree: Any) -> Iterator[np.ndarray]:
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, (Mapping, Record)):
        for _name, child in tree.items():  # noqa: PERF102 - a record has no `values`
            yield from arrays_of(child)
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            yield from arrays_of(child)


def codes(error: RejectedError) -> list[tuple[str | None, str]]:
    return [(finding.file, finding.code) for finding in error.findings]


# ---------------------------------------------------------------- the honest one


def test_an_honest_checkpoint_loads_bit_for_bit(checkpoint: CheckpointSimulator) -> None:
    assert_same(dict(checkpoint.load()), dict(sorted(checkpoint.values.items())))


def test_an_honest_checkpoint_verifies_file_by_file(checkpoint: CheckpointSimulator) -> None:
    report = checkpoint.verify()
    assert report.verdict == "accepted"
    assert [file.path for file in report.files] == sorted(checkpoint.snapshot(), key=str.encode)
    assert all(file.findings == () for file in report.files)
    assert report.facts["manifest"]["signers"][0]["keyid"] == checkpoint.key.public.keyid
    assert report.facts["policy"]["name"] == "numpy-quantized"


def test_load_gives_only_files_of_tensors(checkpoint: CheckpointSimulator) -> None:
    assert set(checkpoint.load()) == {PLAIN, QUANTIZED, NESTED}


# ---------------------------------------------------------------- damage

DAMAGE: dict[str, tuple[Callable[[CheckpointSimulator], object], type[RejectedError], list[tuple[str, str]]]] = {
    "bit flipped in a payload": (
        lambda c: c.flip_bit(PLAIN),
        DigestMismatchError,
        [(PLAIN, "digest-mismatch")],
    ),
    "bit flipped in an opcode": (
        lambda c: c.flip_bit(QUANTIZED, 0),
        DigestMismatchError,
        [(QUANTIZED, "digest-mismatch")],
    ),
    "bit flipped in a file of no tensors": (
        lambda c: c.flip_bit(README, 3),
        DigestMismatchError,
        [(README, "digest-mismatch")],
    ),
    "truncated": (lambda c: c.truncate(PLAIN), FileSetError, [(PLAIN, "size-mismatch")]),
    "emptied": (lambda c: c.write(QUANTIZED, b""), FileSetError, [(QUANTIZED, "empty-file")]),
    "appended": (lambda c: c.append(QUANTIZED), FileSetError, [(QUANTIZED, "size-mismatch")]),
    "swapped": (
        lambda c: c.swap(PLAIN, QUANTIZED),
        FileSetError,
        [(PLAIN, "size-mismatch"), (QUANTIZED, "size-mismatch")],
    ),
    "removed": (lambda c: c.remove(CONFIG), FileSetError, [(CONFIG, "missing-file")]),
    "added": (lambda c: c.add(), FileSetError, [("extra", "unlisted-file")]),
    "added, hidden": (lambda c: c.add(".extra"), FileSetError, [(".extra", "unlisted-file")]),
    "added, deep": (lambda c: c.add("a/b/extra"), FileSetError, [("a/b/extra", "unlisted-file")]),
    "added, named like a manifest": (
        lambda c: c.add("checkpoint.manifest", c.manifest.read_bytes()),
        FileSetError,
        [("checkpoint.manifest", "unlisted-file")],
    ),
    "symlink to the same bytes": (
        lambda c: c.replace_by_symlink(PLAIN),
        FileSetError,
        [(PLAIN, "symlink")],
    ),
    "FIFO": (lambda c: c.replace_by_fifo(PLAIN), FileSetError, [(PLAIN, "not-a-regular-file")]),
    "directory": (lambda c: c.replace_by_directory(PLAIN), FileSetError, [(PLAIN, "not-a-regular-file")]),
    "hard link to the same bytes": (lambda c: c.replace_by_hard_link(PLAIN), FileSetError, [(PLAIN, "hard-link")]),
    "hard link to other bytes": (
        lambda c: c.replace_by_hard_link(PLAIN, b"\0" * c.path(PLAIN).stat().st_size),
        FileSetError,
        [(PLAIN, "hard-link")],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_load_refuses_each_damage_with_its_own_finding(checkpoint: CheckpointSimulator, damage: str) -> None:
    act, error, expected = DAMAGE[damage]
    act(checkpoint)
    with pytest.raises(error) as refused:
        checkpoint.load()
    assert type(refused.value) is error
    assert codes(refused.value) == expected
    assert all(finding.hint for finding in refused.value.findings)


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_refuses_each_damage_with_its_own_finding(checkpoint: CheckpointSimulator, damage: str) -> None:
    act, error, expected = DAMAGE[damage]
    act(checkpoint)
    with pytest.raises(error) as refused:
        checkpoint.verify()
    assert type(refused.value) is error
    # Beside its digest, a streamed file is also refused for what is in it: the first finding of each file counts.
    first: dict[str | None, str] = {}
    for finding in refused.value.findings:
        first.setdefault(finding.file, finding.code)
    assert list(first.items()) == expected


def test_two_files_of_one_length_cannot_change_places(checkpoint: CheckpointSimulator) -> None:
    checkpoint.write("tensor00002_000", pickled(np.ones((600, 500), np.float32)))
    checkpoint.sign()
    checkpoint.swap(PLAIN, "tensor00002_000")
    expected = [(PLAIN, "digest-mismatch"), ("tensor00002_000", "digest-mismatch")]
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises(DigestMismatchError) as refused:
            use()
        assert codes(refused.value) == expected


def test_verify_reports_all_damages_of_a_directory_at_once(checkpoint: CheckpointSimulator) -> None:
    checkpoint.flip_bit(QUANTIZED)
    checkpoint.truncate(PLAIN)
    checkpoint.remove(CONFIG)
    checkpoint.add("extra")
    checkpoint.replace_by_fifo(README)
    with pytest.raises(FileSetError) as refused:
        checkpoint.verify()
    assert codes(refused.value) == [
        (README, "not-a-regular-file"),
        (CONFIG, "missing-file"),
        ("extra", "unlisted-file"),
        (PLAIN, "size-mismatch"),
        (QUANTIZED, "digest-mismatch"),
    ]


def test_load_reports_all_damages_of_the_file_set_at_once(checkpoint: CheckpointSimulator) -> None:
    checkpoint.truncate(PLAIN)
    checkpoint.remove(CONFIG)
    checkpoint.add("extra")
    checkpoint.replace_by_symlink(README)
    with pytest.raises(FileSetError) as refused:
        checkpoint.load()
    assert codes(refused.value) == [
        (README, "symlink"),
        (CONFIG, "missing-file"),
        ("extra", "unlisted-file"),
        (PLAIN, "size-mismatch"),
    ]


def test_load_reports_all_digests_that_are_wrong_at_once(checkpoint: CheckpointSimulator) -> None:
    for name in (PLAIN, QUANTIZED, README):
        checkpoint.flip_bit(name, -3)
    with pytest.raises(DigestMismatchError) as refused:
        checkpoint.load()
    assert codes(refused.value) == [(name, "digest-mismatch") for name in (README, PLAIN, QUANTIZED)]


def test_load_reports_every_file_that_is_not_admitted(checkpoint: CheckpointSimulator) -> None:
    checkpoint.bless(PLAIN, pickled(Exploit(), 2))
    checkpoint.bless(README, b"text\x1b[2J")
    with pytest.raises(RejectedError) as refused:
        checkpoint.load()
    assert {finding.file for finding in refused.value.findings} == {PLAIN, README}


def test_nothing_is_decoded_of_a_refused_directory(
    checkpoint: CheckpointSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "decode", lambda _: pytest.fail("decoded"))
    checkpoint.flip_bit(README, 0)
    with pytest.raises(DigestMismatchError):
        checkpoint.load()
    checkpoint.bless(README, b"\0")
    with pytest.raises(FormatError):
        checkpoint.load()


@pytest.mark.parametrize("use", ["load", "verify"])
def test_a_file_that_cannot_be_read_is_never_accepted(
    checkpoint: CheckpointSimulator, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    refuse_to_open(monkeypatch, PLAIN)
    with pytest.raises(SafeloadError) as refused:
        getattr(checkpoint, use)()
    if use == "load":
        assert type(refused.value) is StagingError
        assert PLAIN in str(refused.value)
    else:
        assert isinstance(refused.value, RejectedError)
        assert codes(refused.value) == [(PLAIN, "unreadable")]


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the system refuse to open a file, which mode bits do not do where tests run as root."""
    genuine = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == name:
            raise PermissionError(13, "Permission denied")
        return genuine(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)


def test_a_directory_that_is_not_there_is_no_verdict(checkpoint: CheckpointSimulator) -> None:
    checkpoint.directory.rename(checkpoint.outside)
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises(StagingError, match="cannot open the directory"):
            use()


# ---------------------------------------------------------------- signatures, arguments


def test_a_manifest_by_another_key_is_refused_before_the_directory_is_looked_at(
    checkpoint: CheckpointSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Root, "__enter__", lambda _: pytest.fail("looked at the directory"))
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises(SignatureError) as refused:
            use(trust=SecretKey.generate().public)
        assert [finding.code for finding in refused.value.findings] == ["untrusted-key"]
        assert refused.value.findings[0].file == str(checkpoint.manifest)


def test_a_manifest_that_was_changed_is_refused(checkpoint: CheckpointSimulator) -> None:
    envelope = checkpoint.manifest.read_bytes()
    parsed = Envelope.parse(envelope)
    changed = Envelope(parsed.payload.replace(b'"r1"', b'"r2"'), parsed.payload_type, parsed.signatures).serialize()
    assert changed != envelope
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises(SignatureError) as refused:
            use(manifest=changed)
        assert [finding.code for finding in refused.value.findings] == ["bad-signature"]


def test_a_manifest_that_breaks_its_schema_is_refused(checkpoint: CheckpointSimulator) -> None:
    checkpoint.resign(lambda predicate: predicate.update(surprise=1))
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises(ManifestError) as refused:
            use()
        assert [finding.code for finding in refused.value.findings] == ["bad-manifest"]


@pytest.mark.parametrize("use", ["load", "verify"])
@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"policy": "no-such"}, "no-such"),
        ({"policy": "./no-such.toml"}, "no-such.toml"),
        ({"manifest": "no-such"}, "no-such"),
        ({"manifest": "/"}, "manifest"),
        ({"manifest": "a\0b"}, "manifest"),
        ({"trust": "no-such"}, "no-such"),
        ({"trust": []}, "trusted key"),
    ],
)
def test_a_wrong_argument_is_a_config_error_that_names_it(
    checkpoint: CheckpointSimulator, use: str, options: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError, match=place):
        getattr(checkpoint, use)(**options)


@pytest.mark.parametrize("budget", [1000, "1kB"])
def test_the_memory_budget_is_kept(checkpoint: CheckpointSimulator, budget: int | str) -> None:
    with pytest.raises(StagingError, match="1000 bytes"):
        checkpoint.load(memory_budget=budget)


def test_a_memory_budget_that_is_no_size_is_a_config_error(checkpoint: CheckpointSimulator) -> None:
    with pytest.raises(ConfigError, match="lots"):
        checkpoint.load(memory_budget="lots")


@pytest.mark.parametrize("budget", [-1, 0, 1.5, True, 2**63])
def test_a_number_that_is_no_size_is_one_as_well(checkpoint: CheckpointSimulator, budget: Any) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        checkpoint.load(memory_budget=budget)


@pytest.mark.parametrize("use", [loading.load, loading.load_and_report, loading.verify, loading.check])
@pytest.mark.parametrize(("trust", "kind"), [(None, "NoneType"), (5, "int"), ([None], "NoneType"), (b"key", "int")])
def test_what_names_nobody_to_trust_is_a_config_error(
    checkpoint: CheckpointSimulator, use: Callable[..., Any], trust: Any, kind: str
) -> None:
    with pytest.raises(ConfigError, match=f"trust: expected a public key.*found {kind}") as caught:
        use(checkpoint.directory, manifest=checkpoint.manifest, trust=trust)
    assert "trust='publisher.key.pub'" in str(caught.value.hint)


def test_the_policy_holds_for_what_is_signed(checkpoint: CheckpointSimulator) -> None:
    # Who signs does not decide what the consumer is willing to load.
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises(PolicyError) as refused:
            use(policy="grok-1")
        assert {finding.code for finding in refused.value.findings if finding.file == NESTED} >= {
            "shard-name",
            "shard-content",
        }


# ---------------------------------------------------------------- hashed = scanned = loaded


def test_changes_after_staging_reach_neither_the_scan_nor_the_arrays(
    checkpoint: CheckpointSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []

    def admit_late(staged: Any, **options: Any) -> Any:
        # In place, as somebody does who holds the files open: the inodes are those that were staged.
        for name, data in checkpoint.snapshot().items():
            checkpoint.write(name, (pickled(Exploit()) + bytes(len(data)))[: len(data)])
            changed.append(name)
        return admit(staged, **options)

    monkeypatch.setattr(loading, "admit", admit_late)
    loaded = checkpoint.load()
    assert PLAIN in changed
    assert_same(dict(loaded), dict(sorted(checkpoint.values.items())))


def test_changes_after_loading_do_not_reach_the_arrays(checkpoint: CheckpointSimulator) -> None:
    loaded = checkpoint.load()
    for name, data in checkpoint.snapshot().items():
        with checkpoint.path(name).open("r+b") as file:
            file.write(bytes(len(data)))
    assert_same(dict(loaded), dict(sorted(checkpoint.values.items())))


_opened: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(args[0], (str, bytes, os.PathLike)):
        _opened.append(os.fsdecode(args[0]))


sys.addaudithook(_audit)


@pytest.mark.parametrize("use", ["load", "verify", "sign"])
def test_no_path_is_opened_twice(checkpoint: CheckpointSimulator, use: str) -> None:
    global _opened  # noqa: PLW0603 - an audit hook cannot be taken away, only be told not to listen
    # What is imported late opens files too.
    getattr(checkpoint, use)()
    _opened = []
    try:
        getattr(checkpoint, use)()
        opened = _opened
    finally:
        _opened = None
    for path in checkpoint.snapshot():
        assert sum(Path(name).name == Path(path).name for name in opened) == 1, path
    assert sum(name.endswith(checkpoint.manifest.name) for name in opened) == 1


# ---------------------------------------------------------------- the arrays


def test_loaded_arrays_are_read_only_for_good(checkpoint: CheckpointSimulator) -> None:
    found = list(arrays_of(checkpoint.load()))
    assert len(found) == 6
    for array in found:
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array.fill(0)
        with pytest.raises(ValueError, match="cannot set WRITEABLE"):
            array.flags.writeable = True


def test_an_array_owns_the_staged_memory(checkpoint: CheckpointSimulator) -> None:
    loaded = checkpoint.load()
    part = loaded[QUANTIZED].weight[2:4]
    whole = loaded[PLAIN]
    expected = checkpoint.values[QUANTIZED].weight[2:4].copy(), checkpoint.values[PLAIN].copy()
    del loaded, checkpoint
    gc.collect()
    # Memory that was given back would be handed out again.
    junk = [np.full(1 << 20, 255, np.uint8) for _ in range(8)]
    assert_same(part, expected[0])
    assert_same(whole, expected[1])
    del junk


@pytest.mark.parametrize("n_bytes", [0, 1, 63, 300_000, 2_000_001])
def test_the_first_payload_of_each_file_is_aligned(checkpoint: CheckpointSimulator, n_bytes: int) -> None:
    # Small files share memory and large ones do not; the manifest tells where the payload lies.
    for i in range(3):
        checkpoint.write(f"odd{i}", pickled(np.ones(n_bytes + i, np.uint8)))
    checkpoint.sign()
    for path, value in checkpoint.load().items():
        first = next(arrays_of(value))
        assert first.__array_interface__["data"][0] % 64 == 0 or first.nbytes == 0, path


# ---------------------------------------------------------------- the manifest's own place


@pytest.mark.parametrize("use", ["load", "verify"])
def test_a_manifest_in_the_directory_is_ignored_if_it_is_the_one_passed(
    checkpoint: CheckpointSimulator, use: str
) -> None:
    inside = checkpoint.path("m.json")
    checkpoint.manifest.rename(inside)
    getattr(checkpoint, use)(manifest=inside)


@pytest.mark.parametrize("use", ["load", "verify"])
def test_a_manifest_in_the_directory_is_refused_if_another_was_passed(
    checkpoint: CheckpointSimulator, use: str
) -> None:
    # The same bytes, but nobody asked for this file.
    checkpoint.add("m.json", checkpoint.manifest.read_bytes())
    for other in (checkpoint.manifest, checkpoint.manifest.read_bytes()):
        with pytest.raises(FileSetError) as refused:
            getattr(checkpoint, use)(manifest=other)
        assert codes(refused.value) == [("m.json", "unlisted-file")]
        assert "if it is the manifest, give this one with -m" in (refused.value.findings[0].hint or "")


@pytest.mark.parametrize("use", ["load", "verify"])
def test_another_name_of_the_manifest_passed_is_unlisted(checkpoint: CheckpointSimulator, use: str) -> None:
    for name in ("extra.pkl", "sub/model.bin"):
        checkpoint.path(name).parent.mkdir(exist_ok=True)
        checkpoint.path(name).hardlink_to(checkpoint.manifest)
    with pytest.raises(FileSetError) as refused:
        getattr(checkpoint, use)()
    assert codes(refused.value) == [("extra.pkl", "unlisted-file"), ("sub/model.bin", "unlisted-file")]


@pytest.mark.parametrize("use", ["load", "verify"])
def test_what_takes_the_place_of_the_manifest_passed_is_unlisted(
    checkpoint: CheckpointSimulator, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = checkpoint.path("m.json")
    checkpoint.manifest.rename(inside)
    real = read_manifest

    def read_then_lose(manifest: Path) -> tuple[bytes, str]:
        found = real(manifest)
        inside.write_bytes(b"cos\nsystem\n(S'true'\ntR.")  # the same inode, other bytes
        return found

    monkeypatch.setattr(loading, "read_manifest", read_then_lose)
    with pytest.raises(FileSetError) as refused:
        getattr(checkpoint, use)(manifest=inside)
    assert codes(refused.value) == [("m.json", "unlisted-file")]


@pytest.mark.parametrize("use", ["load", "verify"])
def test_a_manifest_that_is_no_regular_file_is_no_verdict_and_no_wait(
    checkpoint: CheckpointSimulator, use: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="no regular file"):
            getattr(checkpoint, use)(manifest=path)


@pytest.mark.parametrize("use", ["load", "verify"])
def test_a_link_in_the_directory_to_the_manifest_passed_is_refused(checkpoint: CheckpointSimulator, use: str) -> None:
    checkpoint.path("m.json").symlink_to(checkpoint.manifest)
    with pytest.raises(FileSetError) as refused:
        getattr(checkpoint, use)()
    assert codes(refused.value) == [("m.json", "symlink")]


# ---------------------------------------------------------------- the manifest against the file


def _tensor(**change: Any) -> Callable[[dict[str, Any]], None]:
    return lambda entry: entry["tensors"][0].update(change)


LIES: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "no tensor": (PLAIN, lambda entry: entry.pop("tensors")),
    "one tensor more": (PLAIN, lambda entry: entry["tensors"].append({**entry["tensors"][0], "name": "b"})),
    "another name": (PLAIN, _tensor(name="b")),
    "another dtype": (PLAIN, _tensor(dtype="int32")),
    "another shape": (PLAIN, _tensor(shape=[500, 600])),
    "another order": (PLAIN, _tensor(order="F")),
    "another place": (PLAIN, _tensor(offset=0)),
    "another byte order": (PLAIN, _tensor(byteorder="big")),
    "inline": (PLAIN, _tensor(inline=True)),
    "fewer globals": (PLAIN, lambda entry: entry["globals"].pop()),
    "more globals": (PLAIN, lambda entry: entry["globals"].append("ml_dtypes.bfloat16")),
    "tensors in another order": (NESTED, lambda entry: entry["tensors"].reverse()),
    "another format": (CONFIG, lambda entry: entry.update(format="text")),
    "a pickle that is none": (README, lambda entry: entry.update(format="pickle")),
}


@pytest.mark.parametrize("use", ["load", "verify"])
@pytest.mark.parametrize("lie", LIES)
def test_a_signed_manifest_that_disagrees_with_its_files_is_refused(
    checkpoint: CheckpointSimulator, use: str, lie: str
) -> None:
    name, edit = LIES[lie]
    checkpoint.edit_entry(name, edit)
    with pytest.raises(PolicyError) as refused:
        getattr(checkpoint, use)()
    assert type(refused.value) is PolicyError
    assert codes(refused.value) == [(name, "manifest-disagrees")]


SIGNED_BUT_BAD: dict[str, tuple[str, bytes, type[RejectedError], str]] = {
    "no pickle": (PLAIN, b"\x80\x04\xff.", FormatError, "unknown-opcode"),
    "cut short": (PLAIN, pickled(np.ones(3))[:-1], FormatError, "truncated"),
    "hostile": (PLAIN, pickled(Exploit()), PolicyError, "global-not-allowed"),
    "an archive": (PLAIN, b"\x1f\x8b\x08" + bytes(60), PolicyError, "format-not-supported"),
    "no JSON": (CONFIG, b"{", FormatError, "name-contradicts-content"),
}


@pytest.mark.parametrize("use", ["load", "verify"])
@pytest.mark.parametrize("case", SIGNED_BUT_BAD)
def test_a_signature_does_not_make_bad_bytes_good(checkpoint: CheckpointSimulator, use: str, case: str) -> None:
    name, data, error, code = SIGNED_BUT_BAD[case]
    checkpoint.bless(name, data)
    with pytest.raises(error) as refused:
        getattr(checkpoint, use)()
    # Both verbs say no for the same reason, so that a caller may tell the kinds of refusal apart whichever it uses.
    assert type(refused.value) is error
    assert codes(refused.value) == [(name, code)]


# ---------------------------------------------------------------- signing


def test_sign_lists_every_file_with_its_role(checkpoint: CheckpointSimulator) -> None:
    checkpoint.write(".hidden.json", b"[]")
    checkpoint.write("vocab.json", b"{}")
    checkpoint.write("tokenizer_config.json", b"{}")
    manifest = Manifest.parse(Envelope.parse(checkpoint.sign()).payload)
    assert {entry.path: (entry.role, entry.format) for entry in manifest.files} == {
        ".hidden.json": ("config", "json"),
        CONFIG: ("config", "json"),
        NESTED: ("weights", "pickle"),
        PLAIN: ("weights", "pickle"),
        QUANTIZED: ("weights", "pickle"),
        README: ("docs", "text"),
        TOKENIZER: ("tokenizer", "opaque"),
        "tokenizer_config.json": ("tokenizer", "json"),
        "vocab.json": ("tokenizer", "json"),
    }
    assert (manifest.stream, manifest.revision, manifest.version) == (MODEL, "r1", 1)
    assert manifest.totals.bytes == sum(map(len, checkpoint.snapshot().values()))


def test_sign_binds_the_parameters_that_shards_hold(checkpoint: CheckpointSimulator) -> None:
    given = {PLAIN: "params/norm/scale", NESTED: "opt"}
    manifest = Manifest.parse(Envelope.parse(checkpoint.sign(parameters=given)).payload)
    assert {path: entry.parameter for path, entry in manifest.by_path.items() if entry.parameter} == given


TRAINING_STATE = {
    "optimizer_state": pickled([np.zeros((2, 3), np.float32)]),
    "rng.json": b"[1, 2]",
    "trainer_state.json": b'{"step": 7}',
}


def test_a_checkpoint_is_signed_for_training_only_with_all_that_a_resume_needs(checkpoint: CheckpointSimulator) -> None:
    with pytest.raises(ManifestError) as refused:
        checkpoint.sign(kind="training")
    assert [f.code for f in refused.value.findings] == ["role-missing"] * 3
    assert [f.message.split()[5].rstrip(",") for f in refused.value.findings] == ["optimizer", "step", "rng"]
    for name, data in TRAINING_STATE.items():
        checkpoint.write(name, data)
    manifest = Manifest.parse(Envelope.parse(checkpoint.sign(kind="training")).payload)
    assert manifest.kind == "training"
    assert manifest.requires == ("weights", "optimizer", "step", "rng", "config", "tokenizer")
    assert {path: manifest.by_path[path].role for path in TRAINING_STATE} == {
        "optimizer_state": "optimizer",
        "rng.json": "rng",
        "trainer_state.json": "step",
    }
    assert checkpoint.verify(purpose="training").is_accepted


def test_a_signer_may_require_more_and_never_less(checkpoint: CheckpointSimulator) -> None:
    with pytest.raises(ManifestError, match="data-progress"):
        checkpoint.sign(require=["data-progress"])
    checkpoint.write("data_progress.json", b"{}")
    manifest = Manifest.parse(Envelope.parse(checkpoint.sign(require=["data-progress"])).payload)
    assert manifest.requires == ("weights", "config", "tokenizer", "data-progress")
    with pytest.raises(ConfigError, match="require: expected roles"):
        checkpoint.sign(require=["soul"])
    with pytest.raises(ConfigError, match="kind: expected inference or training"):
        checkpoint.sign(kind="fun")


def test_sign_states_epoch_expiry_and_predecessor(checkpoint: CheckpointSimulator) -> None:
    end = datetime(2100, 1, 1, tzinfo=UTC)
    manifest = Manifest.parse(Envelope.parse(checkpoint.sign(epoch=3, expires=end, previous="a" * 64)).payload)
    assert (manifest.epoch, manifest.expires, manifest.previous) == (3, "2100-01-01T00:00:00Z", "a" * 64)
    with pytest.raises(ConfigError, match="expires before it is issued"):
        checkpoint.sign(expires=datetime(2001, 1, 1, tzinfo=UTC))


def test_sign_takes_chunk_digests_and_blake3_in_the_same_pass(checkpoint: CheckpointSimulator) -> None:
    blake3 = pytest.importorskip("blake3").blake3
    large = pickled(np.arange(9 * 2**20, dtype=np.float32))
    checkpoint.write("tensor00009_000", large)
    plain = Manifest.parse(Envelope.parse(checkpoint.sign()).payload)
    assert {entry.path for entry in plain.files if entry.chunks is not None} == {"tensor00009_000"}
    entry = plain.by_path["tensor00009_000"]
    assert entry.chunk_digests == tuple(
        hashlib.sha256(large[start : start + CHUNK_BYTES]).digest() for start in range(0, len(large), CHUNK_BYTES)
    )
    assert entry.sha256 == hashlib.sha256(large).hexdigest()
    assert {entry.blake3 for entry in plain.files} == {None}
    more = Manifest.parse(Envelope.parse(checkpoint.sign(blake3=True)).payload)
    for path, data in checkpoint.snapshot().items():
        assert more.by_path[path].blake3 == blake3(data).hexdigest()
    assert checkpoint.verify().is_accepted
    assert_same(checkpoint.load()["tensor00009_000"], np.arange(9 * 2**20, dtype=np.float32))


def test_without_its_package_blake3_is_refused_before_anything_is_read(
    checkpoint: CheckpointSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)
    monkeypatch.setattr(Root, "open", lambda *_: pytest.fail("opened a file"))
    with pytest.raises(ConfigError, match=r"pip install '\.\[blake3\]' in its repository"):
        checkpoint.sign(blake3=True)


def test_describe_states_what_sign_would_sign(checkpoint: CheckpointSimulator) -> None:
    manifest, report = publishing.describe(checkpoint.directory, model=MODEL, revision="r1")
    signed = Manifest.parse(Envelope.parse(checkpoint.sign()).payload)
    assert manifest.files == signed.files
    assert [file.path for file in report.files] == [entry.path for entry in signed.files]


def test_sign_refuses_parameters_of_files_that_are_not_there(checkpoint: CheckpointSimulator) -> None:
    with pytest.raises(ConfigError, match="tensor99999_000"):
        checkpoint.sign(parameters={PLAIN: "a", "tensor99999_000": "b"})


def _break_twice(checkpoint: CheckpointSimulator) -> None:
    checkpoint.add("x.json", b"{")
    checkpoint.replace_by_symlink(PLAIN)


BAD_FOR_SIGNING: dict[str, tuple[Callable[[CheckpointSimulator], object], set[str]]] = {
    "hostile": (lambda c: c.add("tensor00009_000", pickled(Exploit())), {"global-not-allowed"}),
    "malformed": (lambda c: c.truncate(PLAIN), {"truncated"}),
    "unknown": (lambda c: c.add("notes", b"\xff\xfe"), {"not-a-pickle"}),
    "symlink": (lambda c: c.replace_by_symlink(PLAIN), {"symlink"}),
    "FIFO": (lambda c: c.replace_by_fifo(README), {"not-a-regular-file"}),
    "two": (_break_twice, {"name-contradicts-content", "symlink"}),
}


@pytest.mark.parametrize("case", BAD_FOR_SIGNING)
def test_sign_refuses_what_the_policy_refuses(checkpoint: CheckpointSimulator, case: str) -> None:
    act, expected = BAD_FOR_SIGNING[case]
    act(checkpoint)
    before = checkpoint.manifest.read_bytes()
    with pytest.raises(PolicyError) as refused:
        checkpoint.sign()
    assert {finding.code for finding in refused.value.findings} == expected
    assert all(
        finding.file and finding.file.startswith(str(checkpoint.directory)) for finding in refused.value.findings
    )
    assert checkpoint.manifest.read_bytes() == before


def test_sign_refuses_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PolicyError) as refused:
        publishing.sign(tmp_path / "empty", keys=[SecretKey.generate()], model="m", revision="r")
    assert [finding.code for finding in refused.value.findings] == ["nothing-to-scan"]


@pytest.mark.parametrize("name", ["a. ", "a\\b", ".git", "a\u202eb", "x:y"])
def test_sign_refuses_names_that_no_manifest_can_hold(checkpoint: CheckpointSimulator, name: str) -> None:
    checkpoint.write(f"{name}/a.json", b"{}")
    with pytest.raises(ManifestError) as refused:
        checkpoint.sign()
    assert [finding.code for finding in refused.value.findings] == ["bad-manifest"]


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"keys": []}, "keys"),
        ({"model": "two words"}, "stream"),
        ({"revision": ""}, "revision"),
        ({"version": 0}, "version"),
        ({"policy": "no-such"}, "no-such"),
    ],
)
def test_sign_names_the_argument_that_is_wrong(
    checkpoint: CheckpointSimulator, options: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError, match=place):
        checkpoint.sign(**options)


def test_progress_ends_with_all_bytes_done(checkpoint: CheckpointSimulator) -> None:
    total = sum(map(len, checkpoint.snapshot().values()))
    for use in (checkpoint.load, checkpoint.verify, checkpoint.sign):
        told: list[tuple[str, int, int]] = []
        use(progress=lambda phase, done, of, told=told: told.append((phase, done, of)))
        assert told[-1][1:] == (total, total)
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


# ---------------------------------------------------------------- nobody else's errors

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(st.binary(max_size=200) | st.binary(max_size=20).map(lambda b: b'{"payload": "' + b + b'"}'))
@FUZZ
def test_any_bytes_as_a_manifest_are_refused(checkpoint: CheckpointSimulator, envelope: bytes) -> None:
    for use in (checkpoint.load, checkpoint.verify):
        with pytest.raises((ManifestError, SignatureError)):
            use(manifest=envelope)


@given(st.data())
@FUZZ
def test_any_signed_bytes_are_loaded_or_refused(checkpoint: CheckpointSimulator, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([QUANTIZED, NESTED, CONFIG, README, TOKENIZER]))
    content = bytearray(checkpoint.path(name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    original = checkpoint.path(name).read_bytes()
    checkpoint.bless(name, bytes(content), table=True)
    try:
        # A flipped payload is loaded, as its digest was signed; anything else that is raised fails the test.
        with contextlib.suppress(SafeloadError):
            assert set(checkpoint.load()) == {PLAIN, QUANTIZED, NESTED}
        with contextlib.suppress(SafeloadError):
            assert checkpoint.verify().verdict == "accepted"
        with contextlib.suppress(SafeloadError):
            assert checkpoint.sign()
    finally:
        checkpoint.write(name, original)
        checkpoint.sign()


@given(st.binary(max_size=100))
@FUZZ
def test_any_bytes_in_a_file_are_refused_where_others_were_signed(
    checkpoint: CheckpointSimulator, content: bytes
) -> None:
    original = checkpoint.path(README).read_bytes()
    checkpoint.write(README, content)
    try:
        if content != original:
            for use in (checkpoint.load, checkpoint.verify):
                with pytest.raises((FileSetError, DigestMismatchError)):
                    use()
    finally:
        checkpoint.write(README, original)
