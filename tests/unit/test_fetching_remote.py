"""Scan by range requests: the table of a file comes without its payload, and says what a scan of the file would say."""

import json
import pickle
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from safeload.errors import ConfigError, FetchError, LimitError
from safeload.fetching.remote import RangeSource, Traffic, scan_remote
from safeload.fetching.sources import Access, RemoteSize, open_source
from safeload.policy import load_policy
from safeload.scanning import peek_limit, scan
from tests.range_server import HOST, RangeServer, serving

LOOPBACK = Access(allow_private=frozenset({HOST}))
HOSTILE = b"cos\nsystem\n(S'true'\ntR."
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving() as state:
        yield state


def write_big_pickle(path: Path, nbytes: int) -> None:
    """Write a pickle of one int8 array of 3 rows as a sparse file: only its opcodes take room on disk."""
    small = pickle.dumps({"w": np.zeros((3, 5), np.int8)}, protocol=3)
    head, tail = small.split(b"C\x0f" + bytes(15))
    shape = b"K\x03K\x05\x86"
    assert head.count(shape) == 1
    columns = nbytes // 3
    head = head.replace(shape, b"K\x03J" + struct.pack("<i", columns) + b"\x86")
    with path.open("wb") as file:
        file.write(head + b"B" + struct.pack("<I", 3 * columns))
        file.seek(3 * columns, 1)
        file.write(tail)


def test_a_pickle_of_3_gb_is_scanned_in_kilobytes(tmp_path: Path, server: RangeServer) -> None:
    write_big_pickle(tmp_path / "big", 3_000_000_000)
    server.files["/big"] = tmp_path / "big"
    report = scan_remote(f"{server.url}/big", access=LOOPBACK)
    (file,) = report.files
    (tensor,) = file.tensors
    assert report.is_accepted
    assert (file.size, file.format) == ((tmp_path / "big").stat().st_size, "pickle")
    assert (tensor.name, tensor.shape, tensor.dtype.name) == ("w", (3, 1_000_000_000), "int8")
    assert server.nbytes < 200_000
    facts = report.facts["remote"]
    assert facts["digests_checked"] is False
    assert facts["bytes_read"] == server.nbytes
    assert facts["requests"] == len(server.paths("GET"))
    assert facts["bytes_in_all"] == file.size


def test_a_remote_scan_says_what_a_local_one_says(tmp_path: Path, server: RangeServer) -> None:
    contents = {
        "one": pickle.dumps({"w": np.arange(100_000, dtype=np.float32), "b": [np.ones(70_000, np.int8)] * 3}),
        "hostile": HOSTILE,
        "cut": pickle.dumps(np.arange(100_000))[:-50],
        "config.json": b'{"a": 1}',
        "junk": bytes(range(256)) * 1000,
        "empty": b"",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
        server.files[f"/{name}"] = data
    here = {Path(file.path).name: file for file in scan(tmp_path).files}
    there = {
        file.path.rpartition("/")[2]: file
        for file in scan_remote([f"{server.url}/{name}" for name in contents], access=LOOPBACK).files
    }
    assert there.keys() == here.keys() == contents.keys()
    for name, file in there.items():
        local = here[name]
        assert (file.verdict, file.format, file.size) == (local.verdict, local.format, local.size)
        assert (file.tensors, file.globals, file.error) == (local.tensors, local.globals, local.error)
        assert [(f.code, f.message, f.offset) for f in file.findings] == [
            (f.code, f.message, f.offset) for f in local.findings
        ]
    assert [file.verdict for file in there.values()].count("accepted") == 2


def write_containers(folder: Path) -> None:
    """Write tensors of some megabytes in containers whose tables lie at the start and at the end."""
    array = np.arange(500_000, dtype=np.float32)
    np.save(folder / "a.npy", array)
    np.savez(folder / "a.npz", w=np.zeros(18_000_000, np.int8), v=array)
    header = json.dumps({"w": {"dtype": "F32", "shape": [500_000], "data_offsets": [0, 2_000_000]}}).encode().ljust(72)
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + array.tobytes())


