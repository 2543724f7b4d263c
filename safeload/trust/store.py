"""Which keys are trusted, for which streams, and how many of them must have signed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from safeload.errors import ConfigError, ManifestError, escape
from safeload.trust import strict_json
from safeload.trust.dsse import decode_base64
from safeload.trust.keys import PUBLIC_PEM_MARK, KeyKind, PublicKey

MAX_TRUST_BYTES = 1024 * 1024
"""Longest trust file: 1 MiB is room for some thousand keys."""

_MAX_DEPTH = 8
"""File, list of publishers, publisher, list of globs make four."""

GIVEN_KEYS = "keys given"
"""Name of the publisher that stands for keys which the caller named one by one."""

Trust: TypeAlias = "TrustStore | str | Path | PublicKey | Sequence[str | Path | PublicKey | TrustStore]"
"""What a caller may name as trusted."""


@dataclass(frozen=True, slots=True)
class Publisher:
    """Somebody who may sign some streams.

    Attributes:
        name: What to call them.
        streams: Globs over stream names: `*` stands for any run of characters, `/` included, `?` for any one.
        threshold: How many of their keys must have signed.
        keyids: Their keys, each once.
    """

    name: str
    streams: tuple[str, ...]
    threshold: int
    keyids: tuple[str, ...]

    def may_sign(self, stream: str) -> bool:
        """Whether one of the globs fits the stream's whole name; case matters."""
        return any(fnmatchcase(stream, glob) for glob in self.streams)


@dataclass(frozen=True, slots=True)
class TrustStore:
    """Proves that every publisher's threshold can be met by distinct keys that are all at hand.

    Attributes:
        keys: Every key, by its keyid.
        publishers: At least one; the first that fits a manifest is the one that is named in reports.
        version: Counts the store's revisions; 0 where it was made of keys alone.

    Raises:
        ConfigError: A keyid is not that of its key, unknown or listed twice, a threshold is not within 1 and the
            number of keys, or there is no publisher.
    """

    keys: Mapping[str, PublicKey]
    publishers: tuple[Publisher, ...]
    version: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", MappingProxyType(dict(self.keys)))
        for keyid, key in self.keys.items():
            if keyid != key.keyid:
                raise ConfigError(f"expected keyid {key.keyid} for key {escape(key.name)!r}, found {escape(keyid)}")
        if not self.publishers:
            raise ConfigError("expected at least one trusted key", hint="name one with --trust KEY.pub")
        for publisher in self.publishers:
            self._check(publisher)

    def _check(self, publisher: Publisher) -> None:
        who = f"publisher {escape(publisher.name)!r}"
        distinct = set(publisher.keyids)
        if len(distinct) != len(publisher.keyids):
            raise ConfigError(f"{who}: expected each keyid once, found one twice")
        if unknown := sorted(distinct - self.keys.keys()):
            raise ConfigError(f"{who}: keyid {escape(unknown[0])} is not among the keys")
        if not 1 <= publisher.threshold <= len(distinct):
            raise ConfigError(f"{who}: expected a threshold within 1 and {len(distinct)}, found {publisher.threshold}")

    @classmethod
    def of_keys(cls, keys: Iterable[PublicKey]) -> TrustStore:
        """Return a store in which any one of the keys may sign any stream.

        Raises:
            ConfigError: There is no key.
        """
        by_keyid = {key.keyid: key for key in keys}
        return cls(by_keyid, (Publisher(GIVEN_KEYS, ("*",), 1, tuple(by_keyid)),) if by_keyid else ())

    @classmethod
    def parse(cls, data: bytes, *, source: str = "trust store") -> TrustStore:
        """Return the store that a trust file states.

        Args:
            data: The file's bytes: strict JSON. They are not signed: who may write the file decides what is trusted.
            source: What to call it in messages.

        Raises:
            ConfigError: It is no such file, has an unknown field or a wrong type, or breaks a rule of `TrustStore`.
        """
        try:
            value = strict_json.loads(data, max_bytes=MAX_TRUST_BYTES, max_depth=_MAX_DEPTH)
            file = _StoreFile.model_validate(value)
            keys = {keyid: _key(keyid, entry) for keyid, entry in file.keys.items()}
            publishers = tuple(Publisher(p.name, p.streams, p.threshold, p.keyids) for p in file.publishers)
            return cls(keys, publishers, file.version)
        except ManifestError as err:
            raise ConfigError(f"{escape(source)}: {err.findings[0].message}") from err
        except ValidationError as err:
            problem = err.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(str(part) for part in problem["loc"]) or "the file"
            raise ConfigError(f"{escape(source)}: {escape(place)}: {escape(problem['msg'])}") from err
        except ConfigError as err:
            raise ConfigError(f"{escape(source)}: {err.message}", hint=err.hint) from err


