"""Audit: verify what has a manifest, scan all of it in any case, and say what was checked and what was not.

For whoever watches over many checkpoints. Nothing is loaded and nothing is kept: each file streams past once, hashed
and parsed in the same pass, on this machine or on the workers of an executor.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal, Unpack, get_args

from safeload import __version__, loading
from safeload.baselines import Baseline, read_baseline
from safeload.errors import (
    ConfigError,
    FileSetError,
    Finding,
    RejectedError,
    RollbackError,
    StagingError,
    VerificationError,
    escape,
)
from safeload.expecting import (
    Expectations,
    Expected,
    evidence,
    hinted,
    mixture_hint,
    require_trust_outside,
    run_facts,
)
from safeload.files import Root, StreamSource, require_outside
from safeload.formats import Parsed, Siblings
from safeload.formats.detection import HEAD_BYTES, detect
from safeload.formats.pickles import parse_pickle
from safeload.formats.pickles.tracing import Step, TracingMachine, TracingTorchMachine
from safeload.formats.pytorch import is_legacy, parse_pytorch, parse_pytorch_legacy
from safeload.manifest import FileEntry, TrustedManifest
from safeload.parallel import n_processors, run
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import FileReport, Progress, Report
from safeload.result_cache import CachedResult, ResultCache
from safeload.scanning import (
    Job,
    LastRead,
    SiblingsOnDisk,
    check_against,
    check_digest,
    check_indexes,
    file_report,
    jobs_in,
    largest_of_set,
    parse,
    peek_limit,
    policy_facts,
    refused,
    require_policy_outside,
    unread,
)
from safeload.staging import check_file_set
from safeload.trust.oms import is_bundle
from safeload.trust.store import Trust
from safeload.verifying import manifest_in, read_manifest

FailOn = Literal["known", "unverified"]
"""What fails an audit beside new findings: known ones too, and a directory that no manifest was given for."""

MAX_TRACED_FILES: Final = 100
"""Refused pickles whose instructions a report shows; more would make a page that nobody reads."""

MAX_TRACED_BYTES: Final = 64 * 1024 * 1024
"""Longest such file: it is read and hashed a second time, so that what is shown is what was refused."""

MAX_TRACED_STEPS: Final = 300
_FIRST_STEPS: Final = 40
_STEPS_BEFORE: Final = 8
"""Of a longer run the first instructions are shown, and those before each refusal: what was named, and with what."""

MAX_JOBS: Final = 256
"""Most threads: what is more waits for a disk in any case, and each holds a file open and a buffer."""

_MAX_OPEN_ROOTS: Final = 8
"""Directories that are worked on at one time; each keeps up to 17 descriptors open."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What a refused pickle would have had a reader do.

    Attributes:
        steps: Its instructions, not all of them where it has many.
        n_steps: How many there were.
    """

    steps: tuple[Step, ...]
    n_steps: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found.

    Attributes:
        report: All of it, as one report, whose facts say under "audit" what was checked, what was not, and the outcome.
        traces: Of refused pickles, by path, where that was asked for.
    """

    report: Report
    traces: Mapping[str, Trace]

    @property
    def has_passed(self) -> bool:
        """Whether there is nothing new to refuse, nor anything else that the caller wanted to fail for."""
        return bool(self.report.facts["audit"]["gate"] == "passed")


