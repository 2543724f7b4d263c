"""Claims of `safeload.fetching.http` and `.addresses`: exactly the bytes that were asked for, from where we may go."""

from __future__ import annotations

import datetime as dt
import gzip
import ipaddress
import logging
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpcore
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from safeload.errors import ConfigError, FetchError
from safeload.fetching.addresses import is_loopback, is_public, resolve
from safeload.fetching.http import MAX_REDIRECTS, Client, Timing, Token, shown, watched
from tests.hostile_server import Behavior, HostileServer, Reply, Request

DATA = bytes(range(256)) * 40
SIZE = len(DATA)
FAST = Timing(connect=2, read=0.5, headers=0.5, min_rate=1000, rate_window=0.5)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client(allow_private={"127.0.0.1"}, timing=FAST) as made:
        yield made


def read(client: Client, server: HostileServer, start: int, stop: int, **known: Any) -> bytes:
    return b"".join(client.read(f"{server.url}/file", start, stop, **known))


def answering(*, status: int = 206, body: bytes = DATA[10:20], **headers: object) -> Behavior:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        reply.head(status, **headers)
        reply.raw(body)

    return behave


def refusal(client: Client, behavior: Behavior, start: int = 10, stop: int = 20, **known: Any) -> FetchError:
    with HostileServer({"file": DATA}, behavior) as server, pytest.raises(FetchError) as caught:
        read(client, server, start, stop, **{"size": SIZE, **known})
    assert caught.value.mirror is not None
    return caught.value


# --- what is taken ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, SIZE), (10, 20), (SIZE - 1, SIZE), (255, 257)])
def test_a_range_is_exactly_the_bytes_that_were_asked_for(client: Client, start: int, stop: int) -> None:
    with HostileServer({"file": DATA}) as server:
        assert read(client, server, start, stop, size=SIZE) == DATA[start:stop]
    sent = server.requests[0].headers
    assert sent["range"] == f"bytes={start}-{stop - 1}"
    assert sent["accept-encoding"] == "identity"
    assert "authorization" not in sent
    assert "cookie" not in sent


