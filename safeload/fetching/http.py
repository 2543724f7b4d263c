"""HTTP as RFC 9110 has it and no more: what a server sends is taken exactly as asked for, or not at all.

Nothing that a server says decides anything: not the size, not the encoding, not where else to ask. The digests are
checked elsewhere; here a server is kept from costing time, memory, disk or credentials.
"""

from __future__ import annotations

import contextlib
import queue
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import certifi
import httpcore
import httpx

from safeload import __version__
from safeload.errors import ConfigError, FetchError, escape, reason
from safeload.fetching.addresses import is_loopback, resolve

MAX_REDIRECTS: Final = 5
"""Hops from the URL that was named to the bytes. A hub and its storage take two."""

MAX_RETRY_AFTER_SECONDS: Final = 24 * 60 * 60
"""Longest wait that a server is believed; how long it is waited for is the caller's choice."""

_PIECE_BYTES: Final = 256 * 1024
"""Read from a socket at a time: few calls, and every copy on its way is still in the processor's cache (64 KiB took a
sixth more time, 1 MiB a tenth)."""

_MAX_HEAD_BYTES: Final = 2 * _PIECE_BYTES
"""Most bytes to take for the head of a response, what came with it of its body included. The parser bounds each part of
a head; without this, informational responses (1xx) could follow one another for as long as a head may take."""

_FRAMING_BYTES: Final = 1024 * 1024
"""Most bytes beside twice the content for how it is sent: the lengths of its chunks, their extensions and trailers.
Without this a server could be fast by what it sends and bring nothing for as long as it likes."""

_DRAINED_BYTES: Final = 64 * 1024
"""Longest body of a redirect that is read, so that the connection can be used again."""

_POLL_SECONDS: Final = 0.25
"""How long somebody who waits for a server goes without looking whether to stop."""

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_LASTING: Final = frozenset({400, 401, 403, 404, 405, 410, 414, 416, 451})
"""Statuses that the same request gets again."""

_MAY_READ: Final = "give a token that may read it (--token-file FILE), and check the URL"
_NOTHING_THERE: Final = "check the URL: nothing is there"
_HINTS: Final = {401: _MAY_READ, 403: _MAY_READ, 404: _NOTHING_THERE, 410: _NOTHING_THERE}

_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_DIGITS: Final = re.compile(r"[0-9]{1,19}")
_STRONG_ETAG: Final = re.compile(r'"[\x21\x23-\x7e]{0,256}"')
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,4096}")


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token, and the one origin that it is for.

    Attributes:
        origin: Scheme, host and port: `https://huggingface.co`.
        secret: The token itself; never shown.
    """

    origin: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a server may take. All in seconds but `min_rate`.

    Attributes:
        connect: For a connection, and again for its TLS handshake.
        read: For the next byte.
        headers: For all of a response's head, however it drips.
        min_rate: Fewest bytes a second, over the time that was spent waiting for them.
        rate_window: How much waiting is measured together.
    """

    connect: float = 15.0
    read: float = 30.0
    headers: float = 30.0
    min_rate: int = 64 * 1024
    rate_window: float = 30.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """What a server says of a file. None of it is believed; it helps to ask well.

    Attributes:
        url: Where it was found, after redirects; may hold a signature that gives access, so show it with `shown`.
        size: Length in bytes, or None where the server does not say.
        accept_ranges: Whether it says that it serves ranges.
        etag: Its strong validator, or None.
    """

    url: str
    size: int | None
    accept_ranges: bool
    etag: str | None


_WATCHED: Final = threading.local()

T = TypeVar("T")


@contextmanager
def watched(alive: Callable[[], object]) -> Iterator[None]:
    """Have something called a few times a second while this thread waits for a server, whatever it waits for.

    Args:
        alive: What to call; what it raises ends the waiting, and comes out of the call that waited.
    """
    before = getattr(_WATCHED, "alive", None)
    _WATCHED.alive = alive
    try:
        yield
    finally:
        _WATCHED.alive = before


def _look_whether_to_stop() -> None:
    alive = getattr(_WATCHED, "alive", None)
    if alive is not None:
        alive()


def shown(url: str) -> str:
    """Return a URL as it may be printed: without credentials, query and fragment, escaped."""
    try:
        parsed = httpx.URL(url)
        port = "" if parsed.port is None else f":{parsed.port}"
        host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
        return escape(f"{parsed.scheme}://{host}{port}{parsed.path}")
    except (httpx.InvalidURL, ValueError, TypeError):
        return "a URL that is none"


