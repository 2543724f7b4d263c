"""`safeload trust`: make a signed trust store, look at it, change it, and take over the next version of another's."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safeload.cli import options
from safeload.cli.keys import claimed, read_secret_keys, require_absent
from safeload.cli.output import Output
from safeload.errors import ConfigError, Finding, VerificationError, escape, reason
from safeload.report import SCHEMA_VERSION, finding_json

if TYPE_CHECKING:
    from safeload.trust.keys import PublicKey, SecretKey
    from safeload.trust.store import Publisher, Root, SignedStore, TrustStore, Validity

app = typer.Typer(
    cls=options.Group,
    help="Say whose keys are trusted, for which models, and what was taken back, in a file that its root keys sign.",
    no_args_is_help=True,
)

_MAX_KEY_FILE_BYTES = 64 * 1024
"""A public key of P-521 takes 270 bytes in PEM; a longer file is none."""

_MANIFEST_DIGEST = "`safeload verify` shows the digest of a manifest that it accepts"
_TIME = "such as 2027-06-30T00:00:00Z"

_Store = Annotated[Path, typer.Argument(metavar="STORE", help="the trust store", show_default=False)]
_New = Annotated[
    Path, typer.Option("-o", "--output", metavar="NEW", help="the trust store to make", show_default=False)
]
_Sign = Annotated[
    list[Path], typer.Option("--sign", metavar="KEY", help="a root's secret key; repeatable", show_default=False)
]
_Streams = Annotated[
    list[str] | None,
    typer.Option("--stream", metavar="GLOB", help="models that the publisher may sign; repeatable", show_default=False),
]
_PublisherKeys = Annotated[
    list[Path] | None,
    typer.Option("--publisher-key", metavar="KEY.pub", help="a publisher's key; repeatable", show_default=False),
]
_NotBefore = Annotated[
    str | None,
    typer.Option(
        "--not-before", metavar="TIME", help=f"when the named keys begin to count, {_TIME}", show_default=False
    ),
]
_NotAfter = Annotated[
    str | None,
    typer.Option("--not-after", metavar="TIME", help=f"when the named keys stop to count, {_TIME}", show_default=False),
]


@app.command(cls=options.Command)
def init(
    output: _New,
    root: Annotated[
        list[Path], typer.Option("--root", metavar="KEY.pub", help="a root's key; repeatable", show_default=False)
    ],
    publisher: Annotated[str, typer.Option("--publisher", metavar="NAME", help="who publishes", show_default=False)],
    stream: Annotated[
        list[str],
        typer.Option("--stream", metavar="GLOB", help="models that they may sign; repeatable", show_default=False),
    ],
    publisher_key: Annotated[
        list[Path],
        typer.Option("--publisher-key", metavar="KEY.pub", help="a publisher's key; repeatable", show_default=False),
    ],
    sign: _Sign,
    threshold: Annotated[int, typer.Option("--threshold", metavar="N", help="root keys that must sign")] = 1,
    publisher_threshold: Annotated[
        int, typer.Option("--publisher-threshold", metavar="N", help="publisher's keys that must sign")
    ] = 1,
    not_before: _NotBefore = None,
    not_after: _NotAfter = None,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
) -> int:
    """Make version 1 of a trust store.

    Keep the root's keys apart from the publishers', and offline: they are needed for changes only.
    """
    from safeload.trust.store import Publisher, Root, TrustStore

    out = Output(json=json)
    require_absent(output)
    roots, publishers = _public_keys(root), _public_keys(publisher_key)
    keys = {**publishers, **roots}
    store = TrustStore(
        keys=keys,
        publishers=(Publisher(publisher, _once(stream), publisher_threshold, tuple(publishers)),),
        version=1,
        issued=_now(),
        root=Root(threshold, tuple(roots)),
        validity=dict.fromkeys(keys, _validity(not_before, not_after)),
    )
    return _make(out, output, store, read_secret_keys(sign, passphrase_file))


@app.command(cls=options.Command)
def show(store: _Store, json: options.Json = False) -> int:
    """Show who is trusted, and the digest to pin. Rejected if the root's signatures are not complete."""
    out = Output(json=json)
    data, now = _read(store), _now()
    signed = _signed(store, data) if _is_envelope(data) else None
    shown = _parsed(store, data) if signed is None else signed.store
    missing = 0 if signed is None else signed.missing()
    findings = [_unfinished(store, missing)] if missing else []
    out.object(
        {
            "schema": SCHEMA_VERSION,
            "verdict": "rejected" if findings else "accepted",
            "files": [],
            "findings": [finding_json(each) for each in findings],
            "store": _store_json(shown, () if signed is None else signed.signers, now),
        }
    )
    _show(out, shown, signed, now)
    for finding in findings:
        out.finding(finding)
    return out.verdict(f"rejected: {findings[0].code} in {escape(str(store))}") if findings else 0


