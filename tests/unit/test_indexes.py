"""Claims of `safeload.scanning` about files that belong together: an index and its files agree, both ways."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from safeload import scanning
from safeload.auditing import audit
from safeload.digests import sha256_hex
from safeload.errors import FormatError
from safeload.formats import tensorflow
from safeload.formats.inert import may_be_pickle
from safeload.loading import check, load, verify
from safeload.policy import DEFAULT_POLICY, load_policy
from safeload.publishing import sign
from safeload.report import Report
from safeload.scanning import SiblingsOnDisk, scan
from safeload.trust.keys import SecretKey
from tests import tensorflow_sample as tf


def safetensors(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """A safetensors file of float32 zeros."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in tensors.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(at)


def write_sharded(folder: Path) -> dict[str, Any]:
    """Two shards and their index, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors({"a": (2, 3), "b": (4,)}))
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors({"c": (5,)}))
    index = {
        "metadata": {"total_size": 60},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def found(report: Report) -> dict[str, str]:
    return {Path(finding.file or "").name: finding.code for finding in report.all_findings}


def test_an_index_and_its_shards_are_accepted_together(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    report = scan(tmp_path)
    assert report.verdict == "accepted"
    formats = {Path(file.path).name: file.format for file in report.files}
    assert formats["model.safetensors.index.json"] == "index"
    assert formats["model-00001-of-00002.safetensors"] == "safetensors"


Damage = Callable[[Path, dict[str, Any]], None]


def missing_shard(folder: Path, _: dict[str, Any]) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def tensor_elsewhere(_: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["b"] = "model-00002-of-00002.safetensors"


def tensor_unlisted(_: Path, index: dict[str, Any]) -> None:
    del index["weight_map"]["b"]


def shard_unlisted(folder: Path, _: dict[str, Any]) -> None:
    (folder / "model-00003-of-00003.safetensors").write_bytes(safetensors({"d": (1,)}))


def other_total(_: Path, index: dict[str, Any]) -> None:
    index["metadata"]["total_size"] = 61


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (missing_shard, "index-file-missing"),
        (tensor_elsewhere, "index-disagrees"),
        (tensor_unlisted, "index-disagrees"),
        (shard_unlisted, "index-disagrees"),
        (other_total, "index-disagrees"),
    ],
)
def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path, damage: Damage, code: str) -> None:
    index = write_sharded(tmp_path)
    damage(tmp_path, index)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert found(scan(tmp_path)) == {"model.safetensors.index.json": code}


def test_an_index_alone_is_refused_as_its_files_are_not_known(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    report = scan(tmp_path / "model.safetensors.index.json")
    assert found(report) == {"model.safetensors.index.json": "index-file-missing"}


def test_a_refused_shard_does_not_blame_the_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    assert set(found(scan(tmp_path))) == {shard.name}


def test_a_sharded_checkpoint_is_signed_verified_and_loaded(tmp_path: Path) -> None:
    key = SecretKey.generate()
    write_sharded(tmp_path / "ckpt")
    envelope = sign(tmp_path / "ckpt", keys=[key], model="m", revision="r")
    assert verify(tmp_path / "ckpt", manifest=envelope, trust=key.public).is_accepted
    loaded = load(tmp_path / "ckpt", manifest=envelope, trust=key.public)
    assert loaded["model-00001-of-00002.safetensors"]["a"].shape == (2, 3)
    assert loaded["model-00002-of-00002.safetensors"]["c"].tolist() == [0.0] * 5
    assert "model.safetensors.index.json" not in loaded


def test_a_signature_does_not_make_a_wrong_index_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = SecretKey.generate()
    folder = tmp_path / "ckpt"
    index = write_sharded(folder)
    tensor_elsewhere(folder, index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with monkeypatch.context() as patched:
        patched.setattr("safeload.scanning.check_indexes", lambda files, *_: list(files))
        envelope = sign(folder, keys=[key], model="m", revision="r")
    for use in (load, verify):
        with pytest.raises(FormatError) as caught:
            use(folder, manifest=envelope, trust=key.public)
        assert caught.value.findings[0].code == "index-disagrees"


# ---------------------------------------------------------------- one file, two formats


def both(header_bytes: int, opcodes: str) -> bytes:
    """A safetensors file that begins a pickle as well: BINUNICODE, whose length is part of the header's length.

    Its string takes the first bytes of the header, `{"` included where it is 5 bytes long, and the name of the tensor
    goes on with opcodes.
    """
    assert header_bytes % 256 == ord("X")
    text = f'{{"{opcodes}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'
    return header_bytes.to_bytes(8, "little") + text.ljust(header_bytes).encode() + bytes(4)


@pytest.mark.parametrize(
    ("header_bytes", "opcodes", "code"),
    [
        (0x0558, "h", None),  # BINGET of what was never put: every reader stops
        (0x0558, "cos\\nsystem\\n(S'true'\\ntR.", None),  # JSON has no line feed in a string, and GLOBAL needs two
        (0x01000258, "abc", "ambiguous-format"),  # a string that ends behind what is looked at
    ],
)
def test_a_safetensors_file_that_may_be_a_pickle_as_well_is_refused(
    tmp_path: Path, header_bytes: int, opcodes: str, code: str | None
) -> None:
    (tmp_path / "model.safetensors").write_bytes(both(header_bytes, opcodes))
    (file,) = scan(tmp_path).files
    assert [finding.code for finding in file.findings[:1]] == ([] if code is None else [code])


@pytest.mark.parametrize("name", ["model.layers.0.weight", "rms_norm.weight", ".", "q", "a"])
def test_an_honest_header_of_any_length_is_taken_for_no_pickle(name: str) -> None:
    policy = load_policy(DEFAULT_POLICY)
    entry = f'{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}'.encode()
    doubted = 0
    lengths = range(80, 20_000, 8)
    for length in lengths:
        data = length.to_bytes(8, "little") + entry.ljust(length) + bytes(4)
        doubted += may_be_pickle(data, policy, whole=True)
    # A name that begins with LONG_BINPUT behind a string that begins before it: one length in 256, if that.
    assert doubted <= len(lengths) // 200


def test_a_header_whose_length_reads_as_the_start_of_a_zip_archive_is_refused(tmp_path: Path) -> None:
    """PyTorch and zipfile would go to the end of such a file, which may hold an archive in a tensor's bytes."""
    length = int.from_bytes(b"PK\3\4", "little")
    with (tmp_path / "model").open("wb") as file:
        file.write(length.to_bytes(8, "little") + b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}')
        file.truncate(8 + length + 1)
    assert found(scan(tmp_path)) == {"model": "ambiguous-format"}