class Client:
    """Asks servers for bytes of files. Thread-safe; use it as a context manager."""

    def __init__(
        self,
        *,
        token: Token | None = None,
        allow_private: Iterable[str] = (),
        allow_http: Iterable[str] = (),
        timing: Timing | None = None,
        max_connections: int = 16,
        ca_file: str | Path | None = None,
        user_agent: str = f"safeload/{__version__}",
    ) -> None:
        """Prepare; nothing is connected to yet.

        Args:
            token: Sent to its origin, and to no other.
            allow_private: Hosts whose addresses may be private, as the URL spells them.
            allow_http: Hosts that may be asked without TLS. This machine may always, if it is in `allow_private`.
            timing: How long a server may take.
            max_connections: Open at one time, over all servers.
            ca_file: Certificates of authorities in PEM, instead of those that come with the package certifi.
            user_agent: What to call ourselves.

        Raises:
            ConfigError: The token or its origin is malformed, or the certificates cannot be read.
        """
        self._timing = timing or Timing()
        self._allow_private = frozenset(host.lower() for host in allow_private)
        self._allow_http = frozenset(host.lower() for host in allow_http)
        self._token = token
        self._token_origin: tuple[str, str, int] | None = None
        if token is not None:
            if not _TOKEN.fullmatch(token.secret):
                raise ConfigError("expected a token of letters, digits and . _ ~ + / = -, found another")
            try:
                self._token_origin = _origin(httpx.URL(token.origin))
            except (httpx.InvalidURL, TypeError) as err:
                raise ConfigError("the token's origin is no URL", hint="write for example https://host") from err
            scheme, host, _ = self._token_origin
            if not host or (scheme != "https" and not is_loopback(host)):
                raise ConfigError("a token is sent over https only", hint="give its origin as https://host")
        self._user_agent = user_agent
        # Not `httpx.Client`: that one logs each URL, and where a redirect leads can hold a signature that gives access;
        # and it keeps cookies and asks the environment for proxies, certificates and .netrc, which decide nothing here.
        self._transport = _Transport(_context(ca_file), max_connections, _Backend(self._timing, self._allow_private))
        # To wait for a connection of our own that is in use is no fault of the server, and ends when that does.
        timeout = httpx.Timeout(self._timing.read, connect=self._timing.connect, pool=None)
        self._extensions = {"timeout": timeout.as_dict(), "trace": _hide_the_head}

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close every connection."""
        self._transport.close()

    def stat(self, url: str) -> RemoteFile:
        """Ask what a server says of a file, by HEAD.

        Raises:
            FetchError: The server cannot be reached, refuses, or redirects to where we do not go.
        """
        with self._send("HEAD", url, {}) as response:
            _require_status(response, {200})
            length = response.headers.get("content-length", "")
            etag = response.headers.get("etag", "")
            return RemoteFile(
                url=str(response.url),
                size=int(length) if _DIGITS.fullmatch(length) else None,
                accept_ranges=response.headers.get("accept-ranges", "").strip().lower() == "bytes",
                etag=etag if _STRONG_ETAG.fullmatch(etag) else None,
            )

    def get(self, url: str, *, limit: int) -> bytes:
        """Return a whole small document, such as an answer in JSON.

        Args:
            url: Where it is.
            limit: Most bytes to take.

        Raises:
            FetchError: The server cannot be reached or refuses, or the document is longer.
        """
        document, _ = self.get_page(url, limit=limit)
        return document

    def get_page(self, url: str, *, limit: int) -> tuple[bytes, str | None]:
        """Do what `get` does, and return beside the document what its `Link` header calls the next one (RFC 8288)."""
        with self._send("GET", url, {}) as response:
            _require_status(response, {200})
            _require_identity(response)
            pieces = bytearray()
            for piece in _pieces(response, limit):
                pieces += piece
                if len(pieces) > limit:
                    raise _bad(response, f"expected at most {limit} bytes, found more")
            try:
                following = response.links.get("next", {}).get("url")
                return bytes(pieces), None if following is None else str(response.url.join(following))
            except (httpx.InvalidURL, ValueError) as err:
                raise _bad(response, "expected a link to the next page, found no URL") from err

    def read(
        self, url: str, start: int, stop: int, *, size: int | None = None, etag: str | None = None
    ) -> Iterator[bytes]:
        """Yield exactly the bytes [start, stop) of a file, in pieces; what is yielded is not verified.

        A 206 has to name exactly this range, and the size if that is known; a 200 will do from the file's start. A
        server that sends more, less or something encoded is refused at the byte where that is seen. Close the iterator
        to stop early.

        Args:
            url: Where the file is.
            start: Offset of the first byte.
            stop: Offset after the last byte.
            size: Length of the file in bytes, where it is known from elsewhere than the server.
            etag: A strong validator from `stat`: the file must still be that one (If-Range, RFC 9110 13.1.5).

        Raises:
            FetchError: The server cannot be reached, refuses, is too slow, or answers with anything else.
        """
        if start >= stop:
            return
        headers = {"range": f"bytes={start}-{stop - 1}"}
        if etag is not None and _STRONG_ETAG.fullmatch(etag):
            headers["if-range"] = etag
        with self._send("GET", url, headers) as response:
            _require_status(response, {200, 206})
            _require_identity(response)
            if response.status_code == 206:
                _require_range(response, start, stop, size)
                most = stop - start
            else:
                most = _require_whole(response, start, stop, size)
            wanted = stop - start
            got = 0
            for piece in _pieces(response, wanted):
                got += len(piece)
                if got <= wanted:
                    yield piece
                    if got == wanted and most > wanted:
                        return  # of a file that was sent whole, the rest is not wanted
                    continue
                if most == wanted:
                    # Whatever came is from a server that does not know what it serves.
                    raise _bad(response, f"expected {wanted} bytes, found more")
                yield piece[: wanted - got]
                return
            if got < wanted:
                raise _bad(response, f"expected {wanted} bytes, found the end after {got}")

    @contextmanager
    def _send(self, method: str, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """Lend the response that is no redirect, its body unread."""
        with _plainly(url):
            here = httpx.URL(url)
        with_token = True
        for _ in range(MAX_REDIRECTS + 1):
            self._require_allowed(here)
            origin = _origin(here)
            sent = {**headers, "user-agent": self._user_agent, "accept": "*/*", "accept-encoding": "identity"}
            if self._token is not None and with_token and origin == self._token_origin:
                sent["authorization"] = f"Bearer {self._token.secret}"
            with _plainly(str(here)):
                request = httpx.Request(method, here, headers=sent, extensions=self._extensions)
                response = self._answer(request)
            try:
                if response.status_code not in _REDIRECTS:
                    with _plainly(str(here), response.status_code):
                        yield response
                    return
                following = _following(response)
                with _plainly(str(here)):
                    _drain(response)
            finally:
                response.close()
            if here.scheme == "https" and following.scheme != "https":
                raise FetchError(
                    f"expected a redirect from {shown(str(here))} to https, found {escape(following.scheme) or 'none'}",
                    mirror=shown(str(here)),
                    lasting=True,
                )
            # A token that left its origin is not sent again, even where a later hop leads back there.
            with_token = with_token and _origin(following) == origin
            here = following
        raise FetchError(
            f"expected at most {MAX_REDIRECTS} redirects from {shown(url)}, found more",
            mirror=shown(url),
            lasting=True,
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to a request, which goes out again if its server had closed the connection meanwhile.

        That the server closes one is no failure of it (RFC 9112, 9.3.1), and nothing of the answer was seen.
        """
        while True:
            _WATCHED.has_connected = False
            try:
                response = self._transport.handle_request(request)
            except httpx.TransportError as err:
                is_closed = isinstance(err.__cause__, httpcore.NetworkError | httpcore.RemoteProtocolError)
                # Each such connection is gone from the pool, so that in the end there is a new one.
                if _WATCHED.has_connected or not is_closed:
                    raise
            else:
                response.request = request
                return response

    def _require_allowed(self, url: httpx.URL) -> None:
        where = shown(str(url))
        if url.userinfo:
            raise FetchError(f"expected a URL without credentials, found some in {where}", mirror=where, lasting=True)
        if not url.host or url.scheme not in {"http", "https"}:
            raise FetchError(
                f"expected an https URL, found the scheme {escape(url.scheme)!r}", mirror=where, lasting=True
            )
        host = url.host.lower()
        if url.scheme == "http" and host not in self._allow_http and not is_loopback(host):
            raise FetchError(
                f"expected an https URL, found {where}",
                mirror=where,
                lasting=True,
                hint=f"if nobody between can read or change what is sent, name it: --allow-http {escape(host)}",
            )