def audit(
    directories: str | Path | Iterable[str | Path] | Mapping[str | Path, str | Path | bytes | None],
    *,
    trust: Trust = (),
    policy: str | Path | Policy = DEFAULT_POLICY,
    baseline: str | Path | None = None,
    fail_on: Collection[FailOn | str] = (),
    cache: str | Path | None = None,
    cache_key: str | Path | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    traces: bool = False,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Audit:
    """Verify and scan checkpoints, and sum up what was checked.

    A directory with a manifest is held against it, as `verify` does; one without is scanned, and the report says that
    nobody vouches for it. Where the manifest itself is refused, or files are there that it does not list, they are
    scanned all the same. Each byte is read once, but for: the bytes of an index that its data files need, a file that
    only looked like one in the cache, and, with `traces`, refused pickles.

    Args:
        directories: One or more, or a mapping of each to its manifest, None where it has none. Untrusted.
        trust: Who may sign; needed where there is a manifest.
        policy: What may be in the files.
        baseline: A file of known findings, which do not fail the audit; see `safeload.baselines`.
        fail_on: What fails it beside new findings.
        cache: A directory of results to use and add to; see `safeload.result_cache`.
        cache_key: The key that its results are authenticated with, needed with `cache`.
        jobs: Threads on this machine, up to `MAX_JOBS`; as many as there are processors if it is None.
        executor: Who does the work instead: anything that runs a function of picklable arguments. Its workers must see
            the same paths and run the same version of safeload, and they are trusted as this process is.
        traces: Whether to show what refused pickles would have done.
        progress: Told how far it has come; of many directories, a few at a time.
        **expected: What to hold every manifest against, as for `verify`.

    Returns:
        What was found. Nothing is raised for that: ask for `has_passed`.

    Raises:
        ConfigError: An argument, the policy, the baseline or the cache's key is wrong, or a directory does not exist.
        StagingError: The cache or the history cannot be written, or a worker of the executor failed.
    """
    manifests = _manifests(directories)
    _check_types(fail_on, {"baseline": baseline, "cache": cache, "cache_key": cache_key}, jobs, executor, progress)
    _check_arguments(manifests, trust, fail_on, (cache, cache_key), jobs, executor, expected)
    for directory in manifests:
        require_policy_outside(policy, directory)
        require_trust_outside(trust, directory)
        for what, path in {"baseline": baseline, "cache": cache, "cache's key": cache_key}.items():
            if path is not None:
                require_outside(what, path, directory)
    rules = load_policy(policy)
    known = None if baseline is None else read_baseline(baseline)
    started = datetime.now(UTC)
    with ExitStack() as stack:
        remembered = None
        if cache is not None and cache_key is not None:
            remembered = stack.enter_context(ResultCache(cache, cache_key, rules))
        crew = _Crew(rules, remembered, jobs, executor, progress)
        roots = [
            looked
            for first in range(0, len(manifests), _MAX_OPEN_ROOTS)
            for looked in _audit_roots(list(manifests.items())[first : first + _MAX_OPEN_ROOTS], trust, crew, expected)
        ]
        found = crew.trace(roots) if traces else {}
    files = tuple(file for root in roots for file in root.files)
    report = Report(files, tuple(finding for root in roots for finding in root.findings), {})
    facts = {**policy_facts(rules), **run_facts(started)}
    if len(roots) == 1:
        facts = {**facts, **roots[0].facts}
    summary = _summary(roots, report, known, frozenset(fail_on), remembered, with_traces=bool(found))
    return Audit(replace(report, facts={**facts, "audit": summary}), found)


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """Lend the workers of a Dask cluster as an executor.

    The scheduler and its workers run what they are sent, over a connection that is neither encrypted nor authenticated
    unless its address begins with `tls://`: a cluster is trusted as this process is.

    Args:
        address: Of the scheduler, such as `tcp://10.0.0.1:8786`.

    Raises:
        ConfigError: The package is not installed, or no scheduler answers at the address.
    """
    try:
        from distributed import Client
    except ImportError as err:
        raise ConfigError("Dask is not installed", hint="install safeload with its extra `dask`") from err
    connect: Any = Client  # it has no types
    try:
        client = connect(address, timeout=_CONNECT_SECONDS, set_as_default=False)
    except Exception as err:  # a foreign client: whatever it raises, there is no cluster
        message = f"cannot reach a Dask scheduler at {escape(address)}: {escape(str(err)) or type(err).__name__}"
        raise ConfigError(message, hint="start one with: dask scheduler") from err
    with client:
        yield client.get_executor()


_CONNECT_SECONDS: Final = 10


# ---------------------------------------------------------------- arguments


def _manifests(directories: object) -> dict[str, str | Path | bytes | None]:
    if isinstance(directories, str | Path):
        return {str(directories): None}
    if not isinstance(directories, Iterable) or isinstance(directories, bytes):
        raise _wrong("directories", "one or more paths", directories, hint="name the checkpoints to audit")
    pairs: Iterable[tuple[object, object]]
    pairs = directories.items() if isinstance(directories, Mapping) else ((each, None) for each in directories)
    manifests: dict[str, str | Path | bytes | None] = {}
    for directory, manifest in pairs:
        if not isinstance(directory, str | Path):
            raise _wrong("directories", "paths", directory, hint="name the checkpoints to audit")
        if not isinstance(manifest, str | Path | bytes | None):
            raise _wrong("directories", "a manifest's path, its bytes or None", manifest, hint="None where it has none")
        if str(directory) in manifests:
            raise ConfigError(
                f"expected each directory once, found {escape(str(directory))} twice", hint="leave out the second"
            )
        manifests[str(directory)] = manifest
    return manifests


def _wrong(name: str, expected: str, found: object, *, hint: str) -> ConfigError:
    return ConfigError(f"{name}: expected {expected}, found {type(found).__name__}", hint=hint)


def _check_types(
    fail_on: object, paths: Mapping[str, object], jobs: object, executor: object, progress: object
) -> None:
    """Say of an argument of another type which it is, and what goes there, before anything is looked at."""
    if not isinstance(fail_on, Collection) or isinstance(fail_on, str | bytes):
        raise _wrong("fail_on", "a list of words", fail_on, hint="such as fail_on=['known']")
    for name, path in paths.items():
        if not isinstance(path, str | Path | None):
            raise _wrong(name, "a path or None", path, hint="leave it out where there is none")
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool)):
        raise _wrong("jobs", "a number of threads or None", jobs, hint="leave it out for as many as processors")
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise _wrong("executor", "an executor or None", executor, hint="see `concurrent.futures.Executor`")
    if progress is not None and not callable(progress):
        raise _wrong("progress", "a function or None", progress, hint="it is told phase, bytes done and bytes in all")


