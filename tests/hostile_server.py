"""A mirror on loopback that serves files honestly, or lies in whatever way a test asks for."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias
from urllib.parse import unquote

PIECE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Request:
    """One request, as it came."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0]).lstrip("/")

    def range(self, size: int) -> tuple[int, int] | None:
        """Return the bytes [start, stop) that are asked for, None for all."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return None if found is None else (int(found[1]), min(int(found[2]) + 1, size))


class Reply:
    """Writes a response, byte by byte if need be. Raises BrokenPipeError and the like where the client has gone."""

    def __init__(self, connection: socket.socket, server: HostileServer) -> None:
        self._connection = connection
        self._server = server
        self.stays_open = False

    def raw(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            self._connection.sendall(piece)
            with self._server.lock:
                self._server.n_sent += len(piece)

    def head(self, status: int, **headers: object) -> None:
        lines = [f"HTTP/1.1 {status} x", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        self.raw("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def honest(self, request: Request, data: bytes | None, **more: object) -> None:
        """Answer as RFC 9110 has it."""
        if data is None:
            self.head(404, Content_Length=0)
        elif (asked := request.range(len(data))) is None:
            self.head(200, Content_Length=len(data), Accept_Ranges="bytes", **more)
            if request.method != "HEAD":
                self.raw(data)
        else:
            start, stop = asked
            said = f"bytes {start}-{stop - 1}/{len(data)}"
            self.head(206, Content_Length=stop - start, Content_Range=said, **more)
            self.raw(data[start:stop])
        self.stays_open = True


Behavior: TypeAlias = Callable[[Request, Reply, bytes | None], None]


def honest(request: Request, reply: Reply, data: bytes | None) -> None:
    reply.honest(request, data)


class HostileServer:
    """Serves bytes by path from a thread for each connection. Use it as a context manager."""

    def __init__(
        self, files: Mapping[str, bytes], behavior: Behavior = honest, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.files = dict(files)
        self.behavior = behavior
        self.requests: list[Request] = []
        self.n_sent = 0
        self.n_connections = 0
        self.most_at_once = 0
        self.lock = threading.Lock()
        self._tls = tls
        self._open: set[socket.socket] = set()
        self._at_work = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self.lock:
            left = list(self._open)
        for connection in left:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self.lock:
            self.n_connections += 1
            self._open.add(connection)
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            for request in self._read(connection):
                reply = Reply(connection, self)
                with self.lock:
                    self.requests.append(request)
                    self._at_work += 1
                    self.most_at_once = max(self.most_at_once, self._at_work)
                try:
                    self.behavior(request, reply, self.files.get(request.path))
                finally:
                    with self.lock:
                        self._at_work -= 1
                if not reply.stays_open:
                    break
        except (OSError, ValueError):
            pass  # the client went away, as it should
        finally:
            with self.lock:
                self._open.discard(connection)
            connection.close()

    @staticmethod
    def _read(connection: socket.socket) -> Iterator[Request]:
        with connection.makefile("rb") as lines:
            while first := lines.readline():
                method, target, _ = first.decode("latin-1").split()
                headers = {}
                while line := lines.readline().decode("latin-1").strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                yield Request(method, target, headers)