def test_containers_are_scanned_by_their_tables(tmp_path: Path, server: RangeServer) -> None:
    write_containers(tmp_path)
    for path in tmp_path.iterdir():
        server.files[f"/{path.name}"] = path
    here = {Path(file.path).name: file for file in scan(tmp_path).files}
    there = scan_remote([server.url + name for name in server.files], access=LOOPBACK)
    for file in there.files:
        local = here.pop(file.path.rpartition("/")[2])
        assert (file.verdict, file.format, file.tensors) == (local.verdict, local.format, local.tensors)
        assert file.format in file.path
    assert here == {}
    assert server.nbytes < 200_000


def test_a_server_without_ranges_is_refused_and_not_downloaded(tmp_path: Path, server: RangeServer) -> None:
    write_big_pickle(tmp_path / "big", 300_000_000)
    server.files["/big"] = tmp_path / "big"
    server.ranges = False
    with pytest.raises(FetchError, match="sends the whole file") as caught:
        scan_remote(f"{server.url}/big", access=LOOPBACK)
    assert "fetch it first" in str(caught.value.hint)
    # What a server pushes into the sockets' buffers before it sees us go.
    assert server.nbytes < 50_000_000


def test_a_file_that_changes_while_it_is_read_is_refused(server: RangeServer) -> None:
    first = pickle.dumps({"w": np.zeros(500_000, np.int8)})
    server.files["/f"] = first
    server.etag = '"one"'

    def change(_: str) -> None:
        if len(server.requests) == 3:
            server.etag = '"two"'

    server.before = change
    with pytest.raises(FetchError, match="sends the whole file"):
        scan_remote(f"{server.url}/f", access=LOOPBACK)


def test_a_range_is_asked_for_again_after_a_failure(server: RangeServer) -> None:
    server.files["/f"] = bytes(100)
    server.fail_first = 2
    pauses: list[float] = []
    traffic = Traffic()
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "f", RemoteSize(100), traffic=traffic, sleep=pauses.append)
        assert ranges.read(0, 100) == bytes(100)
    assert pauses == [0.5, 1.5]
    assert (traffic.requests, traffic.nbytes) == (3, 100)


def test_a_server_that_keeps_failing_ends_the_scan(server: RangeServer) -> None:
    server.files["/f"] = bytes(100)
    server.fail_first = 100
    pauses: list[float] = []
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "f", RemoteSize(100), sleep=pauses.append)
        with pytest.raises(FetchError, match="503"):
            ranges.read(0, 100)
    assert len(pauses) == 3


def test_tables_are_bounded_by_the_policy(server: RangeServer) -> None:
    server.files["/f"] = bytes(100_000)
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "f", RemoteSize(100_000), peek_limit=1000)
        assert len(ranges.peek(500, 600)) == 600
        assert len(ranges.peek(99_900, 600)) == 100
        with pytest.raises(LimitError) as caught:
            ranges.peek(500, 301)
        assert len(ranges.read(500, 5000)) == 5000
    assert caught.value.findings[0].code == "too-much-inline"


