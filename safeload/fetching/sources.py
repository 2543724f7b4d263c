"""Sources: where the bytes of a checkpoint come from. Each reads ranges of files by name; none of them is believed.

A source is named by `https://host/folder`, by `http://` on loopback or where that was allowed, `hf://org/name@revision`,
a local directory, or whatever URL the package fsspec knows (`s3://bucket/folder`). Names, sizes and digests come from a
signed manifest. Where there is none, a source can be asked what it has: its answer is a claim, with its names checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from safeload.errors import ConfigError, FetchError, FileSetError, Finding, StagingError, escape, reason
from safeload.fetching.http import Client, Token, shown
from safeload.files import Root, WalkedFile, read_into
from safeload.manifest import MAX_FILES, check_path
from safeload.trust.strict_json import MAX_INTEGER

HUB_ENDPOINT: Final = "https://huggingface.co"
"""Where `hf://` leads unless another endpoint is named."""

PIECE_BYTES: Final = 1024 * 1024
"""How much a local or an fsspec source hands out at a time: small beside a chunk of 16 MiB, large beside a call."""

FSSPEC_RANGE_BYTES: Final = 4 * 1024 * 1024
"""How much of an object is asked for at a time, and held: one request of a store costs some ten milliseconds."""

MAX_PAGE_BYTES: Final = 8 * 1024 * 1024
"""Longest page of a hub's listing. A page has up to 1,000 entries of some 300 bytes each."""

MAX_PAGES: Final = 2 * MAX_FILES // 1000
"""Most pages of a listing: those of the most files that a manifest may have, and as many again for directories."""

MAX_TOKEN_BYTES: Final = 4096
"""Longest access token; those of the hub have 37 characters, signed ones (JWT) up to a few thousand."""

_HUB_URL: Final = re.compile(
    r"hf://(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/+-]{0,254}))?"
)
_HTTP_URL: Final = re.compile(r"https?://[^/?#@\\]+(?P<path>/[^?#]*)?(?P<rest>[?#].*)?", re.IGNORECASE)
_FSSPEC_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^?#\\\x00-\x20\x7f]+")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_TOKEN: Final = re.compile(r"[!-~]+")
_UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
"""What stands for itself in a path of a URL (RFC 3986, 2.3)."""


@dataclass(frozen=True, slots=True)
class RemoteSize:
    """What a source says of one file.

    Attributes:
        size: Length in bytes.
        etag: What names this state of the file, where the source has such a thing; ranges of another state are refused.
    """

    size: int
    etag: str | None = None


class Source(Protocol):
    """A folder of files somewhere.

    Attributes:
        name: What to call it in reports, with no credentials in it.
    """

    name: str

    def read(self, path: str, start: int, stop: int, size: int, *, etag: str | None = None) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file of `size` bytes, in pieces; exactly those, or an error.

        Raises:
            FetchError: The source cannot be reached, or answers with something else.
        """
        ...

    def stat(self, path: str) -> RemoteSize:
        """Return what the source says of one file.

        Raises:
            FetchError: It says nothing of use.
        """
        ...

    def files(self) -> tuple[WalkedFile, ...]:
        """Return what the source says that it has, sorted by path; a name that cannot be used has a finding.

        Raises:
            FetchError: It cannot be reached, or its answer makes no sense.
            ConfigError: It has no listing.
        """
        ...

    def facts(self) -> dict[str, object]:
        """Return what a report says of the source: its name, and the state that was read where that has a name."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """How sources may be reached. Nothing of it is taken from the environment.

    Attributes:
        endpoint: Base URL of the hub that `hf://` stands for.
        token: Access token, or None for none.
        token_origin: URL of the one origin that the token is sent to, however many sources are opened; None for the
            endpoint's.
        allow_private: Hosts that may resolve to private or loopback addresses.
        allow_http: Hosts that may be asked without TLS; loopback always may.
        connections: Most connections to one source.
    """

    endpoint: str = HUB_ENDPOINT
    token: str | None = None
    token_origin: str | None = None
    allow_private: frozenset[str] = frozenset()
    allow_http: frozenset[str] = frozenset()
    connections: int = 8

    def __repr__(self) -> str:
        return f"<Access: {self.endpoint}, {'with' if self.token else 'without'} a token>"


DEFAULT_ACCESS: Final = Access()
"""The public hub and public addresses, over TLS and without a token."""


def is_remote(text: str) -> bool:
    """Whether an argument names something by URL, and not a path."""
    return _SCHEME.match(text) is not None


def read_token(path: str | Path) -> str:
    """Return the access token that a file holds, without the line's end.

    Raises:
        ConfigError: The file cannot be read, or does not hold one line of printable ASCII.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read the token {escape(str(path))}: {reason(err)}", hint="check the path") from err
    text = data.decode("latin-1").rstrip("\r\n")
    if len(data) > MAX_TOKEN_BYTES or _TOKEN.fullmatch(text) is None:
        # The content is a secret, and not quoted.
        raise ConfigError(
            f"{escape(str(path))}: expected one token of printable ASCII, at most {MAX_TOKEN_BYTES} bytes, found "
            "something else",
            hint="write the token and nothing else to the file",
        )
    return text