def test_a_system_without_threads_for_us_is_told_in_our_words(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "safeload-connect":
            raise RuntimeError("can't start new thread")
        real(thread)

    with HostileServer({"file": DATA}) as server:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(FetchError, match="can't start new thread") as caught:
            read(client, server, 0, SIZE, size=SIZE)
        monkeypatch.setattr(threading.Thread, "start", real)
        assert caught.value.mirror == f"{server.url}/file"
        assert read(client, server, 0, SIZE, size=SIZE) == DATA


def test_nothing_is_asked_for_an_empty_range(client: Client) -> None:
    with HostileServer({"file": DATA}) as server:
        assert read(client, server, 5, 5) == b""
    assert server.requests == []


def test_one_connection_serves_many_ranges(client: Client) -> None:
    with HostileServer({"file": DATA}) as server:
        for start in range(0, 100, 10):
            read(client, server, start, start + 10, size=SIZE)
    assert (len(server.requests), server.n_connections) == (10, 1)


def test_a_whole_answer_will_do_from_the_start_and_is_cut_where_enough_came(client: Client) -> None:
    whole = answering(status=200, body=DATA, Content_Length=SIZE)
    with HostileServer({"file": DATA}, whole) as server:
        assert read(client, server, 0, 100, size=SIZE) == DATA[:100]
        assert read(client, server, 0, 100) == DATA[:100]
        assert read(client, server, 0, SIZE, size=SIZE) == DATA


def test_stat_says_what_the_server_says(client: Client) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        reply.honest(request, data, ETag='"abc"')

    with HostileServer({"file": DATA}, behave) as server:
        found = client.stat(f"{server.url}/file")
    assert (found.size, found.accept_ranges, found.etag) == (SIZE, True, '"abc"')
    assert server.requests[0].method == "HEAD"


@pytest.mark.parametrize("etag", ['W/"weak"', "bare", '"' + "x" * 300 + '"'])
def test_a_weak_or_malformed_validator_is_none(client: Client, etag: str) -> None:
    with HostileServer({"file": DATA}, answering(status=200, body=b"", Content_Length=3, ETag=etag)) as server:
        assert client.stat(f"{server.url}/file").etag is None


def test_a_validator_is_sent_and_a_changed_file_is_refused(client: Client) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        # RFC 9110, 13.1.5: another validator than the file's gets the whole new file.
        assert request.headers["if-range"] == '"old"'
        reply.head(200, Content_Length=SIZE)
        reply.raw(data or b"")

    error = refusal(client, behave, etag='"old"')
    assert "expected status 206" in error.message


def test_a_document_is_bounded(client: Client) -> None:
    with HostileServer({"file": DATA}) as server:
        assert client.get(f"{server.url}/file", limit=SIZE) == DATA
        with pytest.raises(FetchError, match=f"expected at most {SIZE - 1} bytes"):
            client.get(f"{server.url}/file", limit=SIZE - 1)


# --- what is not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "behavior"),
    [
        ("from another offset", answering(Content_Length=10, Content_Range=f"bytes 0-9/{SIZE}")),
        ("overlapping", answering(Content_Length=10, Content_Range=f"bytes 11-20/{SIZE}")),
        ("longer", answering(Content_Length=11, Content_Range=f"bytes 10-20/{SIZE}", body=DATA[10:21])),
        ("shorter", answering(Content_Length=9, Content_Range=f"bytes 10-18/{SIZE}", body=DATA[10:19])),
        ("of another total", answering(Content_Length=10, Content_Range=f"bytes 10-19/{SIZE + 1}")),
        ("of no total", answering(Content_Length=10, Content_Range="bytes 10-19/*")),
        ("of another unit", answering(Content_Length=10, Content_Range=f"lines 10-19/{SIZE}")),
        ("no range", answering(Content_Length=10)),
        ("several ranges", answering(Content_Length=10, Content_Type="multipart/byteranges; boundary=x")),
        ("another length", answering(Content_Length=9, Content_Range=f"bytes 10-19/{SIZE}", body=DATA[10:19])),
    ],
)
def test_a_206_of_anything_else_is_discarded(client: Client, case: str, behavior: Behavior) -> None:
    assert "expected" in refusal(client, behavior).message, case


def test_a_range_that_is_ignored_is_discarded(client: Client) -> None:
    error = refusal(client, answering(status=200, body=DATA, Content_Length=SIZE))
    assert "expected status 206 for the bytes from 10, found the whole file" in error.message


def test_two_content_ranges_are_none(client: Client) -> None:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        said = f"Content-Range: bytes 10-19/{SIZE}\r\n"
        reply.raw(f"HTTP/1.1 206 x\r\nContent-Length: 10\r\n{said}{said}\r\n".encode() + DATA[10:20])

    assert "expected Content-Range" in refusal(client, behave).message


def test_a_page_of_html_is_refused_and_its_type_is_shown(client: Client) -> None:
    page = b"<html>log in"
    error = refusal(
        client, answering(status=200, body=page, Content_Length=len(page), Content_Type="text/html"), start=0, stop=SIZE
    )
    assert "text/html" in error.message
    assert f"expected {SIZE} bytes" in error.message