def test_a_file_elsewhere_is_held_to_the_limit_of_tables_of_one_here(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = load_policy("numpy-quantized")
    rules = usual.model_copy(update={"limits": usual.limits.model_copy(update={"max_inline_bytes": 6000})})
    most = peek_limit(rules)

    def peeks(source: RangeSource, *_: object) -> None:
        for _again in range(2):  # the same again costs nothing
            assert len(source.peek(0, most)) == most
        source.peek(0, 1)

    monkeypatch.setattr("safeload.fetching.remote.parse", peeks)
    server.files["/f"] = bytes(most + 1)
    (file,) = scan_remote(f"{server.url}/f", policy=rules, access=LOOPBACK).files
    (finding,) = file.findings
    assert finding.code == "too-much-inline"
    assert f"at most {most:,} bytes" in finding.message


def test_the_page_of_a_folder_is_told_from_a_file(server: RangeServer) -> None:
    server.files["/folder/"] = b"<!DOCTYPE html>\n<a href=model.safetensors>"
    (file,) = scan_remote(f"{server.url}/folder/", access=LOOPBACK).files
    (finding,) = file.findings
    assert finding.code == "format-not-supported"
    assert finding.hint is not None
    assert "safeload fetch URL DIR -m MANIFEST" in finding.hint


def test_a_url_where_nothing_is_is_to_be_checked(server: RangeServer) -> None:
    with pytest.raises(FetchError, match="found 404") as caught:
        scan_remote(f"{server.url}/absent", access=LOOPBACK)
    assert caught.value.hint == "check the URL: nothing is there"


def test_an_interrupt_ends_it_at_the_next_request(server: RangeServer) -> None:
    for index in range(8):
        server.files[f"/{index}"] = bytes(100)

    def interrupt(_phase: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    server.before = lambda _: time.sleep(0.05)
    urls = [f"{server.url}/{index}" for index in range(8)]
    with pytest.raises(KeyboardInterrupt):
        scan_remote(urls, access=LOOPBACK, connections=1, progress=interrupt)
    assert len(server.paths("GET")) < 8


def test_a_range_that_is_refused_for_good_is_asked_for_once(server: RangeServer) -> None:
    pauses: list[float] = []
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "gone", RemoteSize(100), sleep=pauses.append)
        with pytest.raises(FetchError, match="404"):
            ranges.read(0, 100)
    assert (len(server.requests), pauses) == (1, [])


def test_a_file_that_is_not_there_is_asked_for_once(server: RangeServer) -> None:
    with pytest.raises(FetchError, match="404"):
        scan_remote(f"{server.url}/nothing", access=LOOPBACK)
    assert len(server.requests) == 1


def test_a_file_that_takes_too_many_bytes_is_refused(server: RangeServer) -> None:
    server.files["/f"] = bytes(100_000)
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "f", RemoteSize(100_000), max_bytes=10_000)
        assert len(ranges.read(0, 8000)) == 8000
        with pytest.raises(LimitError) as caught:
            ranges.read(8000, 8000)
    assert caught.value.findings[0].code == "too-much-to-read"
    assert server.nbytes <= 10_000


def test_a_table_without_end_is_refused_within_the_limit(server: RangeServer) -> None:
    # A pickle of a million opcodes and no payload.
    server.files["/f"] = b"\x80\x02" + b"N0" * 500_000 + b"N."
    report = scan_remote(f"{server.url}/f", access=LOOPBACK, max_bytes_a_file=300_000)
    assert [finding.code for finding in report.all_findings] == ["too-much-to-read"]
    assert report.files[0].error is LimitError
    assert server.nbytes <= 300_000


def test_reads_next_to_each_other_are_one_request(server: RangeServer) -> None:
    server.files["/f"] = bytes(range(256)) * 40
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "f", RemoteSize(10240))
        assert ranges.read(0, 8) == bytes(range(8))
        assert ranges.read(8, 100) == bytes(range(8, 108))
        assert ranges.peek(10240 - 4, 4) == bytes(range(252, 256))
        assert ranges.peek(10240 - 200, 100) == bytes(range(56, 156))
        assert ranges.read(10239, 50) == b"\xff"
        assert ranges.read(10240, 50) == b""
        # As much as is worth having, and not what is there already.
        assert ranges.read(8000, 4) == bytes(range(64, 68))
    asked = [headers["range"] for _, _, headers in server.requests]
    assert asked == ["bytes=0-2047", "bytes=8192-10239", "bytes=8000-8191"]


def test_what_was_read_is_not_asked_for_again_where_windows_overlap(server: RangeServer) -> None:
    data = np.random.default_rng(1).bytes(200_000)
    server.files["/f"] = data
    with open_source(server.url, LOOPBACK) as source:
        ranges = RangeSource(source, "f", RemoteSize(len(data)))
        assert ranges.read(0, 65536) == data[:65536]
        assert ranges.read(60000, 65536) == data[60000:125536]
        assert ranges.read(0, 200_000) == data
    assert server.nbytes == len(data)


