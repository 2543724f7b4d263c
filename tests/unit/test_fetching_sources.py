"""Where bytes come from: what names a source, what a source is believed, and what leaves for which server."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from safeload.errors import ConfigError, FetchError, StagingError
from safeload.fetching import sources
from safeload.fetching.http import Client
from safeload.fetching.remote import scan_remote
from safeload.fetching.sources import (
    Access,
    DirectorySource,
    FsspecSource,
    HttpSource,
    HubSource,
    is_remote,
    open_source,
    quoted,
    read_token,
)
from tests.nginx_server import NGINX, NO_NGINX, running
from tests.range_server import HOST, RangeServer, serving

LOOPBACK = Access(allow_private=frozenset({HOST}))
TOKEN = "hf_abc"  # noqa: S105 - of nobody
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving() as state:
        yield state


def hub(server: RangeServer, token: str | None = None) -> Access:
    return Access(endpoint=server.url, token=token, allow_private=frozenset({HOST}))


# --- what names a source ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        ("https://host/folder", True),
        ("hf://org/name", True),
        ("s3://bucket/folder", True),
        ("folder", False),
        ("./https:/host", False),
        ("/a/b", False),
        ("C://x", False),
    ],
)
def test_a_url_is_told_from_a_path(text: str, remote: bool) -> None:
    assert is_remote(text) is remote


@pytest.mark.parametrize(
    "text",
    [
        "https://user:secret@host/folder",
        "https://secret@host/folder",
        "https://host/a b",
        "https://host/\u0435",
        "https:///folder",
        "https://",
        "http://host\\@other/",
    ],
)
def test_a_url_that_cannot_be_shown_or_asked_for_as_it_is_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught, open_source(text):
        pass
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["hf://name", "hf://org/name@", "hf://org/name/file", "hf://org/na..me", "hf://org/name@a/../b", "hf://o/n@-x"],
)
def test_a_hub_url_has_one_form(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected hf://org/name"), open_source(text):
        pass


@pytest.mark.parametrize(
    ("text", "kind"), [("hf://org/name@v1", HubSource), ("https://host/folder/", HttpSource), (".", DirectorySource)]
)
def test_each_text_opens_its_source(text: str, kind: type) -> None:
    with open_source(text) as source:
        assert type(source) is kind
        assert source.name == text


def test_a_directory_that_is_not_there_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(StagingError), open_source(str(tmp_path / "nothing")):
        pass


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("a/b-1.x_y~z", "a/b-1.x_y~z"),
        ("a b?c#d", "a%20b%3Fc%23d"),
        ("100%", "100%25"),
        ("é", "%C3%A9"),
        ("a:b@c", "a%3Ab%40c"),
    ],
)
def test_a_path_stands_in_a_url_as_itself(path: str, url: str) -> None:
    assert quoted(path) == url


def test_a_url_with_a_query_names_one_file_and_shows_no_signature() -> None:
    with open_source("https://host/file?X-Signature=secret") as source:
        assert isinstance(source, HttpSource)
        assert source.locate("") == "https://host/file?X-Signature=secret"
        assert "secret" not in source.name
        with pytest.raises(ConfigError, match="folder") as caught:
            source.locate("other")
        assert "secret" not in str(caught.value)


def test_a_web_server_has_no_listing() -> None:
    with open_source("https://host/folder") as source, pytest.raises(ConfigError, match="no list of its files"):
        source.files()


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_is_read_without_the_end_of_its_line(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(f"{TOKEN}\r\n".encode())
    assert read_token(tmp_path / "token") == TOKEN


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"hf_secret two", b"hf_secret\nmore", b"hf_secret" * 1000, b"\xffhf_secret"]
)
def test_what_is_no_token_is_refused_and_never_shown(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "token").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_token(tmp_path / "token")
    assert "secret" not in str(caught.value)


def test_a_token_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the token"):
        read_token(tmp_path)


def test_a_token_goes_to_the_endpoint_and_not_where_that_redirects_to(server: RangeServer) -> None:
    with serving() as storage:
        storage.files["/blob"] = b"x" * 10
        serve_hub(server, {"f": b"x" * 10})
        server.redirects[f"/org/name/resolve/{COMMIT}/f"] = f"{storage.url}/blob"
        with open_source("hf://org/name", hub(server, token=TOKEN)) as source:
            source.files()
            assert b"".join(source.read("f", 0, 10, 10)) == b"x" * 10
        assert {headers.get("authorization") for _, _, headers in server.requests} == {f"Bearer {TOKEN}"}
        assert [headers.get("authorization") for _, _, headers in storage.requests] == [None]


def test_a_token_is_not_shown() -> None:
    assert TOKEN not in repr(Access(token=TOKEN))


def test_no_token_is_taken_from_the_environment(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "HF_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    serve_hub(server, {"f": b"x"})
    with open_source("hf://org/name", hub(server)) as source:
        assert len(source.files()) == 1
    assert all("authorization" not in headers for _, _, headers in server.requests)


# --- a hub ------------------------------------------------------------------------------------------------------------


def serve_hub(server: RangeServer, files: dict[str, bytes]) -> None:
    server.pages["/api/models/org/name/revision/main"] = ({"sha": COMMIT}, None)
    tree = [{"type": "file", "path": path, "size": len(data)} for path, data in files.items()]
    server.pages[f"/api/models/org/name/tree/{COMMIT}?recursive=true"] = (tree, None)
    for path, data in files.items():
        server.files[f"/org/name/resolve/{COMMIT}/{path}"] = data


def test_a_listing_of_several_pages_is_read_whole(server: RangeServer) -> None:
    serve_hub(server, {})
    first = f"/api/models/org/name/tree/{COMMIT}?recursive=true"
    second = f"{first}&cursor=2"
    server.pages[first] = ([{"type": "file", "path": "b", "size": 2}], f'<{server.url}{second}>; rel="next"')
    server.pages[second] = ([{"type": "directory", "path": "d"}, {"type": "file", "path": "a", "size": 1}], None)
    with open_source("hf://org/name", hub(server)) as source:
        assert [(file.path, file.size, file.finding) for file in source.files()] == [("a", 1, None), ("b", 2, None)]


def test_a_listing_that_goes_on_elsewhere_is_refused(server: RangeServer) -> None:
    serve_hub(server, {})
    with serving() as other:
        page = f"/api/models/org/name/tree/{COMMIT}?recursive=true"
        server.pages[page] = ([], f'<{other.url}{page}>; rel="next"')
        with open_source("hf://org/name", hub(server)) as source, pytest.raises(FetchError, match="same place"):
            source.files()
        assert other.requests == []


def test_a_listing_without_end_is_refused(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PAGES", 3)
    serve_hub(server, {})
    page = f"/api/models/org/name/tree/{COMMIT}?recursive=true"
    server.pages[page] = ([], f'<{server.url}{page}>; rel="next"')
    with open_source("hf://org/name", hub(server)) as source, pytest.raises(FetchError, match="at most"):
        source.files()
    assert len(server.paths()) == 4


def test_a_listing_of_too_many_files_is_refused(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILES", 2)
    serve_hub(server, {"a": b"", "b": b"", "c": b""})
    with open_source("hf://org/name", hub(server)) as source, pytest.raises(FetchError, match="at most 2 files"):
        source.files()


@pytest.mark.parametrize(
    "page",
    [
        b"<html>",
        b"[" * 100_000,
        {"error": "x"},
        ["x"],
        [{"type": "file", "path": 1, "size": 1}],
        [{"type": "file", "path": "a", "size": -1}],
        [{"type": "file", "path": "a", "size": True}],
        [{"type": "file", "path": "a", "size": 1.5}],
        [{"type": "file", "path": "a", "size": 10**30}],
        [{"type": "file", "path": "a"}],
        [{"type": "link", "path": "a", "size": 1}],
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(server: RangeServer, page: Any) -> None:
    serve_hub(server, {})
    server.pages[f"/api/models/org/name/tree/{COMMIT}?recursive=true"] = (page, None)
    with open_source("hf://org/name", hub(server)) as source, pytest.raises(FetchError, match="found something else"):
        source.files()


@pytest.mark.parametrize("sha", [None, "main", "../../x", COMMIT.upper(), COMMIT + "0", 7])
def test_a_commit_that_is_none_is_refused(server: RangeServer, sha: object) -> None:
    server.pages["/api/models/org/name/revision/main"] = ({"sha": sha}, None)
    with open_source("hf://org/name", hub(server)) as source, pytest.raises(FetchError, match="expected a commit"):
        source.files()
    assert len(server.requests) == 1


def test_a_listing_longer_than_allowed_is_refused(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_PAGE_BYTES", 1000)
    serve_hub(server, {f"file-{index}": b"" for index in range(100)})
    with open_source("hf://org/name", hub(server)) as source, pytest.raises(FetchError, match="at most 1000 bytes"):
        source.files()


def test_names_that_cannot_be_used_have_a_finding(server: RangeServer) -> None:
    serve_hub(server, {"model.bin": b"1", "Model.bin": b"2", "../x": b"3", "ok": b"4"})
    with open_source("hf://org/name", hub(server)) as source:
        found = {file.path: file.finding.code if file.finding else None for file in source.files()}
    assert found == {"../x": "bad-path", "Model.bin": None, "model.bin": "duplicate-path", "ok": None}


def test_a_revision_with_a_slash_is_one_component(server: RangeServer) -> None:
    with open_source("hf://org/name@refs/pr/1", hub(server)) as source:
        assert isinstance(source, HubSource)
        assert source.locate("a b") == f"{server.url}/org/name/resolve/refs%2Fpr%2F1/a%20b"


# --- a directory ------------------------------------------------------------------------------------------------------


def test_a_directory_gives_ranges_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    data = os.urandom(1000)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_bytes(data)
    with open_source(str(tmp_path)) as source:
        assert b"".join(source.read("sub/f", 7, 555, 1000)) == data[7:555]
        assert max(map(len, source.read("sub/f", 0, 1000, 1000))) == 100
        assert source.stat("sub/f").size == 1000
        assert [(file.path, file.size) for file in source.files()] == [("sub/f", 1000)]


def test_a_directory_with_another_version_of_a_file_is_no_mirror(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(11))
    with (
        open_source(str(tmp_path)) as source,
        pytest.raises(FetchError, match="expected 10 bytes in f, found 11") as caught,
    ):
        list(source.read("f", 0, 10, 10))
    assert caught.value.lasting


def test_a_file_that_is_not_there_is_not_waited_for(tmp_path: Path, memory: str) -> None:
    for text in (str(tmp_path), memory):
        with open_source(text) as source:
            with pytest.raises(FetchError) as caught:
                list(source.read("absent", 0, 1, 1))
            assert caught.value.lasting
            with pytest.raises(FetchError) as caught:
                source.stat("absent")
            assert caught.value.lasting


def test_what_cannot_be_read_now_may_be_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> int:
        raise OSError(5, "Input/output error")

    (tmp_path / "f").write_bytes(bytes(10))
    monkeypatch.setattr(sources, "read_into", fails)
    with (
        open_source(str(tmp_path)) as source,
        pytest.raises(FetchError, match="Input/output error") as caught,
    ):
        list(source.read("f", 0, 10, 10))
    assert not caught.value.lasting


def test_a_link_in_a_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "f").symlink_to(tmp_path / "secret")
    with open_source(str(tmp_path / "mirror")) as source:
        with pytest.raises(FetchError, match="symbolic link"):
            list(source.read("f", 0, 6, 6))
        with pytest.raises(FetchError, match="symbolic link"):
            source.stat("f")
        assert [file.finding.code for file in source.files() if file.finding] == ["symlink"]
        with pytest.raises(FetchError):
            source.stat("../secret")


# --- fsspec -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[str]:
    fsspec = pytest.importorskip("fsspec", reason="the extra `fsspec` is not installed")
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/sub/f", bytes(range(256)))
    system.pipe("/bucket/config.json", b"{}")
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


def test_an_object_store_gives_ranges_and_a_listing(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FSSPEC_RANGE_BYTES", 10)
    with open_source(memory) as source:
        assert isinstance(source, FsspecSource)
        assert b"".join(source.read("sub/f", 3, 200, 256)) == bytes(range(3, 200))
        assert source.stat("sub/f").size == 256
        assert [(file.path, file.size) for file in source.files()] == [("config.json", 2), ("sub/f", 256)]


def test_an_object_store_is_scanned(memory: str) -> None:
    report = scan_remote([f"{memory}/config.json", f"{memory}/sub"])
    assert {file.path: file.verdict for file in report.files} == {
        "memory://bucket/config.json": "accepted",
        "memory://bucket/sub/f": "rejected",
    }


def test_an_object_that_is_shorter_or_missing_is_an_error_of_the_source(memory: str) -> None:
    with open_source(memory) as source:
        with pytest.raises(FetchError, match="another number"):
            list(source.read("sub/f", 0, 300, 300))
        with pytest.raises(FetchError, match="cannot read nothing"):
            list(source.read("nothing", 0, 1, 1))
        with pytest.raises(FetchError):
            source.stat("nothing")


@pytest.mark.parametrize(
    "url", ["simplecache::memory://bucket", "memory://bucket::file:///etc", "memory://user@bucket", "memory://a?b"]
)
def test_one_driver_without_credentials(memory: str, url: str) -> None:
    del memory
    with pytest.raises(ConfigError, match="expected a URL such as"), open_source(url):
        pass


def test_a_driver_that_is_not_there_says_what_to_install(memory: str) -> None:
    del memory
    with pytest.raises(ConfigError, match="install the driver"), open_source("nosuchdriver://bucket/x"):
        pass


def test_without_fsspec_its_urls_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match="needs the package fsspec"), open_source("s3://bucket/x"):
        pass


# --- a server that others wrote ---------------------------------------------------------------------------------------


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[str]:
    if NGINX is None:
        pytest.skip(NO_NGINX)
    with running(tmp_path) as url:
        yield url


def test_nginx_gives_ranges(nginx: str, tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    (tmp_path / "www" / "a b").write_bytes(data)
    with open_source(nginx, LOOPBACK) as source:
        stat = source.stat("a b")
        assert stat.size == len(data)
        assert stat.etag is not None
        assert b"".join(source.read("a b", 1000, 999_000, len(data), etag=stat.etag)) == data[1000:999_000]
        assert b"".join(source.read("a b", 0, len(data), len(data))) == data
        with pytest.raises(FetchError):
            list(source.read("a b", 0, 10, len(data) - 1))
        with pytest.raises(FetchError, match="404"):
            source.stat("other")


def test_nginx_that_was_told_to_give_no_ranges_is_noticed(nginx: str, tmp_path: Path) -> None:
    (tmp_path / "www" / "f").write_bytes(bytes(100_000))
    with pytest.raises(FetchError, match="sends the whole file"):
        scan_remote(f"{nginx}/whole/f", access=LOOPBACK)
    assert scan_remote(f"{nginx}/f", access=LOOPBACK).files[0].size == 100_000


def test_nginx_with_a_limit_of_rate_is_waited_for(nginx: str, tmp_path: Path) -> None:
    (tmp_path / "www" / "f").write_bytes(bytes(300_000))
    started = time.monotonic()
    with open_source(f"{nginx}/slow", LOOPBACK) as source:
        assert b"".join(source.read("f", 0, 300_000, 300_000)) == bytes(300_000)
    assert time.monotonic() - started > 0.4


def test_nginx_whose_file_changed_is_noticed(nginx: str, tmp_path: Path) -> None:
    file = tmp_path / "www" / "f"
    file.write_bytes(bytes(1000))
    with Client(allow_private={HOST}) as client:
        source = HttpSource(client, nginx)
        stat = source.stat("f")
        file.write_bytes(b"\1" * 1000)
        os.utime(file, (1, 1))
        with pytest.raises(FetchError, match="206"):
            list(source.read("f", 10, 20, 1000, etag=stat.etag))