def _hide_the_head(name: str, info: dict[str, Any]) -> None:
    """Take what a server's head says out of what httpcore is about to log; it calls this first, with the same `info`.

    An application may log everything that happens at level DEBUG. Where a redirect leads can hold a signature that
    gives access, and a cookie is one; so can the line that an error quotes.
    """
    # What the call itself returns or raises stays as it is.
    if name == "http11.receive_response_headers.complete":
        info["return_value"] = "not shown"
    if str(info.get("exception", "")).startswith(_QUOTING):
        info["exception"] = "not shown"


def _following(response: httpx.Response) -> httpx.URL:
    said = response.headers.get("location", "")
    try:
        if said:
            return response.url.join(said)
    except (httpx.InvalidURL, ValueError) as err:
        raise _bad(response, "expected a redirect to a URL, found another Location", lasting=True) from err
    raise _bad(response, "expected a redirect to a URL, found no Location", lasting=True)


def _drain(response: httpx.Response) -> None:
    """Read the body of a redirect where it is short: a hub has one for each piece of a file."""
    length = response.headers.get("content-length", "")
    if _DIGITS.fullmatch(length) and int(length) <= _DRAINED_BYTES:
        for _ in _pieces(response, _DRAINED_BYTES):
            pass


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, url.host.lower(), url.port or {"https": 443, "http": 80}.get(url.scheme, 0)