def test_an_endless_body_is_left_at_the_byte_after_the_last(client: Client) -> None:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        reply.head(206, Content_Range=f"bytes 10-19/{SIZE}", Transfer_Encoding="chunked")
        for _piece in range(100_000):
            reply.raw(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    with (
        HostileServer({"file": DATA}, behave) as server,
        pytest.raises(FetchError, match="expected 10 bytes, found more"),
    ):
        read(client, server, 10, 20, size=SIZE)
    assert server.n_sent < 64 * 1024 * 1024  # what fits into the buffers of two sockets, of 6.5 GB


@pytest.mark.parametrize("encoding", ["gzip", "br", "gzip, identity", "x-anything"])
def test_an_encoded_body_is_refused_and_never_decoded(client: Client, encoding: str) -> None:
    bomb = gzip.compress(bytes(10_000_000))
    error = refusal(
        client,
        answering(body=bomb, Content_Length=len(bomb), Content_Encoding=encoding, Content_Range=f"bytes 10-19/{SIZE}"),
    )
    assert "expected the bytes as they are" in error.message


@pytest.mark.parametrize("n", [0, 1, 9])
def test_a_truncated_body_is_an_error(client: Client, n: int) -> None:
    behavior = answering(Content_Length=10, Content_Range=f"bytes 10-19/{SIZE}", body=DATA[10 : 10 + n])
    assert not refusal(client, behavior).lasting


def test_a_body_without_a_length_is_counted(client: Client) -> None:
    behavior = answering(Content_Range=f"bytes 10-19/{SIZE}", Connection="close", body=DATA[10:17])
    assert "expected 10 bytes, found the end after 7" in refusal(client, behavior).message


@pytest.mark.parametrize("n", [0, 5, 15, 40, 70])
def test_a_head_that_ends_early_is_an_error(client: Client, n: int) -> None:
    head = f"HTTP/1.1 206 x\r\nContent-Length: 10\r\nContent-Range: bytes 10-19/{SIZE}\r\n\r\n".encode()
    assert n < len(head)
    refusal(client, lambda _, reply, __: reply.raw(head[:n]))


@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-x\r\n", b"\x00" * 100, b"HTTP/9.9 206 x\r\n\r\n", b"HTTP/1.1 999999 x\r\n\r\n"]
)
def test_what_is_no_http_is_an_error(client: Client, garbage: bytes) -> None:
    refusal(client, lambda _, reply, __: reply.raw(garbage))


def test_an_endless_head_is_an_error(client: Client) -> None:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        reply.raw(b"HTTP/1.1 206 x\r\n")
        for i in range(1_000_000):
            reply.raw(b"x%d: y\r\n" % i)

    refusal(client, behave)


@pytest.mark.parametrize(
    ("status", "lasting"),
    [(404, True), (403, True), (410, True), (416, True), (500, False), (503, False), (429, False)],
)
def test_a_status_says_whether_asking_again_is_of_use(client: Client, status: int, lasting: bool) -> None:
    error = refusal(client, answering(status=status, body=b"", Content_Length=0))
    assert (error.status, error.lasting) == (status, lasting)


def in_an_hour() -> str:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)).strftime("%a, %d %b %Y %H:%M:%S GMT")


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        ("7", 7, 7),
        ("0", 0, 0),
        (in_an_hour, 3500, 3601),
        ("999999999", 86400, 86400),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0, 0),
    ],
    ids=["seconds", "now", "in an hour", "too long", "long ago"],
)
def test_retry_after_is_read_in_both_forms_and_bounded(
    client: Client, value: str | Callable[[], str], low: float, high: float
) -> None:
    said = value if isinstance(value, str) else value()
    found = refusal(client, answering(status=503, body=b"", Content_Length=0, Retry_After=said)).retry_after
    assert found is not None
    assert low <= found <= high


@pytest.mark.parametrize("value", ["", "soon", "-1", "1e9"])
def test_a_retry_after_that_is_none_is_ignored(client: Client, value: str) -> None:
    assert refusal(client, answering(status=503, body=b"", Content_Length=0, Retry_After=value)).retry_after is None


# --- servers that keep us waiting ---------------------------------------------------------------------------------


def dripping(*, head: bool) -> Behavior:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        start = f"HTTP/1.1 206 x\r\nContent-Length: 1000\r\nContent-Range: bytes 10-1009/{SIZE}\r\n".encode()
        if not head:
            reply.raw(start + b"\r\n")
        for _step in range(200):
            reply.raw(b"x" if not head else b"")
            if head:
                reply.raw(start[:1])
                start = start[1:] or b"y"
            time.sleep(0.1)

    return behave