def load_trust(trust: Trust) -> TrustStore:
    """Return who is trusted: any of the keys that were named, and whom a trust file scopes.

    Args:
        trust: Keys, paths of PEM public keys and at most one trust file or store, alone or in a sequence; what a file
            is shows from its content. A `TrustStore` alone is returned as it is.

    Raises:
        ConfigError: A file cannot be read, holds a private key or is neither of the two, a trust file is not valid
            or not the only one, or nothing was named.
    """
    if isinstance(trust, TrustStore):
        return trust
    keys: list[PublicKey] = []
    stores: list[TrustStore] = []
    for item in (trust,) if isinstance(trust, (str, Path, PublicKey)) else trust:
        found = item if isinstance(item, (PublicKey, TrustStore)) else _read(Path(item))
        if isinstance(found, TrustStore):
            stores.append(found)
        else:
            keys.append(found)
    if len(stores) > 1:
        raise ConfigError(f"expected at most one trust file, found {len(stores)}", hint="put all publishers in one")
    if not stores:
        return TrustStore.of_keys(keys)
    if not keys:
        return stores[0]
    given = TrustStore.of_keys(keys)
    return TrustStore({**given.keys, **stores[0].keys}, stores[0].publishers + given.publishers, stores[0].version)


def _read(path: Path) -> PublicKey | TrustStore:
    shown = escape(str(path))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TRUST_BYTES + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"trust file {shown}: {escape(str(err))}") from err
    if data.lstrip().startswith(b"{"):
        return TrustStore.parse(data, source=str(path))
    if b"-----BEGIN " in data:
        try:
            return PublicKey.from_pem(data, name=path.stem)
        except ConfigError as err:
            raise ConfigError(f"{shown}: {err.message}", hint=err.hint) from err
    raise ConfigError(
        f"{shown}: expected a public key ({PUBLIC_PEM_MARK.decode()}) or a trust file (JSON), found neither",
        hint="make a key pair with `safeload keygen`",
    )


_Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]
_Glob = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:/@+*?-]{1,255}$")]
_Lax = Field(strict=False)  # JSON has lists, a frozen model has tuples; what is in them stays strict


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _KeyEntry(_Model):
    type: KeyKind
    spki: str
    name: _Name


class _PublisherEntry(_Model):
    name: _Name
    streams: Annotated[tuple[_Glob, ...], _Lax, Field(min_length=1)]
    threshold: int
    keyids: Annotated[tuple[str, ...], _Lax]


class _StoreFile(_Model):
    spec: Literal["1.0"]
    version: Annotated[int, Field(ge=1)]
    keys: dict[str, _KeyEntry]
    publishers: Annotated[tuple[_PublisherEntry, ...], _Lax]


def _key(keyid: str, entry: _KeyEntry) -> PublicKey:
    try:
        key = PublicKey(decode_base64(entry.spki), name=entry.name)
    except ValueError as err:
        raise ConfigError(f"key {escape(keyid)}: spki: {escape(str(err))}") from err
    except ConfigError as err:
        raise ConfigError(f"key {escape(keyid)}: {err.message}", hint=err.hint) from err
    if key.kind != entry.type:
        raise ConfigError(f"key {escape(keyid)}: expected type {key.kind}, found {entry.type}")
    return key
