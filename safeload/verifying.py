"""Verify a manifest: from bytes that anybody may have written to a `TrustedManifest`, or a refusal.

A signature says who made a manifest. That it is the one that was meant, and the newest, is said by what the caller
expects (a pin, a model, a revision) and by the history of what was accepted before, which this module keeps as a file.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from safeload.digests import SHA256_HEX, sha256_hex
from safeload.errors import (
    ConfigError,
    ExpiredError,
    Finding,
    ManifestError,
    RevokedError,
    RollbackError,
    SignatureError,
    VerificationError,
    escape,
    reason,
)
from safeload.files import publish
from safeload.manifest import PAYLOAD_TYPE, Manifest, Signer, TrustedManifest
from safeload.trust.dsse import MAX_ENVELOPE_BYTES, Envelope
from safeload.trust.history import MAX_HISTORY_BYTES, History, format_instant, parse_instant
from safeload.trust.keys import PublicKey
from safeload.trust.store import PIN_PREFIX, Publisher, TrustStore, fitting_keys

_LOCK_SECONDS: Final = 10.0
"""Longest wait for another run to finish with the history, which takes it milliseconds."""

_LOCK_POLL_SECONDS: Final = 0.02

_OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link, as `publish` replaces none; and opening a FIFO shall not wait for a writer."""


def verify_manifest(
    envelope: bytes,
    trust: TrustStore,
    *,
    source: str = "manifest",
    now: datetime | None = None,
    pin: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    history: History | None = None,
) -> TrustedManifest:
    """Prove that enough keys of a trusted publisher signed this manifest, and that it is the one that was meant.

    The payload is parsed only after its signatures were checked, from the same bytes in memory. Every expectation that
    is stated has to hold. A pin is the strongest one: no other manifest passes, so it may also be past its expiry and
    of an epoch that the trust store has left behind; a digest that the store revoked is refused all the same.

    Args:
        envelope: A DSSE envelope, as it was read once from wherever it lay.
        trust: Who may sign what, and what was revoked.
        source: What to call the envelope in findings; its path, where it has one.
        now: The time, with its zone, at which keys and the manifest have to be valid; None for the clock's.
        pin: The one manifest that is accepted: `sha256:` and the digest of its payload.
        model: The stream that it has to be of.
        revision: The revision that it has to be of.
        history: What was accepted before; None where nobody keeps a history.

    Raises:
        SignatureError: No publisher's threshold of distinct, valid keys is met, or none that may sign the stream.
        ManifestError: The envelope or the payload is malformed, too long or of another type, or not what was pinned
            or expected.
        RevokedError: A key that signed was revoked and is missed, or the manifest itself was revoked.
        ExpiredError: The manifest is past its expiry, and not pinned.
        RollbackError: It is older than one that was accepted before, or contradicts it or the trust store's epoch.
        ConfigError: The pin is not of its form.
    """
    expected = None if pin is None else parse_pin(pin)
    time = datetime.now(UTC) if now is None else now
    try:
        trusted = _trusted(envelope, trust, time, source)
        _check_expected(trusted, pinned=expected, model=model, revision=revision)
        _check_current(trusted.manifest, trust, time, sha256=trusted.sha256, is_pinned=expected is not None)
        if history is not None:
            manifest = trusted.manifest
            history.check(
                manifest.stream,
                epoch=manifest.epoch,
                version=manifest.version,
                manifest=trusted.sha256,
                trust_version=trust.version,
            )
    except VerificationError as err:
        raise type(err)(*(finding.in_file(source) for finding in err.findings)) from err
    return trusted


def parse_pin(pin: str) -> str:
    """Return the digest, in hexadecimal, that a pin such as `sha256:9f86...` names.

    Raises:
        ConfigError: It is of another form.
    """
    digest = pin.removeprefix(PIN_PREFIX)
    if digest == pin or SHA256_HEX.fullmatch(digest) is None:
        raise ConfigError(
            f"pin: expected {PIN_PREFIX} and 64 lower-case hexadecimal digits, found {escape(pin)!r}",
            hint="`safeload verify` shows the digest of a manifest that it accepts",
        )
    return digest


def is_expired(manifest: Manifest, now: datetime) -> bool:
    """Whether a manifest says that it is not to be used any more at the time `now`."""
    return manifest.expires is not None and now >= parse_instant(manifest.expires)