def test_a_pickle_that_is_a_tar_archive_as_well_is_refused(tmp_path: Path) -> None:
    text = b" " * (148 - 7) + b"%s" + b" " * 600
    pickled = b"\x80\x02X" + (len(text) + 6).to_bytes(4, "little") + text
    block = bytearray(pickled[:512])
    block[148:156] = b" " * 8
    (tmp_path / "weights").write_bytes(pickled % (b"%06o\0 " % sum(block)) + b".")
    assert found(scan(tmp_path)) == {"weights": "ambiguous-format"}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "last.ckpt"])
def test_what_pytorch_would_open_by_its_name_is_of_pytorch(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(safetensors({"a": (2,)}))
    assert found(scan(tmp_path)) == {name: "name-contradicts-content"}


def test_a_tensor_below_one_that_the_index_lists_is_listed_itself(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(safetensors({"a": (2,), "a/hidden": (3,)}))
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert found(scan(tmp_path)) == {"model.safetensors.index.json": "index-disagrees"}


# ---------------------------------------------------------------- a bundle of TensorFlow


def test_data_files_are_held_against_the_index_that_was_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process swaps the index between the scan of the data, which reads it, and its own."""
    index = tmp_path / "m.index"
    data = tmp_path / "m.data-00000-of-00001"
    two = tf.entry(tf.FLOAT, tf.shape_of(1000), nbytes=4000)
    pair = tf.entry(tf.FLOAT, tf.shape_of(1, 1000), nbytes=4000)
    index.write_bytes(tf.table([(b"", tf.header()), (b"w", two)]))
    other = tf.table([(b"", tf.header()), (b"w", pair)])
    data.write_bytes(bytes(4000))  # the longest file is scanned first
    assert scan(tmp_path, digests=True).is_accepted
    real = vars(scanning)["parse_bundle_data"]

    def swap(*arguments: Any) -> Any:
        parsed = real(*arguments)
        index.write_bytes(other)
        return parsed

    monkeypatch.setattr(scanning, "parse_bundle_data", swap)
    monkeypatch.setattr(scanning, "n_processors", lambda: 1)
    report = scan([data, index], digests=True)
    assert found(report) == {"m.index": "changed-while-read"}


def write_bundles(folder: Path, n_bundles: int, *, n_shards: int) -> None:
    """Bundles of a few shards each, whose files alternate when they are ordered by their lengths."""
    for number in range(n_bundles):
        weights = {
            f"w{number}.{shard}": tf.Tensor(tf.INT8, (1000 * shard + number,), bytes(1000 * shard + number), shard)
            for shard in range(n_shards)
        }
        for name, data in tf.bundle(f"m{number}", weights, n_shards=n_shards).items():
            (folder / name).write_bytes(data)


def count_readings(monkeypatch: pytest.MonkeyPatch, *, n_remembered: int) -> list[bytes]:
    """Take a fresh memory for indexes, which holds so many short ones, and return the list of what is parsed."""
    real = vars(tensorflow)["_bundle"]
    seen: list[bytes] = []

    def bundle(data: bytes, *limits: int) -> Any:
        seen.append(data)
        time.sleep(0.002)  # so that other threads come to ask for the same one
        return real(data, *limits)

    monkeypatch.setattr(tensorflow, "_bundle", bundle)
    monkeypatch.setattr(tensorflow, "MAX_REMEMBERED_ENTRIES", 100 * n_remembered)
    monkeypatch.setattr(tensorflow, "_REMEMBERED", vars(tensorflow)["_Remembered"]())
    return seen


@pytest.mark.parametrize(("digests", "threads"), [(False, 1), (True, 1), (True, 8)])
def test_each_index_is_read_once_however_many_bundles_lie_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digests: bool, threads: int
) -> None:
    write_bundles(tmp_path, 20, n_shards=4)
    # As many as eight threads can be at, at four data files and an index each.
    seen = count_readings(monkeypatch, n_remembered=1 if threads == 1 else 3)
    monkeypatch.setattr(scanning, "n_processors", lambda: threads)
    opened: list[str] = []

    def digest(data: bytes) -> str:
        opened.append(sha256_hex(data))
        return opened[-1]

    monkeypatch.setattr(scanning, "sha256_hex", digest)
    assert scan(tmp_path, digests=digests).is_accepted
    assert len(set(seen)) == len(set(opened)) == 20
    # A thread that the system lets wait may come to its file late; in another order it would be 100 readings.
    assert len(seen) == 20 if threads == 1 else len(seen) <= 20 + threads
    # Its bytes are read once for all data files, unless several threads come to them at the same time.
    assert len(opened) == 20 or threads > 1


def test_an_audit_reads_each_index_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bundles(tmp_path, 20, n_shards=4)
    seen = count_readings(monkeypatch, n_remembered=1)
    opened: list[str] = []

    def digest(data: bytes) -> str:
        opened.append(sha256_hex(data))
        return opened[-1]

    monkeypatch.setattr(scanning, "sha256_hex", digest)
    assert audit([tmp_path], jobs=1).report.is_accepted
    assert len(seen) == len(set(seen)) == 20
    # Nor are its bytes read for each of up to 99,999 data files, which may be empty: that would be an hour's work.
    assert len(opened) == len(set(opened)) == 20


def two_shards(dtype: int, shape: tuple[int, ...], *names: str) -> dict[str, bytes]:
    """A bundle `m` of two shards, with a tensor of 8 bytes in each."""
    return tf.bundle("m", {name: tf.Tensor(dtype, shape, bytes(8), n) for n, name in enumerate(names)}, n_shards=2)


@pytest.mark.parametrize("digests", [False, True])
def test_the_index_of_one_folder_is_not_that_of_another_whatever_links_call_them(tmp_path: Path, digests: bool) -> None:
    (tmp_path / "links").mkdir()
    for shard, (folder, files) in enumerate(
        {"one": two_shards(tf.FLOAT, (2,), "a", "b"), "two": two_shards(tf.INT8, (8,), "c", "d")}.items()
    ):
        (tmp_path / folder).mkdir()
        for name, data in files.items():
            (tmp_path / folder / name).write_bytes(data)
        name = f"m.data-{shard:05d}-of-00002"
        (tmp_path / "links" / name).symlink_to(tmp_path / folder / name)
    report = scan(sorted((tmp_path / "links").iterdir()), digests=digests)
    held = [[(spec.name, spec.dtype.name) for spec in file.tensors] for file in report.files]
    assert held == [[("a", "float32")], [("d", "int8")]]


def test_an_index_finds_its_files_however_many_folders_lie_between_them(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / str(number)).mkdir()
        for name, data in two_shards(tf.FLOAT, (2,), "a", "b").items():
            (tmp_path / str(number) / name).write_bytes(data)
    # As a shell has them for `*/*.index */*.data-*`; no more than eight folders are held open.
    assert scan([*sorted(tmp_path.glob("*/*.index")), *sorted(tmp_path.glob("*/*.data-*"))]).is_accepted


@pytest.mark.parametrize("whole", [True, False])
def test_data_files_that_were_read_by_different_bytes_of_an_index_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    # The same names in the same files, so that nothing else tells the two apart.
    first, second = two_shards(tf.FLOAT, (2,), "a", "b"), two_shards(tf.INT8, (8,), "a", "b")
    for name, data in first.items():
        (tmp_path / name).write_bytes(data)
    real = SiblingsOnDisk.read
    n_read = 0

    def read(self: SiblingsOnDisk, name: str, limit: int) -> bytes | None:
        nonlocal n_read
        data = real(self, name, limit)
        n_read += 1
        vars(self)["_last"].clear()  # as the index of another bundle does in between
        (tmp_path / "m.index").write_bytes(second["m.index"])
        return data

    monkeypatch.setattr(SiblingsOnDisk, "read", read)
    monkeypatch.setattr(scanning, "n_processors", lambda: 1)
    report = audit([tmp_path], jobs=1).report if whole else scan(tmp_path)
    assert n_read == 2
    assert found(report) == {"m.index": "changed-while-read"}


# ---------------------------------------------------------------- against a manifest


def signed_shards(folder: Path) -> dict[str, Any]:
    key = SecretKey.generate()
    write_sharded(folder)
    return {"manifest": sign(folder, keys=[key], model="m", revision="r"), "trust": key.public}


def test_swapped_shards_are_named_and_no_rules_are_blamed(tmp_path: Path) -> None:
    write_sharded(tmp_path / "c")
    one, two = (tmp_path / f"c/model-0000{n}-of-00002.safetensors" for n in (1, 2))
    # The lengths are to be equal, or only those are told.
    two.write_bytes(safetensors({"c": (2, 3), "d": (4,)}))
    index = json.loads((tmp_path / "c/model.safetensors.index.json").read_text())
    index["weight_map"]["d"] = two.name
    index["metadata"]["total_size"] = 80
    (tmp_path / "c/model.safetensors.index.json").write_text(json.dumps(index))
    key = SecretKey.generate()
    options: dict[str, Any] = {
        "manifest": sign(tmp_path / "c", keys=[key], model="m", revision="r"),
        "trust": key.public,
    }
    first, second = one.read_bytes(), two.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    two.write_bytes(first)
    findings = check(tmp_path / "c", **options).all_findings
    assert [finding.code for finding in findings] == ["digest-mismatch"] * 2
    assert [other in (f.hint or "") for f, other in zip(findings, (two.name, one.name), strict=True)] == [True, True]


def test_what_was_signed_by_other_rules_is_still_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = signed_shards(tmp_path / "c")
    monkeypatch.setattr(scanning, "_facts", lambda _spec: ())
    codes = {finding.code for finding in check(tmp_path / "c", **options).all_findings}
    assert codes == {"manifest-disagrees"}


def test_a_shard_of_another_length_or_none_does_not_blame_the_index(tmp_path: Path) -> None:
    options = signed_shards(tmp_path / "c")
    shard = tmp_path / "c/model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    assert [f.code for f in check(tmp_path / "c", **options).all_findings] == ["size-mismatch"]
    shard.unlink()
    assert [f.code for f in check(tmp_path / "c", **options).all_findings] == ["missing-file"]