@pytest.mark.parametrize("head", [True, False])
def test_a_server_that_drips_is_left(client: Client, head: bool) -> None:
    before = time.monotonic()
    refusal(client, dripping(head=head), stop=1010)
    assert time.monotonic() - before < 5  # it would go on for 20 s


def test_a_server_that_says_nothing_is_left(client: Client) -> None:
    before = time.monotonic()
    refusal(client, lambda *_: time.sleep(8))
    assert time.monotonic() - before < 5


PATIENT = Timing(connect=60, read=60, headers=60, min_rate=1, rate_window=60)


def ranged(request: Request, reply: Reply, **more: object) -> tuple[int, int]:
    """Begin a response to a range whose length is not told, and return the range."""
    asked = request.range(SIZE)
    assert asked is not None
    reply.head(206, Content_Range=f"bytes {asked[0]}-{asked[1] - 1}/{SIZE}", Transfer_Encoding="chunked", **more)
    return asked


def inform(_: Request, reply: Reply, __: bytes | None) -> None:
    """Send informational responses, and never one that counts (RFC 9110, 15.2)."""
    while True:
        reply.raw(b"HTTP/1.1 103 x\r\nLink: </a>\r\n\r\n" * 1000)


def wrap(request: Request, reply: Reply, data: bytes | None) -> None:
    """Send a byte at a time, each with many that are no content (RFC 9112, 7.1.1)."""
    assert data is not None
    start, stop = ranged(request, reply)
    for at in range(start, stop):
        reply.raw(b"1;x=" + b"y" * 15_000 + b"\r\n" + data[at : at + 1] + b"\r\n")


@pytest.mark.parametrize("behavior", [inform, wrap])
def test_a_server_that_is_fast_and_brings_nothing_is_left(behavior: Behavior) -> None:
    with (
        HostileServer({"file": DATA}, behavior) as server,
        Client(allow_private={"127.0.0.1"}, timing=PATIENT) as patient,
        pytest.raises(FetchError, match="mostly what is sent around it"),
    ):
        read(patient, server, 0, SIZE, size=SIZE)
    assert server.n_sent < 16 * 1024 * 1024


def test_content_in_small_chunks_is_taken(client: Client) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        assert data is not None
        start, stop = ranged(request, reply)
        for at in range(start, stop, 10):
            piece = data[at : min(at + 10, stop)]
            reply.raw(b"%x\r\n" % len(piece) + piece + b"\r\n")
        reply.raw(b"0\r\n\r\n")

    with HostileServer({"file": DATA}, behave) as server:
        assert read(client, server, 0, SIZE, size=SIZE) == DATA


class GivenUpError(Exception):
    pass


def given_up_after(seconds: float) -> Callable[[], None]:
    until = time.monotonic() + seconds

    def alive() -> None:
        if time.monotonic() > until:
            raise GivenUpError

    return alive


def say_nothing(_: Request, __: Reply, ___: bytes | None) -> None:
    time.sleep(5)


def stall(request: Request, reply: Reply, _: bytes | None) -> None:
    ranged(request, reply)
    time.sleep(5)


@pytest.mark.parametrize("behavior", [say_nothing, stall, inform])
def test_whoever_gives_up_need_not_wait_for_the_server(behavior: Behavior) -> None:
    before = time.monotonic()
    with Client(allow_private={"127.0.0.1"}, timing=PATIENT) as patient, HostileServer({}, behavior) as server:
        with watched(given_up_after(0.2)), pytest.raises((GivenUpError, FetchError)) as caught:
            read(patient, server, 0, SIZE, size=SIZE)
        assert time.monotonic() - before < 2
    assert behavior is inform or caught.type is GivenUpError