def _check_arguments(  # noqa: PLR0917 - those of `audit`
    manifests: Mapping[str, object],
    trust: Trust,
    fail_on: Iterable[str],
    cache: tuple[object, object],
    jobs: int | None,
    executor: Executor | None,
    expected: Expectations,
) -> None:
    if not manifests:
        raise ConfigError("expected a directory, found none", hint="name the checkpoints to audit")
    for directory in manifests:
        if not os.path.isdir(directory):  # noqa: PTH112 - `Path.is_dir` raises where we may not look
            raise ConfigError(
                f"{escape(directory)} is no directory", hint="check the path; name a directory, not a file"
            )
    n_manifests = sum(manifest is not None for manifest in manifests.values())
    if n_manifests and not trust:
        raise ConfigError("a manifest was given, and nobody to trust", hint="name the public key of who signed it")
    if trust and not n_manifests:
        raise ConfigError("somebody to trust was given, and no manifest", hint="name the manifest that they signed")
    asked = sorted(name for name, value in expected.items() if value is not None)
    if asked and not n_manifests:
        raise ConfigError(
            f"{' and '.join(asked)} can be expected of a manifest only, and none was given",
            hint="name the signed manifest",
        )
    if expected.get("pin") is not None and len(manifests) > 1:
        raise ConfigError(
            "a pin names one manifest, and several directories were given", hint="audit that directory alone"
        )
    if unknown := [word for word in fail_on if word not in get_args(FailOn)]:
        raise ConfigError(
            f"fail_on: expected {' or '.join(get_args(FailOn))}, found {escape(str(unknown[0]))!r}",
            hint="new findings fail it in any case",
        )
    if (cache[0] is None) != (cache[1] is None):
        raise ConfigError("a cache and its key go together", hint="name both")
    if jobs is not None and (not 1 <= jobs <= MAX_JOBS or executor is not None):
        raise ConfigError(
            f"jobs: expected a number of threads on this machine, from 1 to {MAX_JOBS}, and no executor beside it",
            hint="leave it out for as many as there are processors",
        )


# ---------------------------------------------------------------- one directory


@dataclass(slots=True)
class _Looked:
    """What is known of one directory so far."""

    directory: str
    facts: dict[str, Any]
    findings: list[Finding]
    jobs: list[Job]
    of_files: dict[str, list[Finding]] = field(default_factory=dict)
    trusted: TrustedManifest | None = None
    expected: Expected | None = None
    files: tuple[FileReport, ...] = ()

    @property
    def is_accepted(self) -> bool:
        return bool(self.files) and not self.findings and not any(file.findings for file in self.files)


