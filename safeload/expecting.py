"""Expect: what a caller holds a manifest against, beside the signatures on it, and what a report says of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypedDict, get_args

from safeload import __version__
from safeload.errors import ConfigError, Finding, escape
from safeload.files import require_outside
from safeload.manifest import RestoreKind, TrustedManifest, missing_roles
from safeload.scanning import manifest_facts
from safeload.trust.history import format_instant
from safeload.trust.store import Trust, TrustStore, load_trust, trust_items
from safeload.verifying import HistoryFile, is_expired, parse_pin, verify_manifest


class Expectations(TypedDict, total=False):
    """What `load` and `verify` can be told to expect of a manifest. Each makes the check stricter; none is needed.

    Attributes:
        pin: The one manifest that is accepted, as `sha256:` and the digest of its payload. It may be past its expiry.
        model: The model that the manifest has to be of.
        revision: The revision that the manifest has to be of.
        history: A file that remembers the newest manifest of each model; what is older, or contradicts it, is refused.
            It is made where there is none, and written when everything is accepted.
        purpose: What to restore for; a checkpoint that lacks what that needs is refused.
        trust_pin: The one trust store that is accepted, as `sha256:` and the digest of its payload.
    """

    pin: str | None
    model: str | None
    revision: str | None
    history: str | Path | None
    purpose: RestoreKind | None
    trust_pin: str | None


@dataclass(frozen=True, slots=True)
class Expected:
    """What a caller expects of a manifest, at one time: that of the run's beginning."""

    store: TrustStore
    trust_pin: str | None
    pin: str | None
    model: str | None
    revision: str | None
    history: HistoryFile | None
    purpose: RestoreKind | None
    now: datetime

    @classmethod
    def of(
        cls,
        directory: str | Path,
        trust: Trust,
        *,
        trust_pin: str | None = None,
        pin: str | None = None,
        model: str | None = None,
        revision: str | None = None,
        history: str | Path | None = None,
        purpose: RestoreKind | None = None,
    ) -> Expected:
        """Read the trust store and the history, and check the form of everything, before any file is looked at."""
        if pin is not None:
            parse_pin(pin)
        if purpose is not None and purpose not in get_args(RestoreKind):
            raise ConfigError(f"purpose: expected {' or '.join(get_args(RestoreKind))}, found {escape(str(purpose))!r}")
        if history is not None:
            require_outside("history", history, directory)
        remembered = None if history is None else HistoryFile.open(history)
        return cls(
            load_trust(trust, pin=trust_pin), trust_pin, pin, model, revision, remembered, purpose, datetime.now(UTC)
        )

    def verify(self, envelope: bytes, source: str) -> TrustedManifest:
        """Return the manifest that meets all of it; see `verify_manifest`."""
        return verify_manifest(
            envelope,
            self.store,
            source=source,
            now=self.now,
            pin=self.pin,
            model=self.model,
            revision=self.revision,
            history=None if self.history is None else self.history.history,
        )

    def lacking(self, trusted: TrustedManifest) -> list[Finding]:
        """Return a finding for each role that the purpose needs and no file has."""
        roles = () if self.purpose is None else missing_roles(trusted.manifest, self.purpose)
        return [
            Finding(
                "role-missing",
                f"expected a file of role {role}, which a restore for {self.purpose} needs, found none in the manifest",
                hint=f"ask the publisher for a checkpoint that was signed with its {role}",
            )
            for role in roles
        ]

    def record(self, trusted: TrustedManifest) -> None:
        """Let the history, if there is one, know that the whole verdict is "accepted"."""
        if self.history is not None:
            self.history.record(trusted, self.store, self.now)

    def facts(self, trusted: TrustedManifest | None = None) -> dict[str, Any]:
        """Return what a report says of all this, whatever its verdict is, and of which model, if that is known."""
        known = None
        if self.history is not None and trusted is not None:
            known = self.history.history.streams.get(trusted.manifest.stream)
        memory = self.history and {
            "path": str(self.history.path),
            "first_use": known is None,
            "remembered": None if known is None else known.model_dump(mode="json"),
            "clock_moved_back_seconds": self.history.history.clock_moved_back(self.now),
        }
        return {
            "expected": {
                "pin": self.pin,
                "model": self.model,
                "revision": self.revision,
                "purpose": self.purpose,
                "history": memory,
                "trust_pin": self.trust_pin,
            },
            "trust": {"version": self.store.version, "sha256": self.store.sha256, "keys": len(self.store.keys)},
            **run_facts(self.now),
        }


def require_trust_outside(trust: Trust, directory: str | Path) -> None:
    """Refuse a trust file that lies in the checkpoint; see `require_outside`, whose error it raises."""
    for item in trust_items(trust):
        if isinstance(item, str | Path):
            require_outside("trust file", item, directory)


def run_facts(now: datetime) -> dict[str, Any]:
    """Return what a report says of the run itself: when it was, and by what."""
    return {"time": format_instant(now), "tool": {"name": "safeload", "version": __version__}}


def evidence(trusted: TrustedManifest, now: datetime) -> dict[str, Any]:
    """Return the evidence of a manifest: which it is, whose, and whether it is past its time."""
    manifest = trusted.manifest
    signed: Any = manifest_facts(trusted)["manifest"]
    more = {
        "epoch": manifest.epoch,
        "issued": manifest.issued,
        "expires": manifest.expires,
        "expired": is_expired(manifest, now),
        "kind": manifest.kind,
        "publisher": trusted.publisher,
        "ignored": [{"name": signer.name, "keyid": signer.keyid} for signer in trusted.ignored],
    }
    return {"manifest": {**signed, **more}}


_OTHER_BYTES: Final = frozenset({"digest-mismatch", "size-mismatch"})


def mixture_hint(findings: Sequence[Finding], trusted: TrustedManifest) -> str | None:
    """Return what several files with other bytes most likely are: those of another revision have the same names."""
    n_others = len({finding.file for finding in findings if finding.code in _OTHER_BYTES})
    if n_others < 2:
        return None
    manifest = trusted.manifest
    return (
        f"{n_others} of {len(manifest.files)} files are not those of revision {escape(manifest.revision)}: they may be "
        "of another revision; fetch all of them from one"
    )


def hinted(findings: Sequence[Finding], hint: str | None) -> tuple[Finding, ...]:
    """Return the findings, those of files with other bytes with this hint."""
    return tuple(replace(f, hint=hint) if hint is not None and f.code in _OTHER_BYTES else f for f in findings)