def test_whoever_gives_up_need_not_wait_for_a_name_or_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*_: object, **__: object) -> None:
        time.sleep(3)
        raise httpcore.ConnectError("too late")

    for thing, name in ((socket, "getaddrinfo"), (httpcore.SyncBackend, "connect_tcp")):
        before = time.monotonic()
        with monkeypatch.context() as patch, Client(allow_private={"127.0.0.1"}, timing=PATIENT) as patient:
            patch.setattr(thing, name, slowly)
            with watched(given_up_after(0.2)), pytest.raises(GivenUpError):
                list(patient.read("http://127.0.0.1:1/x", 0, 1))
        assert time.monotonic() - before < 2


def test_whoever_gives_up_need_not_wait_for_a_handshake() -> None:
    before = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        url = f"https://127.0.0.1:{silent.getsockname()[1]}/x"
        with Client(allow_private={"127.0.0.1"}, timing=PATIENT) as patient:
            with watched(given_up_after(0.2)), pytest.raises(GivenUpError):
                list(patient.read(url, 0, 1))
            assert time.monotonic() - before < 2


def connecting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "safeload-connect"}


def await_all_but(others: set[threading.Thread]) -> None:
    for thread in connecting() - others:
        thread.join(5)


class Moment:
    """Has whoever waits give up once something has begun, and lets that end only then."""

    def __init__(self) -> None:
        self._has_begun = threading.Event()
        self._is_given_up = threading.Event()

    def alive(self) -> None:
        if self._has_begun.is_set():
            self._is_given_up.set()
            raise GivenUpError

    def has_come(self) -> None:
        self._has_begun.set()
        assert self._is_given_up.wait(5)
        time.sleep(0.1)


def test_a_connection_that_is_made_after_its_asker_gave_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    moment = Moment()

    def connect(*_: object, **__: object) -> httpcore.NetworkStream:
        moment.has_come()
        near, far = socket.socketpair()
        made.append(far)

        class Near(httpcore.NetworkStream):
            def close(self) -> None:
                near.close()

        return Near()

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    others = connecting()
    with (
        Client(allow_private={"127.0.0.1"}, timing=PATIENT) as patient,
        watched(moment.alive),
        pytest.raises(GivenUpError),
    ):
        list(patient.read("http://127.0.0.1:1/x", 0, 1))
    await_all_but(others)
    (far,) = made
    with far:
        far.settimeout(5)
        assert far.recv(1) == b""


def test_a_handshake_that_ends_after_its_asker_gave_up_leaves_nothing_open(
    authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    ca_file, context = authority
    handshake = ssl.SSLContext.wrap_socket
    made: list[ssl.SSLSocket] = []
    moment = Moment()

    def slowly(self: ssl.SSLContext, *asked: Any, **more: Any) -> ssl.SSLSocket:
        done = handshake(self, *asked, **more)
        if self is not context:
            made.append(done)
            moment.has_come()
        return done

    with HostileServer({"file": DATA}, tls=context) as server:
        monkeypatch.setattr(ssl.SSLContext, "wrap_socket", slowly)
        others = connecting()
        with (
            Client(allow_private={"127.0.0.1"}, timing=PATIENT, ca_file=ca_file) as patient,
            watched(moment.alive),
            pytest.raises(GivenUpError),
        ):
            read(patient, server, 0, SIZE, size=SIZE)
        await_all_but(others)
    assert [stream.fileno() for stream in made] == [-1]


def test_a_name_that_takes_too_long_to_look_up_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3))
    with Client(timing=Timing(connect=0.3)) as client, pytest.raises(FetchError, match=r"no answer within 0\.3 s"):
        list(client.read("https://mirror.example/x", 0, 1))


def test_a_consumer_that_takes_its_time_does_not_make_its_mirror_slow(client: Client) -> None:
    with HostileServer({"file": bytes(4 * 1024 * 1024)}) as server:
        pieces = client.read(f"{server.url}/file", 0, 4 * 1024 * 1024)
        next(pieces)
        time.sleep(1.2)  # more than any of the limits
        assert sum(map(len, pieces)) > 0