def _audit_roots(
    group: Sequence[tuple[str, str | Path | bytes | None]], trust: Trust, crew: _Crew, expected: Expectations
) -> Iterator[_Looked]:
    """Look at a few directories at the same time, and yield what is known of each."""
    with ExitStack() as stack:
        looked: list[_Looked] = []
        for directory, manifest in group:
            try:
                root = stack.enter_context(Root(directory))
            except StagingError as err:
                # One directory that cannot be opened must not keep the others from being looked at; it is refused.
                finding = Finding("unreadable", err.message, file=directory, hint="check its permissions")
                looked.append(_Looked(directory, {}, [finding], []))
                continue
            envelope = None if manifest is None else read_manifest(manifest)
            if envelope is None or manifest is None:
                looked.append(_unsigned(directory, root))
            elif is_bundle(envelope[0]):
                looked.append(_bundle(directory, root, manifest, trust, crew, expected))
            else:
                looked.append(_signed(directory, root, manifest, envelope, trust, expected))
        jobs = [job for each in looked for job in each.jobs]
        reports = iter(crew.look(jobs))
        for each in looked:
            if each.jobs:
                each.files = _with_findings([next(reports) for _ in each.jobs], each)
            _conclude(each)
    yield from looked


def _unsigned(directory: str, root: Root) -> _Looked:
    jobs = list(jobs_in(directory, root))
    empty = Finding(
        "nothing-to-scan", "expected files, found an empty directory", file=directory, hint="check the path"
    )
    return _Looked(directory, {}, [] if jobs else [empty], jobs)


def _signed(  # noqa: PLR0917 - as `_bundle`
    directory: str,
    root: Root,
    manifest: str | Path | bytes,
    envelope: tuple[bytes, str],
    trust: Trust,
    expected: Expectations,
) -> _Looked:
    """Hold the manifest against who is trusted, and the file set against the manifest; the files are read later."""
    expectation = Expected.of(directory, trust, **expected)
    facts = expectation.facts()
    itself = manifest_in(directory, manifest, envelope[0])
    try:
        trusted = expectation.verify(*envelope)
    except VerificationError as err:
        looked = _unsigned(directory, root)
        # What nobody vouches for is scanned all the same; the manifest that lies there is no part of it.
        jobs = [job for job in looked.jobs if not (job.path in itself and root.holds(job.path, itself[job.path]))]
        return _Looked(directory, facts, [*err.findings, *looked.findings], jobs)
    listed = trusted.manifest.by_path
    by_file: dict[str, list[Finding]] = {}
    for finding in check_file_set(root, trusted.manifest, ignore=itself):
        by_file.setdefault(finding.file or "", []).append(finding)
    jobs = []
    for job in jobs_in(directory, root):
        if job.path in itself and job.path not in listed and job.path not in by_file:
            continue  # the manifest, whose bytes were compared when it was not counted as unlisted
        entry = None if job.path in by_file else listed.get(job.path)
        jobs.append(replace(job, entry=entry))
    present = {job.path for job in jobs}
    shown = partial(os.path.join, directory)
    loose = [f.in_file(shown(path)) for path, findings in by_file.items() if path not in present for f in findings]
    of_files = {path: findings for path, findings in by_file.items() if path in present}
    facts = {**facts, **expectation.facts(trusted), **evidence(trusted, expectation.now)}
    return _Looked(directory, facts, [*loose, *expectation.lacking(trusted)], jobs, of_files, trusted, expectation)


def _bundle(  # noqa: PLR0917 - the parts of one call of `_audit_roots`
    directory: str, root: Root, manifest: str | Path | bytes, trust: Trust, crew: _Crew, expected: Expectations
) -> _Looked:
    """Verify by a bundle of OpenSSF Model Signing, which has code of its own: no cache, and no executor."""
    report = loading.check(
        directory, manifest=manifest, trust=trust, policy=crew.policy, progress=crew.progress, **expected
    )
    if not report.files:
        unsigned = _unsigned(directory, root)
        return _Looked(directory, dict(report.facts), [*report.findings, *unsigned.findings], unsigned.jobs)
    shown = partial(os.path.join, directory)
    files = tuple(replace(file, path=shown(file.path)) for file in report.files)
    findings = [f if f.file is None else f.in_file(shown(f.file)) for f in report.findings]
    return _Looked(directory, dict(report.facts), findings, [], files=files)


