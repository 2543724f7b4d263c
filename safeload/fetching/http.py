"""HTTP as RFC 9110 has it and no more: what a server sends is taken exactly as asked for, or not at all.

Nothing that a server says decides anything: not the size, not the encoding, not where else to ask. The digests are
checked elsewhere; here a server is kept from costing time, memory, disk or credentials.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

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

_PIECE_BYTES: Final = 512 * 1024
"""Read from a socket at a time: few calls, and still hashed while in the processor's cache."""

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_LASTING: Final = frozenset({400, 401, 403, 404, 405, 410, 414, 416, 451})
"""Statuses that the same request gets again."""

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
        transport = _Transport(_context(ca_file), max_connections, _Backend(self._timing, self._allow_private))
        # `trust_env`: proxies, certificates and .netrc of the environment decide nothing.
        self._http = httpx.Client(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers={"user-agent": user_agent},
            timeout=httpx.Timeout(self._timing.read, connect=self._timing.connect, pool=60.0),
        )

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close every connection."""
        self._http.close()

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
            for piece in _pieces(response):
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
            for piece in _pieces(response):
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
            sent = {**headers, "accept": "*/*", "accept-encoding": "identity"}
            if self._token is not None and with_token and origin == self._token_origin:
                sent["authorization"] = f"Bearer {self._token.secret}"
            with _plainly(str(here)):
                response = self._http.send(self._http.build_request(method, here, headers=sent), stream=True)
            try:
                if response.status_code not in _REDIRECTS:
                    with _plainly(str(here)):
                        yield response
                    return
                with _plainly(str(here)):
                    following = here.join(response.headers.get("location", ""))
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
def _plainly(url: str) -> Iterator[None]:
    """Turn whatever the transport raises into a `FetchError` that names the mirror."""
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
        raise FetchError(f"cannot read {where}: {why}", mirror=where) from err


def _bad(response: httpx.Response, message: str, *, lasting: bool = False) -> FetchError:
    where = shown(str(response.url))
    kind = escape(response.headers.get("content-type", "none"), limit=60)
    return FetchError(
        f"{where}: {message} (status {response.status_code}, content type {kind})",
        mirror=where,
        status=response.status_code,
        lasting=lasting,
    )


def _require_status(response: httpx.Response, wanted: set[int]) -> None:
    status = response.status_code
    if status in wanted:
        return
    where = shown(str(response.url))
    hints = {401: "give a token that may read it", 403: "give a token that may read it"}
    raise FetchError(
        f"{where}: expected status {' or '.join(map(str, sorted(wanted)))}, found {status}",
        mirror=where,
        status=status,
        retry_after=_retry_after(response.headers.get("retry-after", "")),
        lasting=status in _LASTING,
        hint=hints.get(status),
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
        raise _bad(response, f"expected status 206 for the bytes from {start}, found the whole file")
    if size is None:
        return stop + 1  # whatever follows is not read
    _require_length(response, size)
    return max(size, stop)


def _require_length(response: httpx.Response, nbytes: int) -> None:
    # Without a Content-Length the bytes are counted as they come.
    length = response.headers.get("content-length")
    if length is not None and length != str(nbytes):
        raise _bad(response, f"expected {nbytes} bytes, found a Content-Length of {escape(length, limit=40)}")


def _pieces(response: httpx.Response) -> Iterator[bytes]:
    stream = response.extensions.get("network_stream")
    if isinstance(stream, _Stream):
        stream.begin_body()
    return response.iter_raw()


# ---------------------------------------------------------------- below httpx


class _Stream(httpcore.NetworkStream):
    """A connection that measures how long it waits, and gives up on a peer that only keeps us waiting."""

    def __init__(self, inner: httpcore.NetworkStream, timing: Timing) -> None:
        self._inner = inner
        self._timing = timing
        self._head_until: float | None = None
        self._waited = 0.0
        self._got = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        before = time.monotonic()
        if self._head_until is not None:
            left = self._head_until - before
            if left <= 0:
                raise httpcore.ReadTimeout(f"no complete response head within {self._timing.headers:g} s")
            timeout = left if timeout is None else min(timeout, left)
        data = self._inner.read(max(max_bytes, _PIECE_BYTES), timeout)
        if self._head_until is None:
            self._measure(time.monotonic() - before, len(data))
        return data

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

    def begin_body(self) -> None:
        """Be told that the response's head is complete."""
        self._head_until = None
        self._waited, self._got = 0.0, 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)
        self._head_until = time.monotonic() + self._timing.headers

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, timeout), self._timing)

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
        for address in resolve(host, port, allow_private=self._allow_private):
            try:
                stream = self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as err:
                failure = err
            else:
                return _Stream(stream, self._timing)
        raise failure or httpcore.ConnectError("no address")


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

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.close()

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
        raise httpx.TransportError(str(err) or type(err).__name__) from err