def serve_hub(server: RangeServer, files: dict[str, bytes], revision: str = "main") -> None:
    server.pages[f"/api/models/org/name/revision/{revision}"] = ({"sha": COMMIT}, None)
    tree = [{"type": "directory", "path": "sub", "oid": "0" * 40, "size": 0}]
    tree += [{"type": "file", "path": path, "oid": "0" * 40, "size": len(data)} for path, data in files.items()]
    server.pages[f"/api/models/org/name/tree/{COMMIT}?recursive=true"] = (tree, None)
    for path, data in files.items():
        server.files[f"/org/name/resolve/{COMMIT}/{path}"] = data


def test_a_hub_repository_is_scanned_whole_at_one_commit(server: RangeServer) -> None:
    good = pickle.dumps({"w": np.zeros(300_000, np.int8)})
    serve_hub(server, {"sub/one": good, "hostile": HOSTILE, "config.json": b"{}"})
    access = Access(endpoint=server.url, allow_private=frozenset({HOST}))
    report = scan_remote("hf://org/name", access=access)
    assert {file.path: file.verdict for file in report.files} == {
        "hf://org/name@main/config.json": "accepted",
        "hf://org/name@main/hostile": "rejected",
        "hf://org/name@main/sub/one": "accepted",
    }
    assert report.facts["remote"]["sources"] == [
        {"source": "hf://org/name@main", "endpoint": f"{server.url}/", "commit": COMMIT}
    ]
    assert all(COMMIT in path for path in server.paths() if "/resolve/" in path)


def test_an_index_is_held_against_the_files_beside_it(server: RangeServer) -> None:
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    header = json.dumps({"v": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}).encode().ljust(64)
    shard = struct.pack("<Q", len(header)) + header + bytes(8)
    files = {"model.safetensors.index.json": json.dumps(index).encode(), "model-00001-of-00001.safetensors": shard}
    serve_hub(server, files)
    access = Access(endpoint=server.url, allow_private=frozenset({HOST}))
    report = scan_remote("hf://org/name", access=access)
    codes = {finding.code for finding in report.all_findings}
    assert "index-disagrees" in codes or "index-file-missing" in codes


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "a\\b", "a//b", "x\x1b[2J"])
def test_a_name_that_is_no_path_is_a_finding_and_never_asked_for(server: RangeServer, path: str) -> None:
    serve_hub(server, {path: b"x", "config.json": b"{}"})
    access = Access(endpoint=server.url, allow_private=frozenset({HOST}))
    report = scan_remote("hf://org/name", access=access)
    assert [finding.code for finding in report.all_findings] == ["bad-path"]
    assert [path for path in server.paths() if "/resolve/" in path] == [f"/org/name/resolve/{COMMIT}/config.json"] * 1


def test_an_empty_repository_is_not_accepted(server: RangeServer) -> None:
    serve_hub(server, {})
    access = Access(endpoint=server.url, allow_private=frozenset({HOST}))
    report = scan_remote("hf://org/name", access=access)
    assert [finding.code for finding in report.all_findings] == ["nothing-to-scan"]


def test_a_private_address_needs_to_be_named(server: RangeServer) -> None:
    server.files["/f"] = b"N."
    with pytest.raises(FetchError):
        scan_remote(f"{server.url}/f")
    assert server.requests == []


def test_a_token_is_not_sent_to_several_hosts(server: RangeServer) -> None:
    there = f"{server.url}/f"
    access = Access(token="hf_abc", token_origin=there, allow_private=frozenset({HOST, "localhost"}))  # noqa: S106
    server.files["/f"] = pickle.dumps(np.zeros(3))
    scan_remote([there, there.replace(HOST, "localhost")], access=access)
    sent = {(headers["host"].partition(":")[0], headers.get("authorization")) for _, _, headers in server.requests}
    assert sent == {(HOST, "Bearer hf_abc"), ("localhost", None)}


def test_an_unknown_policy_is_told_before_anything_is_asked(server: RangeServer) -> None:
    with pytest.raises(ConfigError):
        scan_remote(f"{server.url}/f", policy="no-such-policy", access=LOOPBACK)
    assert server.requests == []