def _with_findings(reports: Sequence[FileReport], looked: _Looked) -> tuple[FileReport, ...]:
    """Add to each file what is wrong with its being there at all, which comes before what is in it."""
    files = []
    for job, report in zip(looked.jobs, reports, strict=True):
        codes = {finding.code for finding in report.findings}
        more = tuple(f.in_file(job.shown) for f in looked.of_files.get(job.path, ()) if f.code not in codes)
        placed = tuple(replace(finding, file=None) for finding in more)
        files.append(replace(report, findings=placed + report.findings, error=FileSetError) if placed else report)
    if looked.trusted is None:
        return tuple(files)
    hint = mixture_hint([f.in_file(file.path) for file in files for f in file.findings], looked.trusted)
    return tuple(replace(file, findings=hinted(file.findings, hint)) for file in files)


def _conclude(looked: _Looked) -> None:
    """Let the history know of a directory that is accepted as a whole."""
    if looked.expected is not None and looked.trusted is not None and looked.is_accepted:
        try:
            looked.expected.record(looked.trusted)
        except RollbackError as err:
            looked.findings += err.findings


# ---------------------------------------------------------------- one file


@dataclass(frozen=True, slots=True)
class _Task:
    """All that is needed to look at one file, wherever that is done.

    Attributes:
        directory: The directory that the file is opened from.
        path: Path below it.
        shown: Path in the report.
        size: Length in bytes, as far as known.
        entry: What a trusted manifest says of it.
        finding: Why it cannot be opened, if that is known.
        cached: What was found in files of this name and length before, by digest.
    """

    directory: str
    path: str
    shown: str
    size: int
    entry: FileEntry | None
    finding: Finding | None
    cached: Mapping[str, CachedResult]


@dataclass(frozen=True, slots=True)
class _Result:
    """What was found in one file.

    Attributes:
        file: The report on it.
        used: Digests of each file beside it that was read for it, by path.
        fresh: What the cache is to remember; None for nothing.
        is_reused: Whether the cache had it.
        version: The version of safeload that looked.
    """

    file: FileReport
    used: Mapping[str, Collection[str]]
    fresh: CachedResult | None
    is_reused: bool
    version: str = __version__


class _Watched:
    """The files beside one, and whether they were asked for: then its result holds for no other place."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self.was_asked = False

    def read(self, name: str, limit: int) -> bytes | None:
        self.was_asked = True
        return self._siblings.read(name, limit)


@dataclass(frozen=True, slots=True)
class _SentPolicy:
    """A policy on its way to a worker: resolved, as it is a tree of objects that no two processes share."""

    toml: str
    source: str


@lru_cache(maxsize=4)
def _received(sent: _SentPolicy) -> Policy:
    return Policy.parse(sent.toml.encode(), source=sent.source)


def _look_there(task: _Task, sent: _SentPolicy) -> _Result:
    """Look at a file from a process that holds nothing open: what an executor's workers run."""
    job = _job(task, Root(task.directory))
    try:
        with job.root:
            return _look(task, job, _received(sent), lambda _: None)
    except StagingError as err:
        return _Result(unread(job, FileSetError(Finding("unreadable", err.message))), {}, None, is_reused=False)


def _job(task: _Task, root: Root) -> Job:
    return Job(task.shown, task.path, task.size, root, task.entry, task.finding)