@app.command(cls=options.Command)
def add(
    store: _Store,
    output: _New,
    sign: _Sign,
    publisher: Annotated[
        str | None,
        typer.Option("--publisher", metavar="NAME", help="a publisher, new or to be extended", show_default=False),
    ] = None,
    stream: _Streams = None,
    publisher_key: _PublisherKeys = None,
    publisher_threshold: Annotated[
        int | None,
        typer.Option("--publisher-threshold", metavar="N", help="publisher's keys that must sign", show_default=False),
    ] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", metavar="KEY.pub", help="a key for the root; repeatable", show_default=False),
    ] = None,
    threshold: Annotated[
        int | None, typer.Option("--threshold", metavar="N", help="root keys that must sign", show_default=False)
    ] = None,
    epoch: Annotated[
        list[str] | None,
        typer.Option("--epoch", metavar="STREAM=N", help="start a model's versions anew; repeatable"),
    ] = None,
    not_before: _NotBefore = None,
    not_after: _NotAfter = None,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
) -> int:
    """Make the next version of a trust store, in which more is trusted."""
    from safeload.trust.store import Root

    out = Output(json=json)
    require_absent(output)
    old, old_root = _rooted(store)
    named_root, named_keys = _public_keys(root or ()), _public_keys(publisher_key or ())
    named = {**named_keys, **named_root}
    for keyid in named:
        if keyid in old.revoked_keys:
            raise ConfigError(
                f"key {keyid} was revoked: {escape(old.revoked_keys[keyid].reason)}", hint="make another with keygen"
            )
    publishers = old.publishers
    if publisher is not None:
        publishers = _with_publisher(old, publisher, stream or (), tuple(named_keys), publisher_threshold)
    elif stream or publisher_key or publisher_threshold is not None:
        raise ConfigError("streams and keys are a publisher's", hint="say whose with --publisher NAME")
    validity = dict(old.validity)
    if (not_before, not_after) != (None, None):
        if not named:
            raise ConfigError(
                "--not-before and --not-after limit the keys that are named beside them, and none is",
                hint="name them with --publisher-key or --root",
            )
        validity |= dict.fromkeys(named, _validity(not_before, not_after))
    new = replace(
        _next(old),
        keys={**old.keys, **{keyid: each for keyid, each in named.items() if keyid not in old.keys}},
        publishers=publishers,
        root=Root(old_root.threshold if threshold is None else threshold, _once((*old_root.keyids, *named_root))),
        validity=validity,
        epochs={**old.epochs, **_epochs(old, epoch or ())},
    )
    return _make(out, output, _changed(old, new), read_secret_keys(sign, passphrase_file), old)