def _context(ca_file: str | Path | None) -> ssl.SSLContext:
    try:
        # A file is named always: the default paths can be changed by the environment.
        context = ssl.create_default_context(cafile=certifi.where() if ca_file is None else str(ca_file))
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read the certificates {escape(str(ca_file))}: {reason(err)}") from err
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


@contextmanager
def _plainly(url: str, status: int | None = None) -> Iterator[None]:
    """Turn whatever the transport raises into a `FetchError` that names the mirror, and the status that came before."""
    where = shown(url)
    try:
        yield
    except FetchError as err:
        if err.mirror is None:
            err.mirror = where
        raise
    except httpx.InvalidURL as err:
        raise FetchError(f"expected a URL, found {where}", mirror=where, lasting=True) from err
    except (httpx.HTTPError, httpx.StreamError, httpcore.ConnectionNotAvailable, OSError, ValueError) as err:
        # ValueError: of what a server sends in a header, where httpx takes it for a URL or for ASCII.
        why = escape(str(err)) or type(err).__name__
        # Whose certificate it is does not change from one second to the next.
        lasting = isinstance(err.__cause__, httpcore.ConnectError) and "CERTIFICATE_VERIFY_FAILED" in why
        raise FetchError(f"cannot read {where}: {why}", mirror=where, status=status, lasting=lasting) from err


def _bad(response: httpx.Response, message: str, *, lasting: bool = False, hint: str | None = None) -> FetchError:
    where = shown(str(response.url))
    kind = escape(response.headers.get("content-type", "none"), limit=60)
    return FetchError(
        f"{where}: {message} (status {response.status_code}, content type {kind})",
        mirror=where,
        status=response.status_code,
        lasting=lasting,
        hint=hint,
    )


def _require_status(response: httpx.Response, wanted: set[int]) -> None:
    status = response.status_code
    if status in wanted:
        return
    where = shown(str(response.url))
    raise FetchError(
        f"{where}: expected status {' or '.join(map(str, sorted(wanted)))}, found {status}",
        mirror=where,
        status=status,
        retry_after=_retry_after(response.headers.get("retry-after", "")),
        lasting=status in _LASTING,
        hint=_HINTS.get(status),
    )


