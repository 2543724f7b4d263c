"""The chain on one screen: verify the manifest, stage the bytes, admit what is in them, decode, assemble.

Each step takes the proof that the step before made, so there is no way to skip one. Read this first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

from safeload.agreeing import HOST_TIMEOUT_SECONDS, Agreement, together
from safeload.decoding import arrays, cast_bytes, decode
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    Finding,
    ManifestError,
    PolicyError,
    RejectedError,
    RollbackError,
    StagingError,
    VerificationError,
    escape,
)
from safeload.expecting import Expectations, Expected, evidence, hinted, mixture_hint, require_trust_outside, run_facts
from safeload.manifest import TrustedManifest
from safeload.memory import available_memory, track
from safeload.placing import Casts, Join
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import Progress, Report
from safeload.scanning import admit, naming_swaps, policy_facts, require_policy_outside, verify_files
from safeload.sizes import parse_size
from safeload.staging import stage
from safeload.tally import LoadReport, Tally
from safeload.trust.keys import PublicKey
from safeload.trust.oms import is_bundle
from safeload.trust.store import SigstoreIdentity, Trust, TrustStore
from safeload.verifying import manifest_in, parse_pin, read_manifest


def load(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    shardings: Any = None,
    memory_budget: int | str | None = None,
    cast: Mapping[str, str] | None = None,
    joins: Sequence[Join] = (),
    host_timeout: float = HOST_TIMEOUT_SECONDS,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Mapping[str, Any]:
    """Load a checkpoint, but only the bytes that trusted keys signed and the policy allows.

    A signature does not say that a manifest is the newest: pin it, or keep a history, or an old one is accepted too.

    With shardings, each process of a JAX job reads only what its own devices hold, by the signed digests of chunks,
    and all of them accept or none does. Nothing is returned before every byte that is wanted was verified and scanned.

    Args:
        directory: Where the files are. Untrusted; it may change while it is read.
        manifest: The signed manifest: a path, or the bytes of the envelope.
        trust: Who may sign: a trust store, one or more public keys, or paths of either.
        policy: What may be in the files: a shipped policy's name, a path to your own, or a `Policy`.
        shardings: None for numpy arrays. Otherwise where each tensor goes, and the result holds jax Arrays: a pytree
            of `jax.sharding.Sharding` that is a prefix of the result, or a function of a tensor's path and shape, such
            as `safeload.assembling.partition_rules` makes.
        memory_budget: Most bytes to stage in ("8GiB", or a number), copies on the host included; None for what the
            machine has available. Without shardings, all files have to fit. With them, a checkpoint of any size goes
            through it, as long as the signed chunks (16 MiB each) fit that cover one device's part of a tensor: few for
            rows, but all of the tensor's for a column cut, whose parts lie in every chunk. A file without digests of
            chunks has to fit whole. `safeload plan` says how much that is. The arrays themselves count only where they
            are numpy's.
        cast: Floating-point dtypes by regular expressions on a tensor's path, the first that is found in it; nothing
            else is cast.
        joins: Which files are blocks of one tensor, that several hosts wrote; see `safeload.placing.join_blocks`.
        host_timeout: Seconds to wait for another process of the job once this one is done.
        progress: Told how far it has come.
        **expected: What to hold the manifest against: a pin, a history, a revision; see `Expectations`.

    Returns:
        What each file of tensors holds, by its path in the manifest, or by a join's. Containers are as in the file,
        tensors are read-only arrays that share the staged memory, records are frozen classes with the declared fields.

    Raises:
        SignatureError: Not enough trusted keys signed this manifest.
        ManifestError: The manifest breaks its schema, or is not the one that was pinned or expected.
        RevokedError: The manifest, or a key that it needs, was revoked.
        ExpiredError: The manifest is past its expiry, and not pinned.
        RollbackError: The manifest is older than one that was accepted before, or contradicts it.
        FileSetError: The directory does not hold exactly the listed files.
        DigestMismatchError: A file's bytes are not those that were signed.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
        PolicyError: A file holds what the policy does not allow, or the purpose needs files that are not there.
        ConfigError: An argument is wrong, or the history cannot be used.
        StagingError: There is no room, or a file cannot be read.
        ShardingError: A tensor does not fit its sharding.
        HostError: Another process of the job did not answer, or has no verdict. What it refused is raised here too.
    """
    return _load(
        directory,
        Tally(),
        manifest=manifest,
        trust=trust,
        policy=policy,
        shardings=shardings,
        memory_budget=memory_budget,
        cast=cast,
        joins=joins,
        host_timeout=host_timeout,
        progress=progress,
        expected=expected,
    )


def load_and_report(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    shardings: Any = None,
    memory_budget: int | str | None = None,
    cast: Mapping[str, str] | None = None,
    joins: Sequence[Join] = (),
    host_timeout: float = HOST_TIMEOUT_SECONDS,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> tuple[Mapping[str, Any], LoadReport]:
    """Return what `load` returns, with the same arguments and errors, and what it took."""
    tally = Tally()
    started = perf_counter()
    with track() as memory:
        tree = _load(
            directory,
            tally,
            manifest=manifest,
            trust=trust,
            policy=policy,
            shardings=shardings,
            memory_budget=memory_budget,
            cast=cast,
            joins=joins,
            host_timeout=host_timeout,
            progress=progress,
            expected=expected,
        )
        tally.spend("total", started)
    return tree, tally.report(memory)


def _load(
    directory: str | Path,
    tally: Tally,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy,
    shardings: Any,
    memory_budget: int | str | None,
    cast: Mapping[str, str] | None,
    joins: Sequence[Join],
    host_timeout: float,
    progress: Progress | None,
    expected: Expectations,
) -> Mapping[str, Any]:
    started = perf_counter()
    if shardings is None:
        casts = None if cast is None else Casts(cast)
        if joins:
            raise ConfigError("joins need shardings: one process has no use for the blocks of several as numpy arrays")
        held = hold(directory, manifest=manifest, trust=trust, **expected)
        tally.spend("manifest", started)
        _require_room_to_cast(held.trusted, casts, memory_budget)
        tree = _stage_and_decode(
            directory, held, policy=policy, memory_budget=memory_budget, progress=progress, tally=tally
        )
        return {path: arrays(value, casts) for path, value in tree.items()}
    _require_jax()
    placed: Mapping[str, Any] = {}
    try:
        # All processes of the job accept or refuse together, from here on: the manifest as well, which each has read.
        with together(seconds=host_timeout) as agreement:
            casts = Casts(cast)
            held = hold(directory, manifest=manifest, trust=trust, **expected)
            tally.spend("manifest", started)
            placed = _place(
                directory,
                held,
                agreement,
                tally,
                policy=policy,
                memory_budget=memory_budget,
                place=shardings,
                joins=joins,
                casts=casts,
                progress=progress,
            )
            started = perf_counter()
        tally.spend("agree", started)
        held.expectation.record(held.trusted)
    except BaseException:
        placed = {}  # a traceback keeps what its frames can see, and nothing of what was refused is to be had there
        raise
    return placed


def load_placed(
    directory: str | Path,
    held: Held,
    *,
    policy: str | Path | Policy,
    memory_budget: int | str | None,
    place: Any,
    joins: Sequence[Join] = (),
    cast: Mapping[str, str] | None = None,
    host_timeout: float = HOST_TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Return what a held manifest lists, as global `jax.Array`s, read and placed file by file; a half of `load`.

    A caller that does more than this together with the other processes of the job, such as holding the manifest, does
    all of it within `safeload.agreeing.together`.

    Args:
        directory: Where the files are.
        held: The manifest, see `hold`.
        policy: As for `load`.
        memory_budget: As for `load`.
        place: As `shardings` for `load`; None is JAX's default device for all.
        joins: As for `load`.
        cast: As for `load`.
        host_timeout: As for `load`.
        progress: As for `load`.

    Raises:
        RejectedError: As `load`.
        ConfigError: An argument is wrong, or JAX is not installed.
        StagingError: As `load`.
        ShardingError: As `load`.
        HostError: As `load`.
    """
    _require_jax()
    placed: Mapping[str, Any] = {}
    try:
        with together(seconds=host_timeout) as agreement:
            casts = Casts(cast)
            placed = _place(
                directory,
                held,
                agreement,
                Tally(),
                policy=policy,
                memory_budget=memory_budget,
                place=place,
                joins=joins,
                casts=casts,
                progress=progress,
            )
        held.expectation.record(held.trusted)
    except BaseException:
        placed = {}  # as in `_load`
        raise
    return placed