@app.command(cls=options.Command)
def revoke(
    store: _Store,
    output: _New,
    why: Annotated[str, typer.Option("--reason", metavar="TEXT", help="why, for whoever meets it", show_default=False)],
    sign: _Sign,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key", metavar="KEYID", help="a key to take back, or its KEY.pub; repeatable", show_default=False
        ),
    ] = None,
    manifest: Annotated[
        list[str] | None,
        typer.Option("--manifest", metavar="SHA256", help="a manifest to take back; repeatable", show_default=False),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help=f"when the key was lost, for the record, {_TIME}", show_default=False
        ),
    ] = None,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
) -> int:
    """Make the next version of a trust store, in which keys or manifests do not count any more.

    What a revoked key signed does not count whenever that was: whoever has the key can date it as they like.
    """
    from safeload.trust.store import Revocation

    out = Output(json=json)
    require_absent(output)
    old, _ = _rooted(store)
    if not key and not manifest:
        raise ConfigError("nothing to revoke", hint="name it with --key KEYID, --key KEY.pub or --manifest SHA256")
    revocation = Revocation(why, None if since is None else _instant(since, "--since"))
    new = replace(
        _next(old),
        revoked_keys={**old.revoked_keys, **{_keyid(each): revocation for each in key or ()}},
        revoked_manifests={
            **old.revoked_manifests,
            **{_digest(each, "--manifest", hint=_MANIFEST_DIGEST): why for each in manifest or ()},
        },
    )
    return _make(out, output, _changed(old, new), read_secret_keys(sign, passphrase_file), old)


@app.command(cls=options.Command)
def sign(
    store: _Store,
    key: Annotated[
        list[Path], typer.Option("--key", metavar="KEY", help="a root's secret key; repeatable", show_default=False)
    ],
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
) -> int:
    """Add a root key's signature to a trust store that others have signed. Look at it with `trust show` before."""
    from safeload.files import publish

    out = Output(json=json)
    _signed(store, _read(store))  # Whoever named the wrong file should hear it before they type a passphrase.
    secrets = read_secret_keys(key, passphrase_file)
    with _locked(store):
        signed = _signed(store, _read(store)).signed(*secrets)
        publish(store, signed.serialize())
    return _made(out, store, signed, signed.missing(_now()))


@app.command(cls=options.Command)
def update(
    store: _Store,
    new: Annotated[
        list[Path], typer.Argument(metavar="NEW...", help="the versions that follow, in order", show_default=False)
    ],
    json: options.Json = False,
) -> int:
    """Replace a trust store by a later version, if its root and that of every version between signed the next.

    What comes up to the version that is there is passed over, so that the same line can be run again.
    """
    from safeload.files import publish
    from safeload.trust.store import SignedStore
    from safeload.trust.store import update as updated

    out = Output(json=json)
    offered = [_read(path) for path in new]
    with _locked(store):
        old, _ = _rooted(store)
        last, done = old, _up_to(old, offered)
        if done < len(offered):
            last = updated(old, *offered[done:], sources=[str(path) for path in new[done:]])
            # Written anew, not copied: what stands beside payload and signatures in the offer is nobody's word.
            publish(store, SignedStore.parse(offered[-1]).serialize())
    out.object(
        {
            "schema": SCHEMA_VERSION,
            "verdict": "accepted",
            "files": [],
            "findings": [],
            "path": str(store),
            "from_version": old.version,
            "version": last.version,
            "sha256": last.sha256,
        }
    )
    what = " already, nothing to do" if last is old else f", now {last.version}"
    out.line(f"trust store  {escape(str(store))}  (version {old.version}{what})")
    out.line(f"digest       sha256:{last.sha256}")
    for line in _cannot_meet(last):
        out.note(line)
    return out.verdict("accepted")


# ---------------------------------------------------------------- making a version


def _next(old: TrustStore) -> TrustStore:
    return replace(old, version=old.version + 1, issued=_now(), sha256="")


def _up_to(old: TrustStore, offered: Sequence[bytes]) -> int:
    """Return how many come up to the version that is there, itself included; 0 where one before it is no older."""
    from safeload.trust.store import SignedStore, is_version

    done = max((number for number, data in enumerate(offered, 1) if is_version(old, data)), default=0)
    try:
        # Whoever mixed up the order, or has a fork, must not hear that there is nothing to do: `update` says what is
        # wrong.
        come_before = (data for data in offered[:done] if not is_version(old, data))
        return done if all(SignedStore.parse(data).store.version < old.version for data in come_before) else 0
    except VerificationError:
        return 0


def _changed(old: TrustStore, new: TrustStore) -> TrustStore:
    if new == replace(_next(old), issued=new.issued):
        raise ConfigError("that is what the trust store says already", hint="`safeload trust show STORE` shows it")
    return new