@contextmanager
def open_source(text: str, access: Access = DEFAULT_ACCESS) -> Iterator[Source]:
    """Lend the source that a text names.

    Args:
        text: A URL or a directory; see the head of this module.
        access: How it may be reached.

    Raises:
        ConfigError: The text names no source that can be used, or the package for it is not installed.
        StagingError: A local directory cannot be opened.
    """
    with ExitStack() as stack:
        if not is_remote(text):
            yield DirectorySource(stack.enter_context(Root(text)), text)
        elif text.startswith("hf://"):
            yield _open_hub(text, access, stack)
        elif _HTTP_URL.match(text) is not None or text.lower().startswith(("http://", "https://")):
            url = _checked_url(text)
            yield HttpSource(stack.enter_context(_client(access)), url)
        else:
            yield FsspecSource(text)


def _client(access: Access) -> Client:
    return Client(
        token=None if access.token is None else Token(access.token_origin or access.endpoint, access.token),
        allow_private=access.allow_private,
        allow_http=access.allow_http,
        max_connections=access.connections,
    )


def _checked_url(text: str) -> str:
    """Return an http or https URL that can be asked for, and shown, as it is.

    Raises:
        ConfigError: It is no such URL, or has a user's name or a password in it.
    """
    if not text.isascii() or not text.isprintable() or " " in text or _HTTP_URL.fullmatch(text) is None:
        raise ConfigError(
            f"expected a URL such as https://host/folder, found {escape(_bare(text))!r}",
            hint="spell other characters as %XX, and leave user and password out: --token-file holds a token",
        )
    return text


def _bare(url: str) -> str:
    """Return what is left of a malformed URL once all that may be a secret is gone."""
    return re.split(r"[?#]", url, maxsplit=1)[0].rpartition("@")[2]


def _joined(base: str, path: str) -> str:
    """Return the URL of a file below a folder's.

    Raises:
        ConfigError: Nothing is below that one.
    """
    found = _HTTP_URL.fullmatch(base)
    if found is None or found["rest"]:
        raise ConfigError(
            f"expected the URL of a folder, found one with a query or a fragment: {shown(base)}",
            hint="such a URL names one file, and can only be scanned",
        )
    return f"{base.rstrip('/')}/{quoted(path)}"


def quoted(path: str) -> str:
    """Return a path as it stands in a URL: each byte that means something there, and each beyond ASCII, as %XX."""
    return "/".join(
        "".join(chr(byte) if byte in _UNRESERVED else f"%{byte:02X}" for byte in component.encode())
        for component in path.split("/")
    )