def _trusted(data: bytes, trust: TrustStore, now: datetime, source: str) -> TrustedManifest:
    envelope = Envelope.parse(data)
    # Keys that were revoked or are not valid now are among them: who signed in vain is told apart from who did not.
    fitting = fitting_keys(envelope, trust.keys)
    idle = {keyid: why for keyid in fitting if (why := trust.inactive_reason(keyid, now)) is not None}
    signers = {keyid: key for keyid, key in fitting.items() if keyid not in idle}
    satisfied = [publisher for publisher in trust.publishers if _met(publisher, signers)]
    if not satisfied:
        raise _not_counted(idle, trust, _why_untrusted(envelope, trust, fitting, signers, source))
    if envelope.payload_type != PAYLOAD_TYPE:
        raise ManifestError(
            Finding(
                "payload-type",
                f"expected a payload of type {PAYLOAD_TYPE}, found {escape(envelope.payload_type)}",
                hint="make a manifest with `safeload sign DIR --key KEY -o MANIFEST`",
            )
        )
    manifest = Manifest.parse(envelope.payload)
    publisher = next((each for each in satisfied if each.may_sign(manifest.stream)), None)
    if publisher is None:
        raise _not_counted(idle, trust, _why_out_of_scope(manifest.stream, trust, signers))
    sha256 = sha256_hex(envelope.payload)
    if sha256 in trust.revoked_manifests:
        raise RevokedError(
            Finding(
                "revoked-manifest",
                f"expected a manifest that still stands, found sha256:{sha256}, which version {trust.version} of the "
                f"trust store revokes: {escape(trust.revoked_manifests[sha256])}",
                hint="get the manifest that replaces it from its publisher",
            )
        )
    return TrustedManifest(
        manifest=manifest,
        sha256=sha256,
        signers=tuple(Signer(signers[keyid].name, keyid) for keyid in signers if keyid in publisher.keyids),
        threshold=publisher.threshold,
        publisher=publisher.name,
        ignored=tuple(Signer(fitting[keyid].name, keyid) for keyid in idle),
    )


def _check_expected(trusted: TrustedManifest, *, pinned: str | None, model: str | None, revision: str | None) -> None:
    """Refuse a manifest that is not the one, the model or the revision that the caller named."""
    if pinned is not None and trusted.sha256 != pinned:
        raise ManifestError(
            Finding(
                "pin-mismatch",
                f"expected the pinned manifest sha256:{pinned}, found sha256:{trusted.sha256}",
                hint="get the pinned manifest; if this one is meant to replace it, pin this one",
            )
        )
    manifest = trusted.manifest
    for code, what, expected, found in (
        ("model-mismatch", "model", model, manifest.stream),
        ("revision-mismatch", "revision", revision, manifest.revision),
    ):
        if expected is not None and found != expected:
            raise ManifestError(
                Finding(
                    code,
                    f"expected a manifest of {what} {escape(expected)}, found one of {escape(found)}",
                    hint=f"name the manifest that you mean with -m, or the {what} that it is of with --{what}",
                )
            )


def _check_current(manifest: Manifest, trust: TrustStore, now: datetime, *, sha256: str, is_pinned: bool) -> None:
    """Refuse a manifest whose time is over, by its own word or by the epoch that the trust store says it is.

    A pin stands for both. It does not stand for an epoch that the root has not granted yet: a history would remember
    it, and refuse every honest manifest from then on.
    """
    if is_expired(manifest, now) and not is_pinned:
        raise ExpiredError(
            Finding(
                "expired",
                f"expected a manifest that is valid on {format_instant(now)}, found one that expired on "
                f"{manifest.expires}",
                hint="get the current one from its publisher; to use exactly this one all the same, "
                f"pin it: --pin {PIN_PREFIX}{sha256}",
            )
        )
    # Only the root can raise an epoch, which is what makes it a way out after a fast-forward. Keys that were named
    # one by one have no root, and nothing to compare with.
    epoch = trust.epochs.get(manifest.stream, 1) if trust.version else manifest.epoch
    if manifest.epoch > epoch or (manifest.epoch < epoch and not is_pinned):
        code = "rollback" if manifest.epoch < epoch else "fast-forward"
        raise RollbackError(
            Finding(
                code,
                f"expected epoch {epoch}, which version {trust.version} of the trust store grants to "
                f"{escape(manifest.stream)}, found epoch {manifest.epoch}",
                hint=f"get the newest manifest from its publisher, who signs it with --epoch {epoch}"
                if code == "rollback"
                else "get the newest trust store with `safeload trust update`",
            )
        )