def _with_publisher(
    old: TrustStore, name: str, streams: Sequence[str], keyids: Sequence[str], threshold: int | None
) -> tuple[Publisher, ...]:
    from safeload.trust.store import Publisher

    for place, publisher in enumerate(old.publishers):
        if publisher.name == name:
            extended = replace(
                publisher,
                streams=_once((*publisher.streams, *streams)),
                threshold=publisher.threshold if threshold is None else threshold,
                keyids=_once((*publisher.keyids, *keyids)),
            )
            return (*old.publishers[:place], extended, *old.publishers[place + 1 :])
    if not streams:
        raise ConfigError(f"a new publisher, {escape(name)}, may sign nothing", hint="say what with --stream GLOB")
    return (*old.publishers, Publisher(name, _once(streams), 1 if threshold is None else threshold, tuple(keyids)))


def _epochs(old: TrustStore, given: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in given:
        stream, _, number = each.rpartition("=")
        if not stream or not (number.isascii() and number.isdigit()):
            raise ConfigError(
                f"--epoch: expected STREAM=N, found {escape(each)}", hint="such as --epoch xai-org/grok-1=2"
            )
        found[stream] = int(number)
        if found[stream] <= old.epochs.get(stream, 1):
            raise ConfigError(
                f"--epoch: expected more than {old.epochs.get(stream, 1)} for {escape(stream)}, found {number}",
                hint="an epoch that goes back would let old manifests in again",
            )
    return found


def _make(
    out: Output, path: Path, store: TrustStore, secrets: Sequence[SecretKey], old: TrustStore | None = None
) -> int:
    from safeload.files import publish
    from safeload.trust.store import sign_store

    root = () if store.root is None else store.root.keyids
    counting = [keyid for keyid in root if keyid not in store.revoked_keys]
    if store.root is not None and len(counting) < store.root.threshold:
        raise ConfigError(
            f"the root would keep {len(counting)} key(s) that count, of the {store.root.threshold} that must sign",
            hint="add another with `safeload trust add STORE -o NEW --root KEY.pub`, then revoke",
        )
    signed = sign_store(store, secrets)
    with claimed(path):
        publish(path, signed.serialize())
    return _made(out, path, signed, signed.missing(_now(), before=old))


def _made(out: Output, path: Path, signed: SignedStore, missing: int) -> int:
    store = signed.store
    out.object(
        {
            "schema": SCHEMA_VERSION,
            "path": str(path),
            "version": store.version,
            "sha256": store.sha256,
            "signers": list(signed.signers),
            "missing_signatures": missing,
        }
    )
    out.line(f"trust store  {escape(str(path))}  (version {store.version})")
    out.line(f"digest       sha256:{store.sha256}")
    out.line(f"signed by    {', '.join(_called(store, keyid) for keyid in signed.signers)}")
    if missing:
        out.line(f"needs {missing} more: safeload trust sign {escape(str(path))} --key KEY")
    for line in _cannot_meet(store):
        out.note(line)
    return 0


def _cannot_meet(store: TrustStore) -> Iterator[str]:
    """Yield a warning for each publisher who has too few keys left: nothing is wrong, and nothing can be signed."""
    for publisher in store.publishers:
        left = sum(keyid not in store.revoked_keys for keyid in publisher.keyids)
        if left < publisher.threshold:
            yield (
                f"safeload: note: publisher {escape(publisher.name)} has {left} key(s) left that count, and needs "
                f"{publisher.threshold} to sign; add one with `safeload trust add`"
            )


# ---------------------------------------------------------------- showing one


def _show(out: Output, store: TrustStore, signed: SignedStore | None, now: datetime) -> None:
    from safeload.trust.history import format_instant

    out.line(f"version  {store.version}" + ("" if store.issued is None else f", of {format_instant(store.issued)}"))
    out.line(f"digest   sha256:{store.sha256}")
    if store.root is None:
        out.line("root     none: it is not signed, and cannot be updated")
    else:
        by = ", ".join(_called(store, keyid) for keyid in (() if signed is None else signed.signers))
        left = _counting(store, store.root, now)
        of_all = f"{store.root.threshold} of {len(store.root.keyids)} keys must sign"
        out.line(f"root     {of_all}{left}; signed by {by or 'none'}")
    out.line()
    out.table(
        ("KEY", "KIND", "COUNTS", "FOR", "KEYID"),
        [
            (
                escape(key.name),
                key.kind,
                escape(store.inactive_reason(keyid, now) or _limits(store.validity.get(keyid)) or "yes"),
                escape(", ".join(_roles(store, keyid)) or "nothing"),
                keyid,
            )
            for keyid, key in store.keys.items()
        ],
    )
    out.line()
    out.table(
        ("PUBLISHER", "KEYS", "STREAMS"),
        [
            (
                escape(each.name),
                f"{each.threshold} of {len(each.keyids)}{_counting(store, each, now)}",
                ", ".join(map(escape, each.streams)),
            )
            for each in store.publishers
        ],
    )
    rows = [("key", keyid, each.reason) for keyid, each in store.revoked_keys.items() if keyid not in store.keys]
    rows += [("manifest", sha256, why) for sha256, why in store.revoked_manifests.items()]
    if rows:
        out.line()
        out.table(("REVOKED", "SHA256", "REASON"), [(what, digest, escape(why)) for what, digest, why in rows])
    if store.epochs:
        out.line()
        out.table(("STREAM", ">EPOCH"), [(escape(stream), str(epoch)) for stream, epoch in store.epochs.items()])


def _counting(store: TrustStore, role: Publisher | Root, now: datetime) -> str:
    """Return how many of the keys count at a time, where not all do."""
    left = sum(store.inactive_reason(keyid, now) is None for keyid in role.keyids)
    return "" if left == len(role.keyids) else f", {left} {'counts' if left == 1 else 'count'}"


def _called(store: TrustStore, keyid: str) -> str:
    return f"{escape(store.keys[keyid].name)} ({keyid[:16]})"


def _limits(valid: Validity | None) -> str:
    from safeload.trust.history import format_instant

    if valid is None:
        return ""
    start = "" if valid.not_before is None else f"from {format_instant(valid.not_before)}"
    end = "" if valid.not_after is None else f"until {format_instant(valid.not_after)}"
    return f"{start} {end}".strip()


def _roles(store: TrustStore, keyid: str) -> Iterator[str]:
    if store.root is not None and keyid in store.root.keyids:
        yield "root"
    yield from (publisher.name for publisher in store.publishers if keyid in publisher.keyids)


def _store_json(store: TrustStore, signers: Sequence[str], now: datetime) -> dict[str, Any]:
    from safeload.trust.history import format_instant

    def text(time: datetime | None) -> str | None:
        return None if time is None else format_instant(time)

    def key(keyid: str, public: PublicKey) -> dict[str, Any]:
        valid = store.validity.get(keyid)
        return {
            "keyid": keyid,
            "name": public.name,
            "kind": public.kind,
            "not_before": text(valid.not_before) if valid else None,
            "not_after": text(valid.not_after) if valid else None,
            "does_not_count": store.inactive_reason(keyid, now),
        }

    root = store.root
    return {
        "version": store.version,
        "issued": text(store.issued),
        "sha256": store.sha256,
        "root": root and {"threshold": root.threshold, "keyids": list(root.keyids), "signers": list(signers)},
        "keys": [key(keyid, public) for keyid, public in store.keys.items()],
        "publishers": [
            {"name": p.name, "streams": list(p.streams), "threshold": p.threshold, "keyids": list(p.keyids)}
            for p in store.publishers
        ],
        "revoked_keys": [
            {"keyid": keyid, "reason": each.reason, "since": text(each.since)}
            for keyid, each in store.revoked_keys.items()
        ],
        "revoked_manifests": [{"sha256": sha256, "reason": why} for sha256, why in store.revoked_manifests.items()],
        "epochs": dict(store.epochs),
    }


def _unfinished(path: Path, missing: int) -> Finding:
    return Finding(
        "root-threshold-not-met",
        f"expected the root's threshold of signatures, found {missing} too few: it is not finished",
        file=str(path),
        hint=f"safeload trust sign {escape(str(path))} --key KEY",
    )


# ---------------------------------------------------------------- reading what was named


def _read(path: Path, limit: int | None = None) -> bytes:
    from safeload.trust.store import MAX_TRUST_FILE_BYTES

    most = MAX_TRUST_FILE_BYTES if limit is None else limit
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot read {escape(str(path))}: {reason(err)}", hint="check the path") from err
    if len(data) > most:
        raise ConfigError(f"{escape(str(path))}: expected at most {most} bytes, found more", hint="check the path")
    if limit is None and data.startswith(b"-----BEGIN "):
        raise ConfigError(
            f"{escape(str(path))}: expected a trust store, found a key (PEM)",
            hint="`safeload trust init` makes a store; a public key can do without one: verify --trust KEY.pub",
        )
    return data


def _is_envelope(data: bytes) -> bool:
    return b'"payloadType"' in data


def _parsed(path: Path, data: bytes) -> TrustStore:
    from safeload.trust.store import TrustStore

    return TrustStore.parse(data, source=str(path))


def _signed(path: Path, data: bytes) -> SignedStore:
    from safeload.trust.store import SignedStore

    try:
        return SignedStore.parse(data)
    except VerificationError as err:
        # It was named as ours to work on, like a key; only what `update` is offered gets a verdict.
        found = err.findings[0]
        raise ConfigError(f"{escape(str(path))}: {found.message}", hint=found.hint) from err


def _rooted(path: Path) -> tuple[TrustStore, Root]:
    store = _parsed(path, _read(path))
    if store.root is None:
        raise ConfigError(
            f"{escape(str(path))} has no root, so that nobody can sign its successor",
            hint="make a signed trust store with `safeload trust init`",
        )
    return store, store.root


def _public_keys(paths: Iterable[Path]) -> Mapping[str, PublicKey]:
    """Return the keys in these files by keyid: one that is named twice is there once, under its first name."""
    from safeload.trust.keys import PublicKey

    found: dict[str, PublicKey] = {}
    for path in paths:
        try:
            key = PublicKey.from_pem(_read(path, _MAX_KEY_FILE_BYTES), name=path.stem)
        except ConfigError as err:
            raise ConfigError(f"{escape(str(path))}: {err.message}", hint=err.hint) from err
        found.setdefault(key.keyid, key)
    return found


def _keyid(text: str) -> str:
    """Return the keyid that is named, or that of the public key in the file that is named."""
    from safeload.digests import SHA256_HEX

    if SHA256_HEX.fullmatch(text.removeprefix("sha256:")) is None and os.path.lexists(text):
        return next(iter(_public_keys([Path(text)])))
    return _digest(
        text, "--key", hint="`safeload trust show STORE` lists keyids; KEY.pub, the key's file, does as well"
    )


def _digest(text: str, option: str, *, hint: str | None = None) -> str:
    from safeload.digests import SHA256_HEX

    digest = text.removeprefix("sha256:")
    if SHA256_HEX.fullmatch(digest) is None:
        raise ConfigError(f"{option}: expected 64 lower-case hexadecimal digits, found {escape(text)}", hint=hint)
    return digest


def _validity(not_before: str | None, not_after: str | None) -> Validity:
    from safeload.trust.store import Validity

    return Validity(
        None if not_before is None else _instant(not_before, "--not-before"),
        None if not_after is None else _instant(not_after, "--not-after"),
    )


def _instant(text: str, option: str) -> datetime:
    from safeload.trust.history import parse_instant

    try:
        return parse_instant(text)
    except ValueError as err:
        raise ConfigError(
            f"{option}: expected a time like 2027-06-30T00:00:00Z, found {escape(text)}",
            hint="write it in UTC, to the second",
        ) from err


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _once(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder of a trust store, so that of two runs that replace it the second sees what the first made.

    Raises:
        ConfigError: The folder cannot be opened or locked.
    """
    try:
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"cannot open the folder of {escape(str(path))}: {reason(err)}", hint="check the path"
        ) from err
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as err:
            raise ConfigError(
                f"cannot lock the folder of {escape(str(path))}: {reason(err)}",
                hint="keep the trust store on a file system with locks, and copy it from there",
            ) from err
        yield
    finally:
        os.close(fd)