class HttpSource:
    """A folder on a web server, or one file of it."""

    def __init__(self, client: Client, url: str) -> None:
        """Name the folder.

        Args:
            client: Reads from the server, and decides which servers may be asked.
            url: Of a folder; or of one file, whose path is then the empty one.
        """
        self.name = shown(url)
        self._client = client
        self._url = url

    def locate(self, path: str) -> str:
        """Return the URL of a file; of the source's own, for the empty path."""
        return _joined(self._url, path) if path else self._url

    def require_folder(self) -> None:
        """Check that files can lie below the URL.

        Raises:
            ConfigError: It has a query or a fragment, and names one file.
        """
        _joined(self._url, "")

    def read(self, path: str, start: int, stop: int, size: int, *, etag: str | None = None) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file; see `Source.read`."""
        return self._client.read(self.locate(path), start, stop, size=size, etag=etag)

    def stat(self, path: str) -> RemoteSize:
        """Return the size and the state of one file; see `Source.stat`.

        Raises:
            FetchError: The server does not say how long the file is, or says that it has no ranges.
        """
        url = self.locate(path)
        found = self._client.stat(url)
        if found.size is None:
            raise FetchError(
                f"{shown(url)}: expected the server to say how long the file is, found no length",
                hint="the page of a folder? name the URL of a file; or fetch what a manifest lists",
            )
        return RemoteSize(found.size, found.etag)

    def files(self) -> tuple[WalkedFile, ...]:
        """Refuse: a web server has no listing that could be relied on.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            f"{self.name} has no list of its files",
            hint="name the manifest that lists them with -m; or name a file's URL, an hf:// repository or a directory",
        )

    def facts(self) -> dict[str, object]:
        """Return what a report says of the source."""
        return {"source": self.name}


def _open_hub(text: str, access: Access, stack: ExitStack) -> HubSource:
    found = _HUB_URL.fullmatch(text)
    if found is None or ".." in text:
        raise ConfigError(
            f"expected hf://org/name or hf://org/name@revision, found {escape(text)!r}",
            hint="for example hf://xai-org/grok-1@main",
        )
    endpoint = _checked_url(access.endpoint).rstrip("/")
    client = stack.enter_context(_client(access))
    return HubSource(client, endpoint, found["repository"], found["revision"] or "main")