def _place(
    directory: str | Path,
    held: Held,
    agreement: Agreement,
    tally: Tally,
    *,
    policy: str | Path | Policy,
    memory_budget: int | str | None,
    place: Any,
    joins: Sequence[Join],
    casts: Casts,
    progress: Progress | None,
) -> Mapping[str, Any]:
    # Late: jax takes half a second to import and claims devices, which verifying must not.
    from safeload.distributing import distribute

    require_policy_outside(policy, directory)
    tally.expect(held.trusted)
    with _naming_mixtures(held.trusted):
        placed: Mapping[str, Any] = distribute(
            directory,
            held.trusted,
            policy=load_policy(policy),
            memory_budget=_bytes(memory_budget),
            place=place,
            joins=joins,
            casts=casts,
            agreement=agreement,
            tally=tally,
            progress=progress,
            ignore=manifest_in(directory, held.manifest, held.envelope),
        )
    return placed


def _require_jax() -> None:
    if find_spec("jax") is None:
        raise ConfigError("JAX is not installed, and shardings need it", hint="install safeload's extra `jax`")


def load_host(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    memory_budget: int | str | None = None,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> tuple[TrustedManifest, Mapping[str, Any]]:
    """Return the trusted manifest, and what each file holds with every tensor as a `HostTensor`; see `load`."""
    held = hold(directory, manifest=manifest, trust=trust, **expected)
    return held.trusted, load_held(directory, held, policy=policy, memory_budget=memory_budget, progress=progress)


@dataclass(frozen=True, slots=True)
class Held:
    """A manifest that met everything that was expected of it, before any file was read.

    Attributes:
        trusted: The manifest, and who signed it.
        expectation: What it was held against, and what has to learn of it once all of it is loaded.
        manifest: What the caller gave: a path or the envelope.
        envelope: What was read of it.
    """

    trusted: TrustedManifest
    expectation: Expected
    manifest: str | Path | bytes
    envelope: bytes


def hold(
    directory: str | Path, *, manifest: str | Path | bytes, trust: Trust, **expected: Unpack[Expectations]
) -> Held:
    """Verify a manifest and hold it against what is expected of it; the first half of `load_host`."""
    _require_trust(trust)
    require_trust_outside(trust, directory)
    envelope, source = read_manifest(manifest)
    if is_bundle(envelope):
        raise ConfigError(
            f"{escape(source)} is a bundle, which lists no sizes and no tensors: it can be verified and not loaded",
            hint="verify it, then `safeload sign` the directory with a key of your own, and load with that manifest",
        )
    expectation = Expected.of(directory, trust, **expected)
    trusted = expectation.verify(envelope, source)
    if lacking := expectation.lacking(trusted):
        raise PolicyError(*lacking)
    return Held(trusted, expectation, manifest, envelope)


def load_held(
    directory: str | Path,
    held: Held,
    *,
    policy: str | Path | Policy,
    memory_budget: int | str | None,
    progress: Progress | None = None,
) -> Mapping[str, Any]:
    """Stage, admit and decode what a manifest lists; the second half of `load_host`."""
    return _stage_and_decode(
        directory, held, policy=policy, memory_budget=memory_budget, progress=progress, tally=Tally()
    )


def _stage_and_decode(
    directory: str | Path,
    held: Held,
    *,
    policy: str | Path | Policy,
    memory_budget: int | str | None,
    progress: Progress | None,
    tally: Tally,
) -> Mapping[str, Any]:
    require_policy_outside(policy, directory)
    rules = load_policy(policy)
    trusted = held.trusted
    tally.expect(trusted)
    started = perf_counter()
    with _naming_mixtures(trusted):
        staged = stage(
            directory,
            trusted,
            memory_budget=_bytes(memory_budget),
            progress=progress,
            ignore=manifest_in(directory, held.manifest, held.envelope),
        )
    tally.count(staged)
    started = tally.spend("stage", started)
    admitted = admit(staged, policy=rules)
    started = tally.spend("scan", started)
    tree = decode(admitted)
    tally.spend("assemble", started)
    held.expectation.record(trusted)
    return tree


def _require_room_to_cast(trusted: TrustedManifest, casts: Casts | None, memory_budget: int | str | None) -> None:
    """Refuse before a byte is read: what is cast is a copy, which stands beside what is staged."""
    copies = 0 if casts is None else cast_bytes(trusted.manifest, casts)
    if not copies:
        return
    budget = _bytes(memory_budget)
    limit, name = (available_memory(), "available memory") if budget is None else (budget, "the memory budget")
    staged = trusted.manifest.totals.bytes
    if staged + copies > limit:
        raise StagingError(
            f"staging takes {staged:,} bytes and what is cast takes {copies:,} beside them, {name} is {limit:,} bytes",
            hint="free memory, or raise --memory-budget; with shardings, a file at a time is cast",
        )


def _bytes(memory_budget: int | str | None) -> int | None:
    # A number as well, so that -1 and 0 are told for what they are rather than as too little memory.
    return None if memory_budget is None else parse_size(memory_budget)


def _require_trust(trust: object) -> None:
    """Refuse what names nobody before it is looked into: such as None, for a setting that is not there."""
    kinds = (str, Path, PublicKey, TrustStore, SigstoreIdentity)
    items = trust if isinstance(trust, Collection) and not isinstance(trust, kinds) else (trust,)
    for item in items:
        if not isinstance(item, kinds):
            raise ConfigError(
                f"trust: expected a public key, a trust store or a path of one, found {escape(type(item).__name__)}",
                hint="name whom you trust, such as trust='publisher.key.pub'",
            )


@contextmanager
def _naming_mixtures(trusted: TrustedManifest) -> Iterator[None]:
    """Add to what is wrong with several files that they may be of another revision."""
    try:
        yield
    except (DigestMismatchError, FileSetError) as err:
        raise type(err)(*hinted(err.findings, mixture_hint(err.findings, trusted))) from err


def verify(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Report:
    """Prove that a directory is what trusted keys signed and the policy allows, without loading it.

    Every file is read once, hashed and scanned; memory stays small whatever the size. The result says what was true of
    the bytes that were read: to use them, `load` them, which verifies what it loads.

    Args:
        directory: Where the files are. Untrusted.
        manifest: The signed manifest: a path, or the bytes of the envelope. A bundle of OpenSSF Model Signing will do.
        trust: Who may sign: a trust store, one or more public keys, or paths of either; for a bundle also a path of
            certificates of authorities.
        policy: What may be in the files.
        progress: Told how far it has come.
        **expected: What to hold the manifest against, as for `load`.

    Returns:
        The report, whose verdict is "accepted". As JSON it is a record to keep: what was verified, who signed it, what
        it was held against, when, and by which version of safeload.

    Raises:
        RejectedError: As `load`; every finding of every file is in it.
        ConfigError: An argument is wrong, or the history cannot be used.
        StagingError: The directory cannot be read, or the history not written.
    """
    report, error = _check(directory, manifest, trust, policy=policy, progress=progress, expected=expected)
    if error is not None:
        raise error(*report.all_findings)
    return report


def check(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    policy: str | Path | Policy = DEFAULT_POLICY,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Report:
    """Return the report of `verify`, also where its verdict is "rejected"; no file is in it if the manifest was."""
    report, _ = _check(directory, manifest, trust, policy=policy, progress=progress, expected=expected)
    return report


def _check(
    directory: str | Path,
    manifest: str | Path | bytes,
    trust: Trust,
    *,
    policy: str | Path | Policy,
    progress: Progress | None,
    expected: Expectations,
) -> tuple[Report, type[RejectedError] | None]:
    """Return the report, and the class of error that its findings make, None where it is accepted."""
    _require_trust(trust)
    require_trust_outside(trust, directory)
    require_policy_outside(policy, directory)
    rules = load_policy(policy)
    envelope, source = read_manifest(manifest)
    if is_bundle(envelope):
        itself = manifest_in(directory, manifest, envelope)
        return _check_bundle(directory, envelope, source, trust, rules, itself, progress, expected)
    expectation = Expected.of(directory, trust, **expected)
    facts = {**policy_facts(rules), **expectation.facts()}
    try:
        trusted = expectation.verify(envelope, source)
    except VerificationError as err:
        return Report((), err.findings, facts), type(err)
    itself = manifest_in(directory, manifest, envelope)
    found = verify_files(directory, trusted, policy=rules, ignore=itself, progress=progress)
    hint = mixture_hint(found.all_findings, trusted)
    files = tuple(replace(file, findings=hinted(file.findings, hint)) for file in found.files)
    files = naming_swaps(replace(found, files=files), trusted).files  # which says more than that they are mixed
    lacking = expectation.lacking(trusted)
    error = _error_class(found) or (PolicyError if lacking else None)
    findings = (*hinted(found.findings, hint), *lacking)
    report = Report(files, findings, {**facts, **expectation.facts(trusted), **evidence(trusted, expectation.now)})
    if error is None:
        try:
            expectation.record(trusted)
        except RollbackError as err:
            return replace(report, findings=err.findings), RollbackError
    return report, error


def _check_bundle(  # noqa: PLR0917 - the parts of one call of `_check`
    directory: str | Path,
    bundle: bytes,
    source: str,
    trust: Trust,
    rules: Policy,
    itself: Mapping[str, bytes],
    progress: Progress | None,
    expected: Expectations,
) -> tuple[Report, type[RejectedError] | None]:
    """Do what `_check` does, for a bundle of OpenSSF Model Signing in the place of a manifest."""
    from safeload.interchange import trusted_bundle, verify_bundle_files

    pin, model = expected.get("pin"), expected.get("model")
    if pin is not None:
        parse_pin(pin)
    now = datetime.now(UTC)
    facts = {**policy_facts(rules), "expected": {"pin": pin, "model": model}, **run_facts(now)}
    asked = sorted(name for name, value in expected.items() if value is not None and name not in {"pin", "model"})
    if asked:
        # Whoever made the file chose the format, and must not get out of what was asked for by choosing a weaker one.
        message = f"expected a manifest, which can be held to {' and '.join(asked)}, found a bundle, which cannot"
        hint = "get a manifest of safeload from its publisher"
        return Report((), (Finding("bundle-says-less", message, file=source, hint=hint),), facts), ManifestError
    try:
        trusted = trusted_bundle(bundle, source, trust, now=now, pin=pin, model=model)
    except VerificationError as err:
        return Report((), err.findings, facts), type(err)
    report = verify_bundle_files(directory, trusted, policy=rules, ignore=itself, progress=progress)
    return replace(report, facts={**facts, **report.facts}), _error_class(report)


def _error_class(report: Report) -> type[RejectedError] | None:
    if report.findings:
        return FileSetError
    errors = [file.error for file in report.files if file.error is not None]
    # Bytes that are not the signed ones explain whatever else is wrong with them.
    return DigestMismatchError if DigestMismatchError in errors else next(iter(errors), None)