def test_nobody_there_is_an_error_that_names_the_mirror(client: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(FetchError, match=rf"cannot read http://127\.0\.0\.1:{port}/x"):
        list(client.read(f"http://127.0.0.1:{port}/x?secret=1", 0, 1))


# --- where redirects lead -----------------------------------------------------------------------------------------


def redirecting(location: str, status: int = 302) -> Behavior:
    return answering(status=status, body=b"", Content_Length=0, Location=location)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed_and_range_and_encoding_are_asked_again(client: Client, status: int) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.path == "file":
            reply.head(status, Content_Length=0, Location="/other")
        else:
            reply.honest(request, data)

    with HostileServer({"file": b"", "other": DATA}, behave) as server:
        assert read(client, server, 10, 20, size=SIZE) == DATA[10:20]
    assert server.requests[1].headers["range"] == "bytes=10-19"


def test_a_redirect_costs_no_connection(client: Client) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.path == "file":
            reply.head(302, Content_Length=5, Location="/other")
            reply.raw(b"moved")
            reply.stays_open = True
        else:
            reply.honest(request, data)

    with HostileServer({"other": DATA}, behave) as server:
        for at in range(5):
            assert read(client, server, at, 20, size=SIZE) == DATA[at:20]
    assert server.n_connections == 1


def test_a_connection_that_its_server_closed_meanwhile_is_no_failure(client: Client) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        reply.honest(request, data)
        reply.stays_open = False  # without a word of it

    with HostileServer({"file": DATA}, behave) as server:
        for _ in range(20):
            assert read(client, server, 0, SIZE, size=SIZE) == DATA


def test_what_gives_access_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        if request.path == "file":
            reply.head(302, Content_Length=0, Location="/other?signature=secret", Set_Cookie="who=secret")
        else:
            reply.honest(request, data)

    with (
        HostileServer({"other": DATA}, behave) as server,
        Client(allow_private={"127.0.0.1"}, token=Token(server.url, "secret")) as asking,
        caplog.at_level(logging.DEBUG),
    ):
        assert read(asking, server, 10, 20, size=SIZE) == DATA[10:20]
    assert server.requests[1].target == "/other?signature=secret"
    # What is said is what was called, and with what outcome; what the server's head says is not.
    assert caplog.text.count("receive_response_headers.complete return_value='not shown'") == 2
    assert "secret" not in caplog.text


def test_a_line_of_a_head_that_is_none_is_not_quoted(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    def behave(_: Request, reply: Reply, __: bytes | None) -> None:
        reply.raw(b"HTTP/1.1 302 x\r\nLocation : /other?signature=secret\r\nContent-Length: 0\r\n\r\n")

    with caplog.at_level(logging.DEBUG):
        error = refusal(client, behave)
    assert error.message.endswith("/file: illegal header line")
    assert "exception='not shown'" in caplog.text
    assert "secret" not in caplog.text + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("n", [0, SIZE - 1])
def test_what_breaks_off_says_with_which_status_it_began(client: Client, n: int) -> None:
    def behave(_: Request, reply: Reply, data: bytes | None) -> None:
        reply.head(200, Content_Length=SIZE)
        reply.raw((data or b"")[:n])

    assert refusal(client, behave, 0, SIZE).status == 200


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "gopher://127.0.0.1/x",
        "",
        "//",
        "http://",
        "data:,x",
        "http://[::1",
        "\u00e9://x",
    ],
)
def test_a_redirect_to_what_is_no_https_goes_nowhere(client: Client, location: str) -> None:
    if location == "":
        assert refusal(client, redirecting("")).lasting  # to itself, for ever
    else:
        refusal(client, redirecting(location))