class HubSource:
    """A revision of a model repository on a hub that has the API of the Hugging Face Hub."""

    def __init__(self, client: Client, endpoint: str, repository: str, revision: str) -> None:
        """Name the repository.

        Args:
            client: Reads from the hub.
            endpoint: Base URL of the hub.
            repository: `org/name`.
            revision: A branch, a tag or a commit.
        """
        self.name = f"hf://{repository}@{revision}"
        self.commit: str | None = None
        self._client = client
        self._endpoint = endpoint
        self._repository = repository
        self._revision = revision

    def locate(self, path: str) -> str:
        """Return the URL of a file: in the commit that the revision was found to be, once that was asked."""
        revision = quoted(self.commit or self._revision).replace("/", "%2F")
        return f"{self._endpoint}/{quoted(self._repository)}/resolve/{revision}/{quoted(path)}"

    def read(self, path: str, start: int, stop: int, size: int, *, etag: str | None = None) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file; see `Source.read`."""
        return self._client.read(self.locate(path), start, stop, size=size, etag=etag)

    def stat(self, path: str) -> RemoteSize:
        """Return the size of one file; see `Source.stat`."""
        found = self._client.stat(self.locate(path))
        if found.size is None:
            raise FetchError(f"{self.name}: expected the hub to say how long {escape(path)} is, found no length")
        return RemoteSize(found.size, found.etag)

    def files(self) -> tuple[WalkedFile, ...]:
        """Return the files of the revision, which is pinned to its commit first; see `Source.files`."""
        self._pin()
        path = f"/api/models/{quoted(self._repository)}/tree/{self.commit}?recursive=true"
        url: str | None = f"{self._endpoint}{path}"
        entries: list[tuple[str, int]] = []
        for _ in range(MAX_PAGES):
            if url is None:
                return _checked(entries)
            body, url = self._client.get_page(url, limit=MAX_PAGE_BYTES)
            entries += self._entries(body)
            if len(entries) > MAX_FILES:
                break
            if url is not None and not url.startswith(f"{self._endpoint}{path.partition('?')[0]}?"):
                raise self._nonsense("the next page at the same place")
        raise FetchError(f"{self.name}: expected at most {MAX_FILES} files in at most {MAX_PAGES} pages, found more")

    def facts(self) -> dict[str, object]:
        """Return what a report says of the source, the commit among it."""
        return {"source": self.name, "endpoint": shown(self._endpoint), "commit": self.commit}

    def _pin(self) -> None:
        """Find which commit the revision is now, so that one run sees one state of the repository."""
        if self.commit is not None:
            return
        revision = quoted(self._revision).replace("/", "%2F")
        url = f"{self._endpoint}/api/models/{quoted(self._repository)}/revision/{revision}"
        answer = self._json(self._client.get(url, limit=MAX_PAGE_BYTES))
        commit = answer.get("sha") if isinstance(answer, dict) else None
        if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
            raise self._nonsense("a commit")
        self.commit = commit

    def _entries(self, body: bytes) -> Iterator[tuple[str, int]]:
        answer = self._json(body)
        if not isinstance(answer, list):
            raise self._nonsense("a list of files")
        for entry in answer:
            if not isinstance(entry, dict):
                raise self._nonsense("a list of files")
            kind, path, size = entry.get("type"), entry.get("path"), entry.get("size")
            if kind == "directory":
                continue
            if kind != "file" or not isinstance(path, str) or type(size) is not int or not 0 <= size <= MAX_INTEGER:
                raise self._nonsense("files with a path and a size")
            yield path, size

    def _json(self, body: bytes) -> Any:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as err:
            raise self._nonsense("JSON") from err

    def _nonsense(self, expected: str) -> FetchError:
        return FetchError(
            f"{self.name}: expected {expected} from the hub's API at {shown(self._endpoint)}, found something else",
            mirror=shown(self._endpoint),
            lasting=True,
            hint="check --hf-endpoint",
        )


def _checked(entries: list[tuple[str, int]]) -> tuple[WalkedFile, ...]:
    """Return files by the names that somebody claims, with a finding for each name that cannot be used."""
    taken: set[str] = set()
    files = []
    for path, size in sorted(entries):
        finding: Finding | None = None
        try:
            check_path(path)
        except ValueError as err:
            finding = Finding("bad-path", f"expected the path of a file below a directory, found: {err}", file=path)
        if finding is None and path.casefold() in taken:
            # One of the two would take the other's place where case does not count.
            message = "expected paths that differ in more than case, found two that do not"
            finding = Finding("duplicate-path", message, file=path)
        taken.add(path.casefold())
        files.append(WalkedFile(path, size, finding=finding))
    return tuple(files)


class DirectorySource:
    """A directory on this machine, as far from trusted as any server: nothing in it is followed."""

    def __init__(self, root: Root, name: str) -> None:
        """Name the directory.

        Args:
            root: It, held open.
            name: What the user called it.
        """
        self.name = name
        self._root = root

    def read(self, path: str, start: int, stop: int, size: int, *, etag: str | None = None) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file; see `Source.read`. There is no etag to hold it against."""
        del etag
        try:
            fd = self._root.open(path)
            try:
                found = os.fstat(fd).st_size
                if found != size:
                    raise FetchError(
                        f"{escape(self.name)}: expected {size:,} bytes in {escape(path)}, found {found:,}",
                        lasting=True,
                        hint="this mirror has another version of the file",
                    )
                yield from self._pieces(fd, path, start, min(stop, size))
            finally:
                os.close(fd)
        except (FileSetError, StagingError, OSError) as err:
            raise self._unusable(err) from err

    def _pieces(self, fd: int, path: str, start: int, stop: int) -> Iterator[bytes]:
        at = start
        while at < stop:
            piece = bytearray(min(PIECE_BYTES, stop - at))
            with memoryview(piece) as view:
                got = read_into(fd, view, at, path=path)
            if not got:
                message = f"expected {stop:,} bytes of {escape(path)}, found the end of the file after {at:,}"
                raise FetchError(f"{escape(self.name)}: {message}")
            at += got
            yield bytes(piece[:got])

    def stat(self, path: str) -> RemoteSize:
        """Return the size of one file; see `Source.stat`."""
        try:
            fd = self._root.open(path)
            try:
                return RemoteSize(os.fstat(fd).st_size)
            finally:
                os.close(fd)
        except (FileSetError, StagingError, OSError) as err:
            raise self._unusable(err) from err

    def files(self) -> tuple[WalkedFile, ...]:
        """Return what is in the directory; links and whatever else cannot be read have a finding."""
        walked = tuple(self._root.walk())
        findings = {file.path: file.finding for file in walked}
        # A name that a manifest cannot have is as bad here as one from a server.
        checked = _checked([(file.path, file.size) for file in walked])
        return tuple(WalkedFile(file.path, file.size, finding=findings[file.path] or file.finding) for file in checked)

    def facts(self) -> dict[str, object]:
        """Return what a report says of the source."""
        return {"source": self.name}

    def _unusable(self, err: Exception) -> FetchError:
        why = reason(err) if isinstance(err, OSError) else str(err)
        # A file that is not there, or is a link, will be so in a second; other files may well be there.
        return FetchError(f"{escape(self.name)}: {why}", lasting=isinstance(err, FileSetError))


