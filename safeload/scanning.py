"""Scan: facts and a policy make findings. Admit: no finding, or an error.

`scan` looks at files that nobody signed, `verify_files` at a directory that a manifest lists; both stream and hold
nothing. `admit` looks at what was staged, and its result is the proof that a loader asks for.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from safeload.digests import new_blake3, sha256_hex
from safeload.errors import (
    ConfigError,
    DigestMismatchError,
    FileSetError,
    Finding,
    FormatError,
    LimitError,
    PolicyError,
    RejectedError,
    StagingError,
    escape,
    reason,
)
from safeload.files import Root, StreamSource, require_outside
from safeload.formats import MemorySource, Parsed, Siblings, Source
from safeload.formats.detection import HEAD_BYTES, Kind, detect, looks_like_text, other_reading
from safeload.formats.gguf import parse_gguf
from safeload.formats.inert import check_inert, may_be_pickle, stopped_at_once
from safeload.formats.npy import parse_npy
from safeload.formats.npz import parse_npz
from safeload.formats.pickles.machine import Machine, parse_pickle
from safeload.formats.pytorch import is_legacy, parse_pytorch, parse_pytorch_legacy
from safeload.formats.safetensors import parse_safetensors
from safeload.formats.shard_index import is_index_name, parse_index
from safeload.formats.tensorflow import TABLE_MAGIC, index_file_of, parse_bundle_data, parse_bundle_index
from safeload.formats.zips import ZipTable, read_zip
from safeload.memory import available_memory
from safeload.parallel import Meter, n_processors, run
from safeload.policy import DEFAULT_POLICY, Policy, exact_pattern, is_policy_path, load_policy
from safeload.report import FileReport, Progress, Report
from safeload.tensors import TENSOR_FORMATS, RecordValue, ShardIndex, TensorSpec, Value

if TYPE_CHECKING:
    # A plain scan has no manifest, and to import its models would take a tenth of the whole run.
    from safeload.manifest import FileEntry, ManifestTensor, TrustedManifest
    from safeload.staging import StagedCheckpoint


@dataclass(frozen=True, slots=True)
class AdmittedCheckpoint:
    """Proof that every file of a staged checkpoint is what the policy allows. Only `admit` makes one.

    Attributes:
        staged: The bytes, which are those that were scanned.
        values: What each file of tensors holds, by path; inert files are not in it.
        report: The report of the scan; every verdict in it is "accepted".
    """

    staged: StagedCheckpoint
    values: Mapping[str, Value]
    report: Report


def scan(
    paths: str | Path | Sequence[str | Path],
    *,
    policy: str | Path | Policy = DEFAULT_POLICY,
    digests: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Describe files that nobody vouches for: what is in them, and every reason to refuse them.

    An accepted file holds nothing but what the policy allows; where it comes from, and whether it is complete, is
    not known without a manifest. Payloads are jumped over, so time does not grow with their size, unless digests are
    asked for: then each byte is read and hashed once.

    Args:
        paths: Files and directories. A directory is walked whole, hidden files included; links below it are refused.
        policy: What is allowed: a shipped policy's name, a path to your own, or a `Policy`.
        digests: Whether to add the SHA-256 of each file and of each tensor's value.
        progress: Told of the bytes that were dealt with; of many directories, a few at a time.

    Returns:
        The report. Nothing is raised for what is found: look at its `verdict`, or `is_accepted`.

    Raises:
        ConfigError: A path does not exist, or the policy is not valid.
        StagingError: A directory could not be opened.
    """
    return _scan(paths, policy, progress, _DIGESTS if digests else _NO_DIGESTS)