def test_a_redirect_without_a_location_is_an_error(client: Client) -> None:
    refusal(client, answering(status=302, body=b"", Content_Length=0))


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.2", "169.254.169.254", "10.0.0.1", "[::1]", "0x7f.0.0.1", "2130706433"]
)
def test_a_redirect_to_a_private_host_that_nobody_named_is_refused(client: Client, host: str) -> None:
    with HostileServer({"file": DATA}) as inside:
        error = refusal(client, redirecting(f"http://{host}:{inside.port}/file"))
    assert "expected" in error.message
    assert inside.requests == []


def test_redirects_end(client: Client) -> None:
    def behave(request: Request, reply: Reply, _: bytes | None) -> None:
        n = int(request.path.removeprefix("file") or 0)
        reply.head(302, Content_Length=0, Location=f"/file{n + 1}")

    with HostileServer({}, behave) as server, pytest.raises(FetchError, match=f"at most {MAX_REDIRECTS} redirects"):
        read(client, server, 0, 1)
    assert len(server.requests) == MAX_REDIRECTS + 1


@pytest.mark.parametrize(
    "url", ["http://example.com/x", "ftp://example.com/x", "/etc/passwd", "https://", "", "https://u:p@example.com/x"]
)
def test_a_url_that_is_no_plain_https_is_refused_before_anything_is_asked(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("asked for an address"))
    with pytest.raises(FetchError) as caught:
        list(client.read(url, 0, 1))
    assert "u:p" not in str(caught.value)


# --- credentials --------------------------------------------------------------------------------------------------


def test_a_token_goes_to_its_origin_and_to_no_other() -> None:
    with HostileServer({"file": DATA}) as other, HostileServer({"file": DATA}) as own:
        token = Token(own.url, "s3cret")
        with Client(token=token, allow_private={"127.0.0.1"}) as client:
            read(client, own, 0, 1)
            read(client, other, 0, 1)
    assert own.requests[0].headers["authorization"] == "Bearer s3cret"
    assert "authorization" not in other.requests[0].headers
    assert "s3cret" not in repr(token)


def test_a_token_that_left_its_origin_is_not_sent_again() -> None:
    with HostileServer({}) as other, HostileServer({"file": DATA, "back": DATA}) as own:

        def away(request: Request, reply: Reply, data: bytes | None) -> None:
            if request.path == "file":
                reply.head(302, Content_Length=0, Location=f"{other.url}/x")
            else:
                reply.honest(request, data)

        own.behavior = away
        other.behavior = redirecting(f"{own.url}/back")
        with Client(token=Token(own.url, "s3cret"), allow_private={"127.0.0.1"}) as client:
            assert read(client, own, 0, 1) == DATA[:1]
    assert "authorization" not in other.requests[0].headers
    assert [("authorization" in request.headers) for request in own.requests] == [True, False]


@pytest.mark.parametrize(
    "token", [Token("http://example.com", "x"), Token("https://example.com", "a\r\nb: c"), Token("https://", "x")]
)
def test_a_token_that_would_leak_is_refused(token: Token) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(token=token)
    assert "a\r\nb" not in str(caught.value)


def test_cookies_are_not_kept(client: Client) -> None:
    def behave(request: Request, reply: Reply, data: bytes | None) -> None:
        reply.honest(request, data, Set_Cookie="who=me; Path=/")

    with HostileServer({"file": DATA}, behave) as server:
        read(client, server, 0, 1)
        read(client, server, 0, 1)
    assert "cookie" not in server.requests[1].headers


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with HostileServer({"file": DATA}) as server, Client(allow_private={"127.0.0.1"}) as client:
        assert read(client, server, 0, 1) == DATA[:1]


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("https://user:secret@host:8443/a/b?sig=secret#f", "https://host:8443/a/b"),
        ("https://[2001:db8::1]/x", "https://[2001:db8::1]/x"),
        ("https://host/\x1b[2J", "a URL that is none"),
    ],
)
def test_a_url_is_shown_without_what_gives_access(url: str, printed: str) -> None:
    assert shown(url) == printed