class FsspecSource:
    """A folder of whatever the package fsspec reads: object stores, mostly.

    Its drivers take credentials from where they always do, environment variables among them, and connect to wherever
    their configuration says. What they bring is trusted no more than anything else; where they go is not ours to bound.
    """

    def __init__(self, url: str) -> None:
        """Find the driver.

        Args:
            url: Such as `s3://bucket/folder`.

        Raises:
            ConfigError: The URL chains several drivers, or there is no driver for it.
        """
        if "::" in url or "@" in url or _FSSPEC_URL.fullmatch(url) is None:
            raise ConfigError(
                f"expected a URL such as s3://bucket/folder, found {escape(_bare(url))!r}",
                hint="one driver, no credentials and no query in it",
            )
        self.name = url
        self._url = url.rstrip("/")
        try:
            import fsspec  # type: ignore[import-untyped] # the package has no types
        except ImportError as err:
            raise ConfigError(
                f"{escape(url)} needs the package fsspec", hint="install safeload's extra `fsspec`, and the driver"
            ) from err
        try:
            self._system, self._root = fsspec.url_to_fs(self._url)
        except Exception as err:  # drivers raise what they like; so below
            lacks_driver = isinstance(err, ImportError | ValueError)
            hint = "install the driver: s3fs for s3://, gcsfs for gs://" if lacks_driver else "check the URL"
            why = reason(err) or type(err).__name__
            raise ConfigError(f"cannot use {escape(url)}: {why}", hint=hint) from err

    def read(self, path: str, start: int, stop: int, size: int, *, etag: str | None = None) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file, a range at a time; see `Source.read`."""
        del size, etag
        for at in range(start, stop, FSSPEC_RANGE_BYTES):
            end = min(at + FSSPEC_RANGE_BYTES, stop)
            try:
                data = self._system.cat_file(self._path(path), start=at, end=end)
            except Exception as err:
                raise self._unusable(path, err) from err
            if not isinstance(data, bytes) or len(data) != end - at:
                raise FetchError(
                    f"{escape(self.name)}: expected bytes {at:,} to {end:,} of {escape(path)}, found another number"
                )
            yield data

    def stat(self, path: str) -> RemoteSize:
        """Return the size of one file; see `Source.stat`."""
        try:
            found = self._system.info(self._path(path))
        except Exception as err:
            raise self._unusable(path, err) from err
        size = found.get("size") if isinstance(found, dict) else None
        if type(size) is not int or size < 0:
            raise FetchError(f"{escape(self.name)}: expected the size of {escape(path)}, found none")
        return RemoteSize(size)

    def files(self) -> tuple[WalkedFile, ...]:
        """Return what the store lists below the folder; see `Source.files`."""
        try:
            listed = self._system.find(self._root, detail=True)
            if list(listed) == [self._root]:
                # The URL is that of one file; what it is called is in its last component.
                self.name = self.name.rstrip("/").rpartition("/")[0]
                self._root = self._root.rpartition("/")[0]
            entries = [(str(name).removeprefix(f"{self._root}/"), info["size"]) for name, info in listed.items()]
        except Exception as err:
            raise self._unusable("", err) from err
        if len(entries) > MAX_FILES:
            raise FetchError(f"{escape(self.name)}: expected at most {MAX_FILES} files, found {len(entries)}")
        if any(type(size) is not int or size < 0 for _, size in entries):
            raise FetchError(f"{escape(self.name)}: expected a size for each file, found none for some")
        return _checked(entries)

    def facts(self) -> dict[str, object]:
        """Return what a report says of the source."""
        return {"source": self.name}

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    def _unusable(self, path: str, err: Exception) -> FetchError:
        return FetchError(
            f"{escape(self.name)}: cannot read {escape(path) or 'the folder'}: {reason(err)}",
            lasting=isinstance(err, FileNotFoundError),
        )