def scan_to_sign(
    directory: str | Path,
    *,
    policy: str | Path | Policy = DEFAULT_POLICY,
    blake3: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Do what `scan` does with digests, and take those of the chunks as well: all that a manifest says of a file.

    Each byte is read once, and hashed up to three times while it is in the processor's cache: for the file, for its
    chunk, and for the tensor that it belongs to. So it takes two to three times the processor time that verifying does.

    Args:
        directory: The checkpoint.
        policy: What is allowed.
        blake3: Whether to take BLAKE3 beside SHA-256, of each file and of each chunk.
        progress: Told of the bytes that were hashed.

    Raises:
        ConfigError: The path does not exist, the policy is not valid, or there is no package for BLAKE3.
        StagingError: A directory could not be opened.
    """
    if blake3:
        new_blake3()  # before hours of work, not after
    return _scan(directory, policy, progress, _Digests(file=True, payloads=True, chunks=True, blake3=blake3))


@dataclass(frozen=True, slots=True)
class _Digests:
    """Which digests to take of a file on the way: of all of it, of its payloads, of its chunks, and BLAKE3."""

    file: bool = False
    payloads: bool = False
    chunks: bool = False
    blake3: bool = False


_NO_DIGESTS: Final = _Digests()
_DIGESTS: Final = _Digests(file=True, payloads=True)
_FILE_DIGEST: Final = _Digests(file=True)

_MAX_ROOTS: Final = 8
"""Directories that arguments name or lie in, held open at one time; each keeps up to 16 more descriptors."""


def require_policy_outside(policy: str | Path | Policy, directory: str | Path) -> None:
    """Refuse a policy that lies in what it is to judge; see `require_outside`, whose error it raises."""
    if isinstance(policy, str | Path) and is_policy_path(policy):
        require_outside("policy", policy, directory)


def _scan(
    paths: str | Path | Sequence[str | Path], policy: str | Path | Policy, progress: Progress | None, wanted: _Digests
) -> Report:
    chosen = [paths] if isinstance(paths, str | Path) else paths
    for path in chosen:
        require_policy_outside(policy, path)
    rules = load_policy(policy)
    with ExitStack() as stack:
        files: list[FileReport] = []
        findings: list[Finding] = []
        jobs: list[Job] = []
        roots: dict[str, Root] = {}
        used: dict[str, set[str]] = {}
        for path in chosen:
            directory, name, size = _locate(str(path))
            if directory not in roots:
                if len(roots) == _MAX_ROOTS:
                    files += _run(jobs, rules, progress, wanted, used)
                    jobs, roots = [], {}
                    stack.close()
                roots[directory] = stack.enter_context(Root(directory))
            root = roots[directory]
            found = [Job(str(path), name, size, root)] if name else list(jobs_in(str(path), root))
            if not found:
                message = "expected files, found an empty directory"
                findings.append(Finding("nothing-to-scan", message, file=str(path), hint="check the path"))
            jobs += found
        files += _run(jobs, rules, progress, wanted, used)
    # Of all of them at last: an index and its files may be arguments that lie far apart.
    return Report(tuple(check_indexes(files, used)), tuple(findings), policy_facts(rules))


def verify_files(
    directory: str | Path,
    trusted: TrustedManifest,
    *,
    policy: Policy,
    ignore: Mapping[str, bytes] = MappingProxyType({}),
    progress: Progress | None = None,
) -> Report:
    """Hold a directory against a trusted manifest: the file set, each digest, and what each file holds.

    Every file is read once, and the bytes that are parsed are the bytes that are hashed. Nothing is kept. One thread
    reads each file from its start to its end, as only then both can be true; it proves the digest of the whole, and
    what a manifest says of chunks is left to `stage`, which holds all bytes before any is parsed.

    Args:
        directory: Where the files are. Untrusted.
        trusted: What should be there.
        policy: What is allowed, signed or not.
        ignore: Files that may lie in the directory unlisted, with exactly these bytes: the manifest itself.
        progress: Told of the bytes that were hashed.

    Raises:
        StagingError: The directory could not be opened.
    """
    from safeload.staging import check_file_set

    with Root(directory) as root:
        missing = check_file_set(root, trusted.manifest, ignore=ignore)
        absent = {finding.file for finding in missing}
        jobs = [
            Job(entry.path, entry.path, entry.size, root, entry)
            for entry in trusted.manifest.files
            if entry.path not in absent
        ]
        used: dict[str, set[str]] = {}
        looked = _run(jobs, policy, progress, _FILE_DIGEST, used)
        files = check_indexes(looked, used, {path for path in absent if path is not None})
    facts = {**policy_facts(policy), **manifest_facts(trusted)}
    return Report(tuple(files), tuple(missing), facts)


def naming_swaps(report: Report, trusted: TrustedManifest) -> Report:
    """Return the report, with a hint where a file has the signed content of another: two were swapped, or one copied.

    Args:
        report: Of one directory, its paths those of the manifest.
        trusted: What was signed.
    """
    by_digest: dict[str | None, list[str]] = {}
    for entry in trusted.manifest.files:
        by_digest.setdefault(entry.sha256, []).append(entry.path)

    def named(file: FileReport, finding: Finding) -> Finding:
        if finding.code != "digest-mismatch" or file.sha256 not in by_digest:
            return finding
        others = by_digest[file.sha256]
        return replace(
            finding, hint=f"this is the content of {escape(others[0])}: were the two swapped, or one copied?"
        )

    files = (replace(file, findings=tuple(named(file, f) for f in file.findings)) for file in report.files)
    return replace(report, files=tuple(files))


def admit(staged: StagedCheckpoint, *, policy: Policy) -> AdmittedCheckpoint:
    """Scan what was staged, and return the proof that the policy allows all of it.

    Raises:
        PolicyError: A file holds something that the policy does not allow, or not what its manifest says.
        FormatError: A file breaks its format.
        LimitError: A file asks for more than the policy's limits.
    """
    reports: list[FileReport] = []
    values: dict[str, Value] = {}
    refusals: list[RejectedError] = []
    tables = signed_tables(staged.trusted)
    for path, file in staged.files.items():
        kind, parsed = parse(MemorySource(file.view, file.present), path, policy, _StagedSiblings(staged, path))
        parsed = check_against(file.entry, kind, parsed)
        if parsed.index is not None and (findings := index_findings(path, parsed.index, tables)):
            parsed = refused(parsed, FormatError(*findings))
        reports.append(file_report(path, kind, file.view.nbytes, parsed, file.entry.sha256))
        if parsed.refusal is not None:
            refusals.append(parsed.refusal)
        elif kind in TENSOR_FORMATS:
            values[path] = parsed.value
    report = Report(tuple(reports), (), {**policy_facts(policy), **manifest_facts(staged.trusted)})
    if refusals:
        raise type(refusals[0])(*report.all_findings)
    return AdmittedCheckpoint(staged, values, report)


def manifest_facts(trusted: TrustedManifest) -> dict[str, object]:
    """Return what a report says of the manifest: its digest, stream, revision and who signed it."""
    manifest = trusted.manifest
    return {
        "manifest": {
            "sha256": trusted.sha256,
            "model": manifest.stream,
            "revision": manifest.revision,
            "version": manifest.version,
            "signers": [{"name": signer.name, "keyid": signer.keyid} for signer in trusted.signers],
            "threshold": trusted.threshold,
        }
    }


def policy_facts(policy: Policy) -> dict[str, object]:
    """Return what a report says of the policy: its name, where it was read from, and its digest."""
    return {"policy": {"name": policy.name, "source": policy.source, "sha256": policy.sha256}}


# ---------------------------------------------------------------- one file


def peek_limit(policy: Policy) -> int:
    """Return how many bytes of a file `parse` may peek at: what the policy allows, and what tells a format."""
    return policy.limits.max_inline_bytes + HEAD_BYTES + _PREFIX_BYTES + len(TABLE_MAGIC)


def parse(source: Source, path: str, policy: Policy, siblings: Siblings | None = None) -> tuple[str, Parsed]:
    """Return the format of a file and what its parser says; the one place that picks the parser.

    Args:
        source: The file's bytes.
        path: What it is called; the last component counts, and the folders only for a hint.
        policy: What is allowed.
        siblings: The files beside it, where they can be read.
    """
    if source.size > policy.limits.max_file_bytes:
        return "unknown", Parsed(refusal=_too_long(source.size, policy))
    name = PurePosixPath(path).name
    try:
        kind, parsed = _parse_content(source, name, policy, siblings or _NoSiblings())
    except LimitError as err:  # of a source that is asked for more than it keeps
        return "unknown", Parsed(refusal=err)
    if parsed.refusal is None and kind in TENSOR_FORMATS and kind not in policy.formats.allow:
        finding = Finding(
            "format-not-allowed",
            f"policy {policy.name} does not allow {_PLURAL[kind]}",
            hint=f'such a policy needs "{kind}" in `allow` under [formats]',
        )
        parsed = refused(parsed, PolicyError(finding))
    if kind in TENSOR_FORMATS:
        parsed = _check_name(name, kind, _check_shard(name, parsed, policy))
    elif isinstance(parsed.refusal, FormatError | PolicyError) and (hint := _folder_hint(path)) is not None:
        parsed = refused(parsed, _hinting(parsed.refusal, hint))
    return kind, parsed


def _too_long(size: int, policy: Policy) -> LimitError:
    message = f"a file of {size:,} bytes; the policy allows {policy.limits.max_file_bytes:,}"
    hint = policy.admits_by("[limits]", "`max_file_bytes` with a larger number, if the file is honest")
    return LimitError(Finding("limit-exceeded", message, hint=hint))


def _parse_content(source: Source, name: str, policy: Policy, siblings: Siblings) -> tuple[str, Parsed]:
    if is_index_name(name):
        return "index", parse_index(source, policy)
    inert = policy.files.inert_for(name)
    if inert is not None:
        return inert.content, check_inert(source, inert.content, policy)
    if index_file_of(name) is not None:
        # Raw bytes, which have no signature of their own: the index beside them says what they are.
        return "tensorflow", parse_bundle_data(source, name, policy, siblings)
    # Peeked at and not read: whether the file streams past, or its table comes first, is for its parser to say.
    head = source.peek(0, HEAD_BYTES)
    if source.peek(max(0, source.size - len(TABLE_MAGIC)), len(TABLE_MAGIC)) == TABLE_MAGIC:
        return "index", parse_bundle_index(source, policy, name)
    kind = detect(head, source.size)
    found = "" if kind is None else kind.name
    archive: ZipTable | None = None
    if found == "zip":
        try:
            archive = read_zip(source, policy)
        except RejectedError as err:
            return found, Parsed(refusal=err)
        found, kind = _kind_of_zip(archive)
    if kind is not None and found in {"safetensors", "gguf"} and _may_be_pickle(source, policy):
        message = f"expected {kind.noun}, found what some readers would run as a pickle as well"
        hint = "save it again with other metadata, if it is honest"
        return found, Parsed(refusal=FormatError(Finding("ambiguous-format", message, offset=0, hint=hint)))
    if found in {"", *TENSOR_FORMATS} and not is_legacy(head) and (other := other_reading(head)) is not None:
        message = f"expected a file of one format, found one that some readers would take for {other}"
        hint = "save it again, if it is honest: the next one will begin otherwise"
        return found or "unknown", Parsed(
            refusal=FormatError(Finding("ambiguous-format", message, offset=0, hint=hint))
        )
    if found in _PARSERS:
        return found, _PARSERS[found](source, policy)
    if found in _ARCHIVES:
        return found, _ARCHIVES[found](source, policy, archive)
    if kind is not None and kind.name != "pickle":
        finding = Finding("format-not-supported", f"expected tensors, found {kind.noun}", offset=0, hint=kind.advice)
        return kind.name, Parsed(refusal=PolicyError(finding))
    if is_legacy(head):
        return "pytorch", parse_pytorch_legacy(source, policy)
    return _parse_pickle(source, name, policy, head, is_text=kind is None and looks_like_text(head))


_PREFIX_BYTES: Final = 64 * 1024
"""How far a file that begins like safetensors or GGUF is read as a pickle, for readers that go by no signature. The
length of a header and its JSON, or `G`, an opcode, and the zeros of the number of tensors, stop them within a few
bytes, unless somebody took pains that they do not."""


def _may_be_pickle(source: Source, policy: Policy) -> bool:
    return may_be_pickle(source.peek(0, _PREFIX_BYTES), policy, whole=source.size <= _PREFIX_BYTES)


def _kind_of_zip(archive: ZipTable) -> tuple[str, Kind]:
    """Return which container of tensors a zip archive is, by its members, "zip" where it is none, and what to call it.

    An archive with arrays in it is npz, whose parser names the member that is none.
    """
    names = [entry.name for entry in archive.entries]
    if "model.weights.h5" in names:
        advice = "safeload does not read it; convert it to safetensors with the software that wrote it"
        return "zip", Kind("zip", "a Keras model, which is a zip archive", advice)
    first = (
        f"a zip archive that holds '{escape(names[0], limit=80)}' and no tensors" if names else "an empty zip archive"
    )
    kind = Kind("zip", first, "unpack it, and verify and scan what comes out")
    if any(PurePosixPath(name).name == "data.pkl" for name in names):
        return "pytorch", kind
    return ("npz" if any(name.endswith(".npy") for name in names) else "zip"), kind


_SIGNED: Final = frozenset({".gguf", ".npy", ".npz", ".safetensors"})
"""Endings of names that promise a format with a signature, which is none of a pickle."""

_PICKLES: Final = frozenset({".pkl", ".pickle"})
"""Endings of names that promise a pickle, so that what is wrong with it as one is what a person wants to know."""


def _parse_pickle(source: Source, name: str, policy: Policy, head: bytes, *, is_text: bool) -> tuple[str, Parsed]:
    machine = Machine(source, policy)
    parsed = parse_pickle(source, policy, machine=machine)
    refusal = parsed.refusal
    if refusal is None:
        return "pickle", parsed
    suffix = PurePosixPath(name).suffix.lower()
    if refusal.findings[0].code == "empty-file":
        promised = _NOUNS.get(suffix, "tensors, or data that the policy names")
        message = f"expected {promised}, found an empty file"
        finding = Finding("empty-file", message, offset=0, hint="fetch it again, or delete it")
        return "unknown", refused(parsed, FormatError(finding))
    is_shard = policy.shards is not None and policy.shards.fits(name)
    # The length of a safetensors header may begin with any byte, and so with that of a pickle's.
    begins_as_one = head[:1] == b"\x80" and suffix not in _SIGNED
    if begins_as_one or is_shard or suffix in _PICKLES or not stopped_at_once(machine, refusal):
        return "pickle", parsed
    if suffix in _NOUNS:
        message = f"expected {_NOUNS[suffix]}, as the name says, found none, or one cut short or damaged"
        finding = Finding("damaged-file", message, offset=0, hint="fetch it again; no reader can tell what it holds")
    else:
        message = f"of no known format: expected tensors, or data that policy {policy.name} names, found neither"
        finding = Finding("not-a-pickle", message, offset=0, hint=_unknown_hint(name, policy, is_text=is_text))
    return "unknown", refused(Parsed(), FormatError(finding))


def _unknown_hint(name: str, policy: Policy, *, is_text: bool) -> str:
    """Return what to do about a file of no known format."""
    remove = "move it out of the directory"
    if PurePosixPath(name).suffix.lower() in {".py", ".ipynb", ".sh"}:
        return f"source code does not belong in a checkpoint: {remove}, and read it before it is run"
    content, noun = ("text", "text") if is_text else ("opaque", "data")
    lines = f"patterns = [{exact_pattern(name)}]", f'content = "{content}"', 'reason = "say here why it belongs there"'
    return f"{remove}; or, if it is plain {noun}, {policy.admits_by('[[files.inert]]', *lines)}"


def _folder_hint(path: str) -> str | None:
    """Return what to do about a file of a folder that tools leave behind, which no checkpoint needs; None elsewhere."""
    parts = PurePosixPath(path).parts
    if ".git" in parts[:-1]:
        return "remove the folder .git, which holds the history of the files and none that is loaded"
    for here in range(len(parts) - 2):
        # Below `hub` lies the cache itself, whose folders are checkpoints.
        if parts[here : here + 2] == (".cache", "huggingface") and parts[here + 2] in _BOOKKEEPING:
            return "remove the folder .cache/huggingface, in which the download kept its books"
    return None


_BOOKKEEPING: Final = frozenset({"download", "upload", "trees", ".gitignore", "CACHEDIR.TAG"})
"""What `hf download --local-dir` and `hf upload-large-folder` write below .cache/huggingface."""


def _hinting(refusal: RejectedError, hint: str) -> RejectedError:
    return type(refusal)(*(replace(finding, hint=hint) for finding in refusal.findings))


_PARSERS: Final[Mapping[str, Callable[[Source, Policy], Parsed]]] = MappingProxyType(
    {
        "npy": parse_npy,
        "safetensors": parse_safetensors,
        "gguf": parse_gguf,
    }
)

_ARCHIVES: Final[Mapping[str, Callable[[Source, Policy, ZipTable | None], Parsed]]] = MappingProxyType(
    {"npz": parse_npz, "pytorch": parse_pytorch}
)
"""The parsers of zip archives, which are handed the members by which the archive was told from others."""

_PLURAL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pickle": "pickles",
        "npy": "npy arrays",
        "npz": "npz archives",
        "safetensors": "safetensors files",
        "pytorch": "PyTorch files",
        "tensorflow": "TensorFlow checkpoints",
        "gguf": "GGUF models",
    }
)

_SUFFIXES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        ".npy": ("npy",),
        ".npz": ("npz",),
        ".safetensors": ("safetensors",),
        ".gguf": ("gguf",),
        ".pt": ("pytorch", "pickle"),
        ".pth": ("pytorch", "pickle"),
        ".bin": ("pytorch", "pickle"),
        ".ckpt": ("pytorch", "pickle"),
        ".pkl": ("pickle",),
        ".pickle": ("pickle",),
    }
)
"""What a name promises: a reader that goes by it would otherwise read the file as something that was not scanned."""

_NOUNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        ".npy": "an npy array",
        ".npz": "an npz archive",
        ".safetensors": "a safetensors file",
        ".gguf": "a GGUF model",
        ".pt": "a PyTorch file",
        ".pth": "a PyTorch file",
        ".ckpt": "a PyTorch file",
    }
)
"""What to call a file that a name promises, where that is one thing and has a signature to be missed."""


def _check_name(name: str, kind: str, parsed: Parsed) -> Parsed:
    """Refuse a file whose name promises another format than its content has."""
    suffix = PurePosixPath(name).suffix.lower()
    promised = _SUFFIXES.get(suffix)
    if promised is None or kind in promised or parsed.refusal is not None:
        return parsed
    finding = Finding(
        "name-contradicts-content",
        f"expected {_PLURAL[promised[0]]} under a name that ends in {suffix}, found {_PLURAL[kind]}",
        offset=0,
        hint="give it the name of what it is, once you know how it got this one",
    )
    return refused(parsed, PolicyError(finding))


# ---------------------------------------------------------------- files that belong together


class _NoSiblings:
    """A file that is looked at alone."""

    def read(self, name: str, limit: int) -> bytes | None:  # noqa: ARG002 - see `Siblings.read`
        return None


class _StagedSiblings:
    """The staged files beside one of them."""

    def __init__(self, staged: StagedCheckpoint, path: str) -> None:
        self._staged = staged
        self._folder = path[: len(path) - len(PurePosixPath(path).name)]

    def read(self, name: str, limit: int) -> bytes | None:
        data = self._staged.indexes.get(self._folder + name)
        if data is not None:
            _require_short(name, len(data), limit)
        return data


LastRead: TypeAlias = dict[tuple[str, str], tuple[bytes, str]]
"""The bytes of a file and their digest, by its directory and the path below that."""


class SiblingsOnDisk:
    """The files beside one that is scanned on disk.

    All files of a bundle ask for the same one, and there may be 99,999 of them: `last` keeps it for those that follow.
    """

    def __init__(self, job: Job, used: dict[str, set[str]], last: LastRead | None = None) -> None:
        """Say whose siblings they are.

        Args:
            job: The file that they lie beside.
            used: Takes the digests of what was read of them, by path: several where a file changed in between.
            last: Takes what was read last from one file of a run to the next.
        """
        self._job = job
        self._used = used
        self._last: LastRead = {} if last is None else last

    def read(self, name: str, limit: int) -> bytes | None:
        """See `Siblings.read`."""
        job = self._job
        folder = job.path[: len(job.path) - len(PurePosixPath(job.path).name)]
        shown = job.shown[: len(job.shown) - len(PurePosixPath(job.shown).name)]
        # By where it lies: links that were named as arguments can bring files of two folders under one shown path.
        place = str(job.root.directory), folder + name
        kept = self._last.get(place)
        if kept is None:
            try:
                fd = job.root.open(folder + name)
            except FileSetError:
                return None
            with StreamSource(fd, shown + name) as stream:
                _require_short(name, stream.size, limit)
                data = stream.read(0, stream.size)
            kept = data, sha256_hex(data)
            self._last.clear()
            self._last[place] = kept
        data, digest = kept
        _require_short(name, len(data), limit)
        # All of them: who reads it anew may find other bytes than a file before, which was judged by the first.
        self._used.setdefault(shown + name, set()).add(digest)
        return data


def _require_short(name: str, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        message = f"expected {escape(name)} to have at most {limit:,} bytes, found {nbytes:,}"
        raise LimitError(Finding("too-much-inline", message))


_Tables: TypeAlias = Mapping[str, Mapping[str, tuple[int, int]]]
"""The extents of the tensors of each file, by path and name; no entry for a file that was refused."""


def signed_tables(trusted: TrustedManifest) -> _Tables:
    """Return the extents of the tensors of each file, as the manifest has them."""
    return {
        entry.path: {tensor.name: (tensor.offset, tensor.nbytes) for tensor in entry.tensors}
        for entry in trusted.manifest.files
    }


def check_indexes(
    files: Sequence[FileReport], used: Mapping[str, Collection[str]], unlooked: Collection[str] = ()
) -> list[FileReport]:
    """Hold each index against the files that it names, and what was read of a file for another against its digest.

    Args:
        files: What was found in each.
        used: The digests of all that was read of a file for others, by path.
        unlooked: Paths of files that were refused before they were read, and that an index need not miss as well.
    """
    tables = {
        file.path: {spec.name: (spec.extent.offset, spec.extent.nbytes) for spec in file.tensors}
        for file in files
        if not file.findings
    }
    digests = {file.path: file.sha256 for file in files if file.sha256 is not None}
    refused_paths = {*unlooked, *(file.path for file in files if file.findings)}
    checked = []
    for file in files:
        findings: tuple[Finding, ...] = ()
        if file.index is not None:
            findings = index_findings(file.path, file.index, tables, refused_paths)
        readings = {*used.get(file.path, ()), digests.get(file.path)} - {None}
        if len(readings) > 1:
            message = "expected the bytes that its data files were read by, found others"
            hint = "wait until nothing writes there, then run again"
            findings += (Finding("changed-while-read", message, hint=hint),)
        if findings:
            checked.append(replace(file, findings=(*file.findings, *findings), error=file.error or FormatError))
        else:
            checked.append(file)
    return checked


def index_findings(
    path: str, index: ShardIndex, tables: _Tables, refused_paths: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Return where an index and the files that it names differ, and files of its set that it does not name."""
    name = PurePosixPath(path).name
    folder = path[: len(path) - len(name)]
    by_file: dict[str, set[str]] = {}
    for tensor, file in index.files.items():
        by_file.setdefault(file, set()).add(tensor)
    findings = []
    total = 0
    for file, listed in by_file.items():
        if folder + file in refused_paths:
            continue
        table = tables.get(folder + file)
        if table is None:
            message = f"expected {escape(file)}, which the index names, found no such file of tensors"
            findings.append(Finding("index-file-missing", message, hint="scan the whole directory, or fetch the file"))
            continue
        # A record's tensors lie one level below the name that the index has, and nothing lies at that name.
        present = {name if name in listed else _record_of(name, table, listed) or name for name in table}
        if missing := sorted(listed - present):
            message = f"expected {escape(missing[0])} in {escape(file)}, as the index has it, found none"
            findings.append(Finding("index-disagrees", message, hint=_INDEX_HINT))
        if extra := sorted(present - listed):
            message = f"expected only what the index lists in {escape(file)}, found {escape(extra[0])} as well"
            findings.append(Finding("index-disagrees", message, hint=_INDEX_HINT))
        total += sum(nbytes for _, nbytes in set(table.values()))
    stem, _, rest = name.partition(".")
    suffix = PurePosixPath(rest.removesuffix(".index.json")).name
    for other in sorted(tables):
        beside = other[len(folder) :] if other.startswith(folder) else "/"
        is_of_set = "/" not in beside and beside.startswith(f"{stem}-") and beside.endswith(f".{suffix}")
        if rest.endswith(".index.json") and is_of_set and beside not in by_file:
            message = f"expected the index to name {escape(beside)}, found no tensor of it there"
            findings.append(Finding("index-disagrees", message, hint=_INDEX_HINT))
    if not findings and not refused_paths and index.total_size not in {None, total}:
        message = f"expected total_size {total}, the sum over its files, found {index.total_size}"
        findings.append(Finding("index-disagrees", message, hint=_INDEX_HINT))
    return tuple(findings)


def _record_of(tensor: str, table: Collection[str], listed: Collection[str]) -> str | None:
    """Return the listed name that this tensor is a part of; None if it stands for itself."""
    whole = tensor.rpartition("/")[0]
    return whole if whole in listed and whole not in table else None


_INDEX_HINT: Final = "fetch the index and its files from one revision"


def _check_shard(name: str, parsed: Parsed, policy: Policy) -> Parsed:
    """Hold a file of tensors against the policy's rules for shards, where it has any."""
    rules = policy.shards
    if rules is None or parsed.refusal is not None:
        return parsed
    findings: list[Finding] = []
    hint = f"the rule is [shards] in policy {policy.name}"
    if not rules.fits(name):
        findings.append(
            Finding("shard-name", f"expected a name that matches {rules.name}, found {name[:80]!r}", hint=hint)
        )
    value = parsed.value
    holds = "array" if isinstance(value, TensorSpec) else value.record if isinstance(value, RecordValue) else None
    if holds not in rules.holds:
        found = holds or f"a {type(value).__name__}"
        findings.append(
            Finding("shard-content", f"expected one {' or '.join(rules.holds)}, found {found}", offset=0, hint=hint)
        )
    elif isinstance(value, TensorSpec) and (value.dtype.name not in rules.array_dtypes or value.dtype.big_endian):
        expected = " or ".join(rules.array_dtypes)
        findings.append(
            Finding("shard-dtype", f"expected an array of {expected}, found {value.dtype}", offset=0, hint=hint)
        )
    return refused(parsed, PolicyError(*findings)) if findings else parsed


def refused(parsed: Parsed, refusal: RejectedError) -> Parsed:
    """Return what is left of a parsed file once it is refused."""
    return Parsed(globals=parsed.globals, refusal=refusal)


def check_against(entry: FileEntry, kind: str, parsed: Parsed) -> Parsed:
    """Hold what was parsed against what the manifest says was there when it was signed."""
    if parsed.refusal is not None:
        return parsed
    signed = [_signed_facts(tensor) for tensor in entry.tensors]
    same = kind == entry.format and signed == [_facts(spec) for spec in parsed.tensors]
    same = same and set(parsed.globals) == set(entry.globals)
    if same:
        return parsed
    finding = Finding(
        "manifest-disagrees",
        f"the manifest says {entry.format} with {len(entry.tensors)} tensor(s), the file is {kind} with "
        f"{len(parsed.tensors)}; or their types, places or globals differ",
        hint="the bytes are those that were signed, so the manifest was made by other rules; sign the directory again",
    )
    return refused(parsed, PolicyError(finding))


def _facts(spec: TensorSpec) -> tuple[object, ...]:
    extent = spec.extent
    inline = extent.inline is not None
    return (
        spec.name,
        spec.dtype.name,
        spec.dtype.big_endian,
        spec.shape,
        spec.order,
        spec.strides,
        extent.offset,
        extent.nbytes,
        inline,
    )


def _signed_facts(tensor: ManifestTensor) -> tuple[object, ...]:
    big = tensor.byteorder == "big"
    where = tensor.offset, tensor.nbytes, tensor.inline
    return tensor.name, tensor.dtype, big, tensor.shape, tensor.order, tensor.strides, *where


def file_report(path: str, kind: str, size: int | None, parsed: Parsed, sha256: str | None = None) -> FileReport:
    """Return what a report says of a file, with a hint for each finding that has none."""
    refusal = parsed.refusal
    if refusal is None:
        tensors = tuple(map(_without_payload, parsed.tensors))
        return FileReport(path, kind, size, sha256, (), tensors, parsed.globals, index=parsed.index)
    look = f"to see what it would do, without running it: safeload explain {shlex.quote(escape(path))}"
    findings = tuple(replace(f, hint=f.hint or look) if kind in {"pickle", "pytorch"} else f for f in refusal.findings)
    return FileReport(path, kind, size, sha256, findings, (), parsed.globals, type(refusal))


def _without_payload(spec: TensorSpec) -> TensorSpec:
    """Return a row of the table that says of decoded bytes only that there were some.

    A report is kept for all files, and 260 KB of a deflated array of zeros are 256 MiB of them.
    """
    return spec if not spec.extent.inline else replace(spec, extent=replace(spec.extent, inline=b""))


# ---------------------------------------------------------------- files on disk


@dataclass(frozen=True, slots=True)
class Job:
    """One file to look at.

    Attributes:
        shown: Path in the report.
        path: Path below `root`.
        size: Length in bytes, as far as known, for progress and order.
        root: The directory that it is opened from.
        entry: What the manifest says of it, if there is one.
        finding: Why it cannot be opened, if that is known.
    """

    shown: str
    path: str
    size: int
    root: Root
    entry: FileEntry | None = None
    finding: Finding | None = None


def _locate(path: str) -> tuple[str, str, int]:
    """Return the directory to hold open for an argument, and name and size of the file in it; no name for all of it."""
    try:
        # The user named this, so a link to it is followed; nothing below a directory is.
        status = os.stat(path)
        target = os.path.realpath(path)
    except (OSError, ValueError) as err:
        raise ConfigError(f"cannot look at {escape(path)}: {reason(err)}", hint="check the path") from err
    if stat.S_ISDIR(status.st_mode):
        return path, "", 0
    return os.path.dirname(target), os.path.basename(target), status.st_size


def jobs_in(directory: str, root: Root) -> Iterator[Job]:
    """Yield a job for each file below a directory, named as the user named that."""
    for walked in root.walk():
        shown = os.path.join(directory, walked.path)
        yield Job(shown, walked.path, walked.size, root, finding=walked.finding)


def _run(
    jobs: Sequence[Job], policy: Policy, progress: Progress | None, wanted: _Digests, used: dict[str, set[str]]
) -> list[FileReport]:
    """Look at each file alone; `used` takes the digests of what was read of some for others, as `SiblingsOnDisk`."""
    last: LastRead = {}

    def work(job: Job, meter: Meter) -> FileReport:
        return _scan_job(job, policy, meter, wanted, SiblingsOnDisk(job, used, last))

    return run(
        jobs,
        work,
        size=lambda job: job.size,
        # Hashing leaves the interpreter's lock, so threads help there; parsing does not.
        threads=n_processors() if wanted.file else 0,
        phase="scanning",
        progress=progress,
        order=largest_of_set(jobs),
    )


def largest_of_set(jobs: Sequence[Job]) -> Callable[[Job], int]:
    """Return what says how large the largest file of a job's bundle is: of a file that belongs to none, its own size.

    Begun in this order, the files of a bundle come one after another and need its index at about the same time. By
    their own sizes those of many bundles would alternate, and each would find that its index was forgotten.
    """
    largest: dict[str, int] = {}
    for job in jobs:
        largest[_set_of(job)] = max(job.size, largest.get(_set_of(job), 0))
    return lambda job: largest[_set_of(job)]


def _set_of(job: Job) -> str:
    """Return the path of the index that a data file of a bundle belongs to, and of any other file its own."""
    folder, name = os.path.split(job.shown)
    return os.path.join(folder, index_file_of(name) or name)


def _scan_job(job: Job, policy: Policy, meter: Meter, wanted: _Digests, siblings: Siblings) -> FileReport:
    """Open, parse and, where a manifest or the caller asks for it, hash one file."""
    if job.finding is not None:
        return unread(job, FileSetError(job.finding))
    try:
        fd = job.root.open(job.path)
        with StreamSource(
            fd,
            job.shown,
            hashing=wanted.file,
            payload_digests=wanted.payloads,
            chunk_digests=wanted.chunks,
            blake3=wanted.blake3,
            peek_limit=peek_limit(policy),
            advance=meter.advance,
        ) as stream:
            kind, parsed = parse(stream, job.shown, policy, siblings)
            # What is longer than the policy allows is refused already, and is not read to its end.
            sha256 = stream.finish() if wanted.file and stream.size <= policy.limits.max_file_bytes else None
            if stream.refusal is not None and parsed.refusal is None:
                parsed = refused(parsed, stream.refusal)
            if wanted.payloads and parsed.refusal is None:
                parsed = replace(parsed, tensors=_with_digests(parsed.tensors, stream))
        if sha256 is None:
            meter.advance(job.size)
    except (FileSetError, StagingError) as err:
        # A file that cannot be read has no verdict of its own to give: it is refused, and the run goes on.
        return unread(job, err if isinstance(err, FileSetError) else FileSetError(Finding("unreadable", err.message)))
    if job.entry is not None:
        parsed = check_digest(job.entry, sha256, stream.size, check_against(job.entry, kind, parsed))
    report = file_report(job.shown, kind, stream.size, parsed, sha256)
    if not (stream.chunk_digests or stream.blake3):
        return report
    chunks, blake3_chunks = b"".join(stream.chunk_digests) or None, b"".join(stream.blake3_chunk_digests) or None
    return replace(report, chunks=chunks, blake3=stream.blake3, blake3_chunks=blake3_chunks)


def unread(job: Job, refusal: FileSetError) -> FileReport:
    """Return the report of a file that could not be read."""
    # The report names the file as the user did; what was met below the directory names it from there.
    findings = tuple(replace(finding, file=None) for finding in refusal.findings)
    return FileReport(job.shown, "unknown", None, findings=findings, error=type(refusal))


def check_digest(entry: FileEntry, sha256: str | None, size: int, parsed: Parsed) -> Parsed:
    """Hold the digest and the length that were found against those that were signed."""
    if sha256 == entry.sha256 and size == entry.size:
        return parsed
    if sha256 is None and parsed.refusal is not None:
        return parsed  # It was not read, and is refused for the reason of that.
    finding = Finding(
        "digest-mismatch",
        f"expected sha256:{entry.sha256}, found sha256:{sha256}",
        hint="the file is not the one that was signed; fetch it again",
    )
    # Whether the manifest was made by other rules can be said of the signed bytes only.
    found = () if parsed.refusal is None else parsed.refusal.findings
    others = (other for other in found if other.code != "manifest-disagrees")
    return refused(parsed, DigestMismatchError(finding, *others))


def _with_digests(tensors: Sequence[TensorSpec], stream: StreamSource) -> tuple[TensorSpec, ...]:
    """Add the digests of the tensors' canonical bytes, each of which is taken once, however many names it has."""
    known: dict[tuple[object, ...], str] = {}
    made = []
    for spec in tensors:
        key = spec.extent, spec.dtype, spec.shape, spec.order, spec.strides
        if key not in known:
            known[key] = _digest(spec, stream)
        made.append(replace(spec, sha256=known[key]))
    return tuple(made)


def _digest(spec: TensorSpec, stream: StreamSource) -> str:
    """Return the digest of a tensor's canonical bytes."""
    extent = spec.extent
    if extent.inline is None and spec.is_canonical:
        return stream.digests[extent.offset, extent.nbytes]
    from safeload.canonical import canonical_bytes  # needs numpy, which a plain scan must not load

    if extent.inline is not None:
        return sha256_hex(canonical_bytes(extent.inline, spec))
    # Bytes that are wanted in another order than they streamed past are read a second time, and held for that.
    room = available_memory()
    if 2 * extent.nbytes > room:
        raise StagingError(f"to put {extent.nbytes:,} bytes in C order takes twice as much memory, found {room:,}")
    data = stream.read_again(extent.offset, extent.nbytes)
    return sha256_hex(canonical_bytes(data, spec))