# ---------------------------------------------------------------- the history's file


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """Proves that a history could be locked and read when the run began.

    The lock is held while the file is read and while it is replaced, and not for the hours in between: what was checked
    at the beginning is checked again before it is recorded.

    Attributes:
        path: Where it is.
        history: What it said.
        is_new: Whether there was no such file: then nothing is known of older manifests.
    """

    path: Path
    history: History
    is_new: bool

    @classmethod
    def open(cls, path: str | Path) -> HistoryFile:
        """Return the history in a file, or an empty one where there is no file yet.

        Raises:
            ConfigError: It is no history or no regular file, or it cannot be read, or locked within 10 seconds.
        """
        place = Path(path)
        with _locked(place):
            history = _read(place)
        return cls(place, history or History(), history is None)

    def record(self, trusted: TrustedManifest, trust: TrustStore, now: datetime) -> None:
        """Write down that a manifest was accepted, if what was accepted meanwhile allows it too.

        Raises:
            RollbackError: Another run accepted something since, which this manifest may not follow.
            ConfigError: The file vanished or was damaged meanwhile, or cannot be locked.
            StagingError: It cannot be written.
        """
        manifest = trusted.manifest
        with _locked(self.path):
            history = _read(self.path)
            if history is None and not self.is_new:
                raise _history_error(self.path, "it was there when the run began, and is gone")
            history = history or History()
            found = {"epoch": manifest.epoch, "version": manifest.version, "trust_version": trust.version}
            history.check(manifest.stream, manifest=trusted.sha256, **found)
            history = history.advanced(manifest.stream, manifest=trusted.sha256, now=now, **found)
            publish(self.path, history.to_bytes())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a history: a file beside it, which stays, as the history itself is replaced by renaming."""
    if not path.name or (os.path.lexists(path) and not path.is_file()):
        raise _history_error(path, "it is no regular file")
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        fd = _open_lock(path)
        try:
            if _lock(fd, path) and _is_still_there(fd, path):
                yield
                return
        finally:
            os.close(fd)
        if time.monotonic() > deadline:
            raise _history_error(path, f"another run has held its lock for {_LOCK_SECONDS:.0f} seconds")
        time.sleep(_LOCK_POLL_SECONDS)


def _open_lock(path: Path) -> int:
    try:
        return os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o666)
    except (OSError, ValueError) as err:
        raise _history_error(path, f"cannot open its lock {escape(path.name)}.lock: {reason(err)}") from err


def _is_still_there(fd: int, path: Path) -> bool:
    """Whether a lock that was taken is the one that others will find: somebody may have deleted it meanwhile."""
    try:
        found, held = Path(f"{path}.lock").lstat(), os.fstat(fd)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _lock(fd: int, path: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as err:
        raise _history_error(path, f"its file system has no locks: {reason(err)}") from err
    return True


def _read(path: Path) -> History | None:
    try:
        fd = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        raise _history_error(path, f"cannot read it: {reason(err)}") from err
    try:
        with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor has no path
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _history_error(path, "it is no regular file")
            data = file.read(MAX_HISTORY_BYTES + 1)
    except OSError as err:
        raise _history_error(path, f"cannot read it: {reason(err)}") from err
    return History.parse(data, source=str(path))


def _history_error(path: Path, message: str) -> ConfigError:
    return ConfigError(f"history {escape(str(path))}: {message}", hint="check the path, and who else may write there")


# ---------------------------------------------------------------- signatures


def _not_counted(idle: Mapping[str, str], trust: TrustStore, finding: Finding) -> VerificationError:
    """Return the refusal for want of signatures, which names each key that signed and does not count."""
    findings = [
        Finding(
            "revoked-key" if keyid in trust.revoked_keys else "key-not-valid",
            f"the signature of {escape(trust.keys[keyid].name) or 'key'} ({keyid[:16]}) does not count: {escape(why)}",
            hint="ask the publisher for a manifest that is signed by other keys",
        )
        for keyid, why in idle.items()
    ]
    # Somebody holds a key that was taken back: whoever watches for that should not have to look into the findings.
    revoked = any(keyid in trust.revoked_keys for keyid in idle)
    return (RevokedError if revoked else SignatureError)(*findings, finding)


def _met(publisher: Publisher, signers: dict[str, PublicKey]) -> bool:
    return len(signers.keys() & set(publisher.keyids)) >= publisher.threshold


def _shortfall(publisher: Publisher, signers: dict[str, PublicKey]) -> Finding:
    found = len(signers.keys() & set(publisher.keyids))
    return Finding(
        "threshold-not-met",
        f"expected {publisher.threshold} signatures of {escape(publisher.name)}, found {found}",
        # Not a command with another key: named beside a store, that would take the threshold away.
        hint=f"ask the publisher for a manifest that {publisher.threshold} of its keys signed "
        "(`safeload sign --key A --key B`, or `safeload attach-signature`)",
    )


def _why_untrusted(
    envelope: Envelope, trust: TrustStore, fitting: dict[str, PublicKey], signers: dict[str, PublicKey], source: str
) -> Finding:
    if fitting:
        nearest = min(trust.publishers, key=lambda p: p.threshold - len(signers.keys() & set(p.keyids)))
        return _shortfall(nearest, signers)
    hints = [signature.keyid for signature in envelope.signatures if signature.keyid]
    if broken := [keyid for keyid in hints if keyid in trust.keys]:
        return Finding(
            "bad-signature",
            f"expected a signature by trusted key {broken[0][:16]}, found one that does not fit: "
            "the manifest or its signature was changed after it was signed",
            hint="get the manifest from its publisher again",
        )
    claimed = f"; it names {', '.join(escape(keyid[:16]) for keyid in hints[:4])}" if hints else ""
    return Finding(
        "untrusted-key",
        f"expected a signature by one of {len(trust.keys)} trusted key(s), found none{claimed}",
        hint=f"if you trust who signed it, get their public key from them, then: {_command(source)}",
    )


def _why_out_of_scope(stream: str, trust: TrustStore, signers: dict[str, PublicKey]) -> Finding:
    entitled = [publisher for publisher in trust.publishers if publisher.may_sign(stream)]
    if entitled:
        return _shortfall(entitled[0], signers)
    return Finding(
        "stream-not-in-scope",
        f"expected a stream that its signers may sign, found {escape(stream)}",
        hint="check which model you meant; a publisher signs with a --model in its scope, and a root widens that with "
        "`safeload trust add --stream`",
    )


def _command(source: str) -> str:
    return f"safeload verify DIR --manifest {escape(shlex.quote(source))} --trust KEY.pub"


def read_manifest(manifest: str | Path | bytes) -> tuple[bytes, str]:
    """Return a manifest's envelope, and what to call it.

    Raises:
        ConfigError: It is no regular file, or cannot be read.
    """
    if isinstance(manifest, bytes):
        return manifest, "manifest"
    try:
        # O_NONBLOCK: whoever made the manifest could have made a FIFO of it, which would wait for ever.
        fd = os.open(manifest, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ConfigError(f"the manifest {escape(str(manifest))} is no regular file", hint="check the path")
            # One byte more than is allowed, so that the verifier sees that it is too long.
            return file.read(MAX_ENVELOPE_BYTES + 1), str(manifest)
    except (OSError, ValueError) as err:
        message = f"cannot read the manifest {escape(str(manifest))}: {reason(err)}"
        raise ConfigError(message, hint="check the path") from err


def manifest_in(directory: str | Path, manifest: str | Path | bytes, envelope: bytes) -> Mapping[str, bytes]:
    """Return the one file that may lie in the directory unlisted, by its path there: the manifest, as it was read.

    Empty where the manifest lies elsewhere. A link to it, or a file in its place with other bytes, is not that file.
    """
    if isinstance(manifest, bytes):
        return {}
    try:
        place = Path(os.path.realpath(Path(manifest).parent), Path(manifest).name)
        return {place.relative_to(os.path.realpath(directory)).as_posix(): envelope}
    except (OSError, ValueError):
        return {}
