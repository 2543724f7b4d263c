"""A web server on loopback that serves ranges of files, and counts what it is asked for and what it sends."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


@dataclass
class RangeServer:
    """What is served, and how.

    Attributes:
        files: Content by path of the URL: bytes, or a file on disk.
        pages: JSON by path of the URL with its query, and the `Link` header that goes with it.
        redirects: Where a path of the URL has moved to.
        ranges: Whether ranges are served; without, every answer is the whole file.
        fail_first: How many requests for content get status 503 before one is served.
        etag: The validator of every file.
        requests: Method, path and headers of each request.
        nbytes: Bytes of content that were sent.
    """

    files: dict[str, bytes | Path] = field(default_factory=dict)
    pages: dict[str, tuple[Any, str | None]] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    ranges: bool = True
    fail_first: int = 0
    etag: str | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    nbytes: int = 0
    url: str = ""
    before: Callable[[str], None] = lambda _: None

    def paths(self, method: str = "GET") -> list[str]:
        """Return what was asked for, in order."""
        return [path for asked, path, _ in self.requests if asked == method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: RangeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        state = self.state
        state.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.path in state.pages:
            value, link = state.pages[self.path]
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self._head(200, len(body), {"Link": link} if link else {})
            self.wfile.write(body if with_body else b"")
            return
        if self.path in state.redirects:
            self._head(302, 0, {"Location": state.redirects[self.path]})
            return
        state.before(self.path)
        content = state.files.get(self.path)
        if content is None:
            self._head(404, 0)
            return
        if with_body and state.fail_first > 0:
            state.fail_first -= 1
            self._head(503, 0)
            return
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        headers = {"ETag": state.etag} if state.etag else {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        is_same = self.headers.get("If-Range") in {None, state.etag}
        if state.ranges and asked and is_same and with_body:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
            self._head(206, stop - start, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"})
        else:
            start, stop = 0, size
            self._head(200, size, {**headers, **({"Accept-Ranges": "bytes"} if state.ranges else {})})
        if not with_body:
            return
        try:
            for at in range(start, stop, 1 << 16):
                end = min(at + (1 << 16), stop)
                self.wfile.write(_piece(content, at, end))
                state.nbytes += end - at
        except ConnectionError:
            self.close_connection = True

    def _head(self, status: int, length: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()


def _piece(content: bytes | Path, start: int, stop: int) -> bytes:
    if isinstance(content, bytes):
        return content[start:stop]
    with content.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


@contextmanager
def serving() -> Iterator[RangeServer]:
    """Lend a server that runs; `url` is where it is, without a slash at the end."""
    state = RangeServer()
    handler = type("Handler", (_Handler,), {"state": state})
    with ThreadingHTTPServer((HOST, 0), handler) as server:
        server.daemon_threads = True
        state.url = f"http://{HOST}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