def _retry_after(value: str) -> float | None:
    """Return the seconds of a Retry-After header, which has a number or a date (RFC 9110, 10.2.3)."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        seconds = float(value)
    else:
        try:
            date = parsedate_to_datetime(value)
            seconds = (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


def _require_identity(response: httpx.Response) -> None:
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _bad(response, f"expected the bytes as they are, found the encoding {escape(encoding, limit=40)}")


def _require_range(response: httpx.Response, start: int, stop: int, size: int | None) -> None:
    asked = f"bytes {start}-{stop - 1}/{'*' if size is None else size}"
    said = response.headers.get_list("content-range")
    found = _CONTENT_RANGE.fullmatch(said[0]) if len(said) == 1 else None
    if found is None:
        what = escape(", ".join(said), limit=80) or "none"
        raise _bad(response, f"expected Content-Range {asked}, found {what}")
    first, last, total = map(int, found.groups())
    if (first, last) != (start, stop - 1) or total < stop or (size is not None and total != size):
        raise _bad(response, f"expected Content-Range {asked}, found {escape(said[0], limit=80)}")
    _require_length(response, stop - start)


def _require_whole(response: httpx.Response, start: int, stop: int, size: int | None) -> int:
    """Return how many bytes a response without a range may have."""
    if start:
        raise _bad(
            response,
            f"expected status 206 for the bytes from {start}, found the whole file",
            hint="name a mirror that serves ranges (Accept-Ranges: bytes)",
        )
    if size is None:
        return stop + 1  # whatever follows is not read
    # What lies there is not the file: the same request will get it again.
    _require_length(response, size, lasting=True, hint="another file, or a page, is at that URL: check it")
    return max(size, stop)


def _require_length(response: httpx.Response, nbytes: int, *, lasting: bool = False, hint: str | None = None) -> None:
    # Without a Content-Length the bytes are counted as they come.
    length = response.headers.get("content-length")
    if length is not None and length != str(nbytes):
        message = f"expected {nbytes} bytes, found a Content-Length of {escape(length, limit=40)}"
        raise _bad(response, message, lasting=lasting, hint=hint)


def _pieces(response: httpx.Response, nbytes: int) -> Iterator[bytes]:
    stream = response.extensions.get("network_stream")
    if isinstance(stream, _Stream):
        stream.begin_body(nbytes)
    return response.iter_raw()


# ---------------------------------------------------------------- below httpx


class _Stream(httpcore.NetworkStream):
    """A connection that measures how long it waits, and gives up on a peer that only keeps us waiting."""

    def __init__(self, inner: httpcore.NetworkStream, timing: Timing) -> None:
        self._inner = inner
        self._timing = timing
        self._head_until: float | None = None
        self._room = _MAX_HEAD_BYTES
        self._waited = 0.0
        self._got = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        before = time.monotonic()
        if self._head_until is not None:
            left = self._head_until - before
            if left <= 0:
                raise httpcore.ReadTimeout(f"no complete response head within {self._timing.headers:g} s")
            timeout = left if timeout is None else min(timeout, left)
        data = self._read(max(max_bytes, _PIECE_BYTES), None if timeout is None else before + timeout)
        self._room -= len(data)
        if self._room < 0:
            raise httpcore.RemoteProtocolError("expected content, found mostly what is sent around it")
        if self._head_until is None:
            self._measure(time.monotonic() - before, len(data))
        return data

    def _read(self, max_bytes: int, until: float | None) -> bytes:
        while True:
            _look_whether_to_stop()
            left = _POLL_SECONDS if until is None else until - time.monotonic()
            try:
                # Of 0 seconds the system would make a socket that never waits.
                return self._inner.read(max_bytes, max(0.001, min(left, _POLL_SECONDS)))
            except httpcore.ReadTimeout:
                if until is not None and time.monotonic() >= until:
                    raise

    def _measure(self, seconds: float, nbytes: int) -> None:
        # Only the waiting counts, so that a consumer who takes its time does not make its mirror look slow.
        self._waited += seconds
        self._got += nbytes
        if self._waited < self._timing.rate_window:
            return
        if self._got < self._timing.min_rate * self._waited:
            rate = self._got / self._waited
            raise httpcore.ReadTimeout(f"{rate:.0f} bytes a second, expected at least {self._timing.min_rate}")
        self._waited, self._got = 0.0, 0

    def begin_body(self, nbytes: int) -> None:
        """Be told that the response's head is complete, and how much of its content is wanted."""
        self._head_until = None
        self._room = 2 * nbytes + _FRAMING_BYTES
        self._waited, self._got = 0.0, 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)
        self._head_until = time.monotonic() + self._timing.headers
        self._room = _MAX_HEAD_BYTES

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        # Where it fails, httpcore closes the connection itself.
        made = _aside(
            lambda: self._inner.start_tls(ssl_context, server_hostname, timeout), unwanted=lambda made: made.close()
        )
        return _Stream(made, self._timing)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Connects to addresses that were checked, and to nothing that a name resolves to afterwards."""

    def __init__(self, timing: Timing, allow_private: frozenset[str]) -> None:
        self._timing = timing
        self._allow_private = allow_private
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        failure: Exception | None = None
        for address in _resolved(host, port, self._allow_private, timeout):
            try:
                stream = _aside(
                    lambda address=address: self._inner.connect_tcp(  # type: ignore[misc] # mypy has no type for it
                        address, port, timeout, local_address, socket_options
                    ),
                    unwanted=lambda made: made.close(),
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as err:
                failure = err
            else:
                _WATCHED.has_connected = True
                return _Stream(stream, self._timing)
        _WATCHED.has_connected = True
        raise failure or httpcore.ConnectError("no address")


def _resolved(host: str, port: int, allow_private: frozenset[str], timeout: float | None) -> list[str]:
    try:
        return _aside(lambda: resolve(host, port, allow_private=allow_private), timeout)
    except TimeoutError as err:
        message = f"cannot find the address of {escape(host)}: no answer within {timeout:g} s"
        raise FetchError(message, hint="check the URL, and how this machine looks up names") from err


def _aside(
    call: Callable[[], T], timeout: float | None = None, *, unwanted: Callable[[T], object] = lambda _: None
) -> T:
    """Return what a call of the system returns that nothing can end, from a thread that is left to itself if need be.

    Args:
        call: Ends some time, for example by a timeout of its own.
        timeout: Seconds to wait for it at most.
        unwanted: Told what the call returned where nobody waits for it any more.

    Raises:
        BaseException: What the call raised.
        TimeoutError: It took longer.
        FetchError: There is no thread to be had.
    """
    answer: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    is_left = threading.Event()

    def clear_away() -> None:
        # Whichever of the two threads comes last finds both the answer and that nobody waits; one of them takes it.
        with contextlib.suppress(queue.Empty):
            value, err = answer.get_nowait()
            if err is None:
                unwanted(value)  # type: ignore[arg-type] # None only where the call returns that

    def work() -> None:
        try:
            answer.put((call(), None))
        except BaseException as err:  # noqa: BLE001 - raised again below
            answer.put((None, err))
        if is_left.is_set():
            clear_away()

    # A daemon: the process does not wait for it either.
    try:
        threading.Thread(target=work, name="safeload-connect", daemon=True).start()
    except RuntimeError as why:  # the system has no thread for us
        raise FetchError(f"cannot connect: {reason(why)}", hint="use fewer --connections") from why
    until = None if timeout is None else time.monotonic() + timeout
    try:
        value, err = _awaited(answer, until)
    except BaseException:
        is_left.set()
        clear_away()
        raise
    if err is None:
        return value  # type: ignore[return-value] # as above
    try:
        raise err
    finally:
        # Its traceback leads to this frame: whatever the frames above hold would stay until the garbage is collected.
        del err


def _awaited(answer: queue.SimpleQueue[T], until: float | None) -> T:
    while True:
        _look_whether_to_stop()
        try:
            return answer.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError from None


class _Transport(httpx.BaseTransport):
    """httpx's own transport, with a backend of ours below it, which that one does not take."""

    def __init__(self, context: ssl.SSLContext, max_connections: int, backend: httpcore.NetworkBackend) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=context,
            max_connections=max_connections,
            max_keepalive_connections=max_connections,
            keepalive_expiry=30.0,
            http1=True,
            http2=False,
            network_backend=backend,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        wire = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        with _as_httpx():
            answer = self._pool.handle_request(wire)
        if not isinstance(answer.stream, Iterable):
            raise httpx.ReadError("no body")
        return httpx.Response(
            status_code=answer.status,
            headers=answer.headers,
            stream=_Body(answer.stream),
            extensions=answer.extensions,
        )

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, stream: Iterable[bytes]) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx():
            yield from self._stream

    def close(self) -> None:
        if hasattr(self._stream, "close"):
            self._stream.close()


_QUOTING: Final = "illegal header line"
"""Where a message of h11 begins that quotes a line of a head, which may be the one that says where a redirect leads."""

_HTTPCORE_ERRORS: Final = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.ProxyError,
    httpcore.UnsupportedProtocol,
)


@contextmanager
def _as_httpx() -> Iterator[None]:
    try:
        yield
    except _HTTPCORE_ERRORS as err:
        if str(err).startswith(_QUOTING):
            err = httpcore.RemoteProtocolError(_QUOTING)
        raise httpx.TransportError(str(err) or type(err).__name__) from err