def _look(
    task: _Task, job: Job, policy: Policy, advance: Callable[[int], None], last: LastRead | None = None
) -> _Result:
    """Read one file once, and say what is in it and whether it is the signed one."""
    if task.finding is not None:
        return _Result(unread(job, FileSetError(task.finding)), {}, None, is_reused=False)
    used: dict[str, set[str]] = {}
    siblings = _Watched(SiblingsOnDisk(job, used, last))
    try:
        hit = _cached(task, job, advance) if task.cached else None
        if hit is not None:
            looked: tuple[str, Parsed, str | None, int] = hit.kind, hit.parsed(), hit.sha256, hit.size
        else:
            looked = _parse(job, policy, siblings, partial(_only_stop, advance) if task.cached else advance)
    except (FileSetError, StagingError) as err:
        # A file that cannot be read has no verdict of its own to give: it is refused, and the run goes on.
        refusal = err if isinstance(err, FileSetError) else FileSetError(Finding("unreadable", err.message))
        return _Result(unread(job, refusal), used, None, is_reused=False)
    kind, parsed, sha256, size = looked
    fresh = None
    if hit is None and sha256 is not None and not siblings.was_asked:
        fresh = CachedResult.of(task.path, size, sha256, kind, parsed)
    if task.entry is not None:
        parsed = check_digest(task.entry, sha256, size, check_against(task.entry, kind, parsed))
    return _Result(file_report(job.shown, kind, size, parsed, sha256), used, fresh, is_reused=hit is not None)


def _cached(task: _Task, job: Job, advance: Callable[[int], None]) -> CachedResult | None:
    """Hash a file, and return what is known of exactly these bytes."""
    with StreamSource(job.root.open(job.path), job.shown, hashing=True, advance=advance) as stream:
        if stream.size != task.size:  # what is known is of another length, and this may be a hole by now
            return None
        return task.cached.get(stream.finish())


def _only_stop(advance: Callable[[int], None], _: int) -> None:
    """Let a second reading be stopped, and not be counted."""
    advance(0)


def _parse(
    job: Job, policy: Policy, siblings: Siblings, advance: Callable[[int], None]
) -> tuple[str, Parsed, str | None, int]:
    with _open(job, policy, advance) as stream:
        kind, parsed = parse(stream, job.shown, policy, siblings)
        if stream.size > policy.limits.max_file_bytes:
            # Refused for that: hashing what may be one hole would keep everybody waiting, and change nothing.
            advance(stream.size)
            return kind, parsed, None, stream.size
        sha256 = stream.finish()
        if stream.refusal is not None and parsed.refusal is None:
            parsed = refused(parsed, stream.refusal)
        return kind, parsed, sha256, stream.size


def _open(job: Job, policy: Policy, advance: Callable[[int], None]) -> StreamSource:
    limit = peek_limit(policy)
    return StreamSource(job.root.open(job.path), job.shown, hashing=True, peek_limit=limit, advance=advance)


def _trace_there(task: _Task, sha256: str, sent: _SentPolicy) -> Trace | None:
    return _trace(task, sha256, _received(sent))


def _trace(task: _Task, sha256: str, policy: Policy) -> Trace | None:
    """Run a refused pickle again, telling each step; None where it is no pickle, or another file by now."""
    kept: list[Step] = []
    recent: deque[Step] = deque(maxlen=_STEPS_BEFORE)
    n_steps = 0

    def tell(step: Step) -> None:
        nonlocal n_steps
        n_steps += 1
        if len(kept) >= MAX_TRACED_STEPS:
            return
        if n_steps <= _FIRST_STEPS:
            kept.append(step)
        elif step.refusal is not None:
            kept.extend([*recent, step])
            recent.clear()
        else:
            recent.append(step)

    try:
        with Root(task.directory) as root, _open(_job(task, root), policy, lambda _: None) as stream:
            if stream.size > MAX_TRACED_BYTES:  # another file by now, and maybe one hole
                return None
            head = stream.peek(0, HEAD_BYTES)
            kind = detect(head, stream.size)
            torch = partial(TracingTorchMachine, tell=tell)
            if kind is not None and kind.name == "zip":
                parse_pytorch(stream, policy, machine=torch)
            elif kind is not None and kind.name != "pickle":
                return None
            elif is_legacy(head):
                parse_pytorch_legacy(stream, policy, machine=torch)
            else:
                parse_pickle(stream, policy, machine=TracingMachine(stream, policy, tell))
            # Told of what is on the disk now, so only if that is what was refused.
            is_the_same = stream.finish() == sha256
    except (RejectedError, StagingError):
        return None
    return Trace(tuple(kept[:MAX_TRACED_STEPS]), n_steps) if is_the_same and kept else None