# --- TLS ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for 127.0.0.1, in a file, and a server's context with it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (tmp_path / "ca.pem").write_bytes(certificate.public_bytes(pem))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    return tmp_path / "ca.pem", context


def test_a_certificate_is_checked_against_the_authorities_that_were_named(
    authority: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    ca_file, context = authority
    with HostileServer({"file": DATA}, tls=context) as server:
        with Client(allow_private={"127.0.0.1"}, ca_file=ca_file) as client:
            assert read(client, server, 10, 20, size=SIZE) == DATA[10:20]
        # OpenSSL's own variables decide nothing.
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
        with (
            Client(allow_private={"127.0.0.1"}) as client,
            pytest.raises(FetchError, match=r"(?i)certificate") as caught,
        ):
            read(client, server, 10, 20, size=SIZE)
        assert caught.value.lasting  # it will not be another one in a second


def test_a_redirect_never_leads_from_https_to_http(authority: tuple[Path, ssl.SSLContext]) -> None:
    ca_file, context = authority
    with (
        HostileServer({"file": DATA}) as plain,
        HostileServer({}, redirecting(f"{plain.url}/file"), tls=context) as server,
        Client(allow_private={"127.0.0.1"}, allow_http={"127.0.0.1"}, ca_file=ca_file) as client,
        pytest.raises(FetchError, match="to https, found http"),
    ):
        read(client, server, 0, 1)
    assert plain.requests == []


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for path in (tmp_path / "ca.pem", tmp_path / "absent"):
        with pytest.raises(ConfigError, match="certificates"):
            Client(ca_file=path)


# --- addresses ----------------------------------------------------------------------------------------------------

PRIVATE = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.1.1", "198.18.0.1"),  # noqa: S104 - bound to nowhere
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fc00::1", "fd00:ec2::254", "fe80::1"),
    *("fe80::1%eth0", "ff02::1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1"),
    *("2002:7f00:1::1", "2002:a9fe:a9fe::", "2001:db8::1", "no address", ""),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public_however_they_are_wrapped(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost.example", False),
        ("1.1.1.1", False),
    ],
)
def test_loopback_is_told_by_its_spelling(host: str, is_here: bool) -> None:
    assert is_loopback(host) is is_here


def answers(*found: str) -> Callable[..., list[tuple[Any, ...]]]:
    return lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 443)) for address in found]


def test_one_private_address_among_public_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answers("1.1.1.1", "10.0.0.1"))
    with pytest.raises(FetchError, match=r"found the address 10\.0\.0\.1"):
        resolve("mirror.example", 443)
    assert resolve("mirror.example", 443, allow_private=frozenset({"mirror.example"})) == ["1.1.1.1", "10.0.0.1"]


def test_a_name_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, lasting in ((socket.EAI_NONAME, True), (socket.EAI_AGAIN, False)):

        def fails(*_: object, number: int = number, **__: object) -> None:
            raise socket.gaierror(number, "not known")

        monkeypatch.setattr(socket, "getaddrinfo", fails)
        with pytest.raises(FetchError, match="cannot find the address") as caught:
            resolve("absent.example", 443)
        assert caught.value.lasting is lasting


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    # A name that is rebound between the check and the connection would have two answers.
    turns = iter([answers("1.1.1.1"), answers("127.0.0.1")])

    def resolved(*asked: object, **more: object) -> list[tuple[Any, ...]]:
        return next(turns)(*asked, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    tried = []

    def connect(_: object, host: str, *__: object, **___: object) -> None:
        tried.append(host)
        raise httpcore.ConnectError("not in a test")

    monkeypatch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
    with Client() as client, pytest.raises(FetchError, match="not in a test"):
        list(client.read("https://mirror.example/x", 0, 1))
    assert tried == ["1.1.1.1"]