# ---------------------------------------------------------------- who does the work


class _Crew:
    """Looks at many files: with threads of this process, or with an executor's workers."""

    def __init__(
        self,
        policy: Policy,
        cache: ResultCache | None,
        jobs: int | None,
        executor: Executor | None,
        progress: Progress | None,
    ) -> None:
        self.policy = policy
        self.progress = progress
        self._cache = cache
        self._jobs = jobs
        self._executor = executor
        self._tasks: dict[str, _Task] = {}
        self._sent = _SentPolicy(policy.to_toml(), policy.source)

    def look(self, jobs: Sequence[Job]) -> list[FileReport]:
        """Return the report on each file, in order, with each index held against the files that it names."""
        tasks = [self._task(job) for job in jobs]
        self._tasks.update((task.shown, task) for task in tasks)
        if self._executor is None:
            order = largest_of_set(jobs)
            last: LastRead = {}
            results = run(
                list(zip(tasks, jobs, strict=True)),
                lambda item, meter: self._keep(_look(*item, self.policy, meter.advance, last)),
                size=lambda item: item[0].size,
                threads=self._jobs or n_processors(),
                phase="auditing",
                progress=self.progress,
                order=lambda item: order(item[1]),
            )
        else:
            results = list(self._run_there(_look_there, [(task, self._sent) for task in tasks], tasks, self._keep))
        used: dict[str, set[str]] = {}
        for result in results:
            for path, digests in result.used.items():
                used.setdefault(path, set()).update(digests)
        return check_indexes([result.file for result in results], used)

    def trace(self, roots: Sequence[_Looked]) -> dict[str, Trace]:
        """Return the traces of the first refused pickles."""
        wanted = [
            (self._tasks[file.path], file.sha256)
            for root in roots
            for file in root.files
            if file.findings
            and file.sha256 is not None
            and file.format in {"pickle", "pytorch", "unknown"}
            and file.path in self._tasks
            and (file.size or 0) <= MAX_TRACED_BYTES
        ][:MAX_TRACED_FILES]
        if self._executor is None:
            found: Iterable[Trace | None] = (_trace(*each, self.policy) for each in wanted)
        else:
            arguments = [(*each, self._sent) for each in wanted]
            found = self._run_there(_trace_there, arguments, [task for task, _ in wanted], lambda trace: trace)
        return {task.shown: trace for (task, _), trace in zip(wanted, found, strict=True) if trace is not None}

    def _task(self, job: Job) -> _Task:
        cached = {} if self._cache is None or job.finding is not None else self._cache.candidates(job.path, job.size)
        directory = str(job.root.directory)
        return _Task(directory, job.path, job.shown, job.size, job.entry, job.finding, cached)

    def _keep(self, result: _Result) -> _Result:
        if result.version != __version__:
            message = f"expected workers with safeload {__version__}, found one with {escape(str(result.version))}"
            raise StagingError(message, hint="install the same version on every machine of the cluster")
        if self._cache is not None and result.file.sha256 is not None:
            if result.is_reused:
                self._cache.use.reused += 1
            else:
                self._cache.add(result.fresh)
        return result

    def _run_there(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        tasks: Sequence[_Task],
        keep: Callable[[Any], Any],
    ) -> Iterator[Any]:
        """Yield what an executor's workers return, in order."""
        assert self._executor is not None  # noqa: S101 - see its callers
        tell = self.progress or (lambda *_: None)
        total = sum(task.size for task in tasks)
        done = 0
        futures = {}
        try:
            for number, each in enumerate(arguments):
                futures[self._executor.submit(function, *each)] = number
            results: list[Any] = [None] * len(futures)
            for future in as_completed(futures):
                results[futures[future]] = keep(future.result())
                done += tasks[futures[future]].size
                tell("auditing", done, total)
        except BaseException as err:
            for future in futures:
                future.cancel()
            if not isinstance(err, Exception) or isinstance(err, StagingError):
                raise
            # Whatever a foreign executor raises, it is a machine that failed, and says nothing of a checkpoint.
            message = f"a worker failed: {type(err).__name__}: {escape(str(err))}"
            raise StagingError(message, hint="see the log of the workers") from err
        yield from results


# ---------------------------------------------------------------- what was checked, and the outcome


def _summary(
    roots: Sequence[_Looked],
    report: Report,
    baseline: Baseline | None,
    fail_on: frozenset[str],
    cache: ResultCache | None,
    *,
    with_traces: bool,
) -> dict[str, Any]:
    known, stale = ((), ()) if baseline is None else baseline.split(report)
    keys = {(entry.code, entry.path) for entry in known}
    new = [f for f in report.all_findings if (f.code, f.file) not in keys]
    verified = [root for root in roots if "manifest" in root.facts or "bundle" in root.facts]
    fails = bool(new) or not report.files
    fails = fails or ("known" in fail_on and bool(known)) or ("unverified" in fail_on and len(verified) < len(roots))
    return {
        "gate": "failed" if fails else "passed",
        "fail_on": ["new", *sorted(fail_on)],
        "roots": [_root_facts(root) for root in roots],
        "checked": list(_checked(roots, verified)),
        "not_checked": list(_not_checked(roots, verified, cache, with_traces=with_traces)),
        "new": len(new),
        "known": [entry.model_dump() for entry in known],
        "baseline": None
        if baseline is None
        else {
            "path": baseline.path,
            "sha256": baseline.sha256,
            "entries": len(baseline.known),
            "stale": [entry.model_dump() for entry in stale],
        },
        "cache": None
        if cache is None
        else {
            "reused": cache.use.reused,
            "parsed": cache.use.parsed,
            "damaged_parts": cache.use.damaged,
            "unread_parts": cache.use.unread,
        },
    }


def _root_facts(root: _Looked) -> dict[str, Any]:
    verified = "manifest" in root.facts or "bundle" in root.facts
    return {
        "path": root.directory,
        "mode": "verified" if verified else "scanned",
        "verdict": "accepted" if root.is_accepted else "rejected",
        "files": len(root.files),
        "bytes": sum(file.size or 0 for file in root.files),
        "manifest": root.facts.get("manifest"),
        "bundle": root.facts.get("bundle"),
    }


def _checked(roots: Sequence[_Looked], verified: Sequence[_Looked]) -> Iterator[str]:
    n_hashed = sum(file.sha256 is not None for root in roots for file in root.files)
    yield f"what is in {_files(n_hashed)}, by the policy: read to the end, hashed and parsed in one pass"
    if verified:
        yield f"who signed {_share(verified, roots)}, which files belong there, and the SHA-256 of each"


def _not_checked(
    roots: Sequence[_Looked], verified: Sequence[_Looked], cache: ResultCache | None, *, with_traces: bool
) -> Iterator[str]:
    if len(verified) < len(roots):
        unsigned = [root for root in roots if root not in verified]
        yield f"who made {_share(unsigned, roots)}, and whether all of it is there"
    unread = sum(file.sha256 is None for root in roots for file in root.files)
    if unread:
        yield f"what is in {_files(unread)} that could not be read, or that the policy finds too long"
    ignored = sum(len(root.facts.get("ignored") or ()) for root in roots)
    if ignored:
        yield f"{ignored} path(s) that a bundle's signature leaves out, which were never opened"
    yield "what the numbers do: a model that was trained to misbehave is well formed"
    yield "what JSON and text files mean to the program that reads them"
    if any(root.trusted is not None for root in roots):
        yield "chunk and value digests of a manifest, which only loading and inspecting use"
    if cache is not None and cache.use.reused:
        yield f"{_files(cache.use.reused)} were not parsed again: the cache had what was found for the same digest"
    if with_traces:
        yield "the instructions that are shown of refused pickles are no part of the verdict"


def _files(n: int) -> str:
    return f"{n:,} file{'' if n == 1 else 's'}"


def _share(some: Sequence[_Looked], roots: Sequence[_Looked]) -> str:
    if len(roots) == 1:
        return "the directory"
    return f"all {len(roots)} directories" if len(some) == len(roots) else f"{len(some)} of {len(roots)} directories"
