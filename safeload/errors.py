"""Every way safeload says no, as one tree.

SafeloadError
├── RejectedError              a verdict: do not load                             exit 1
│   ├── FormatError            bytes break the format that they claim
│   ├── LimitError             bytes ask for more than the policy's limits
│   ├── VerificationError      bytes are not what a trusted key signed
│   │   ├── SignatureError     no threshold of trusted keys signed this manifest
│   │   ├── ManifestError      signed or not, the manifest breaks its own schema
│   │   ├── RevokedError       its key or the manifest itself was taken back
│   │   ├── ExpiredError       it is older than it says that it may be
│   │   ├── RollbackError      it contradicts what was accepted before it
│   │   ├── FileSetError       files are missing, unlisted or no regular files
│   │   └── DigestMismatchError
│   └── PolicyError            well formed and authentic, but the policy does not allow it
└── OperationalError           no verdict was reached; still untrusted            exit 2
    ├── ConfigError            a policy, key or argument is wrong
    ├── StagingError           no room, or the source could not be read
    ├── FetchError             a mirror cannot be reached, or does not do what HTTP says
    ├── ShardingError          the arrays do not fit the mesh that was asked for
    └── HostError              another process of the job did not answer, or has no verdict

The two branches are the two exit codes. Malformed input is a rejection, not a failure: it is under the
control of whoever made the file, and "try again" would be the wrong advice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to refuse.

    Attributes:
        code: Stable kebab-case identifier of the cause, for machines and for suppression lists.
        message: One sentence: what was expected and what was found.
        file: Path of the file as the user named it, or as the manifest names it; None for the whole run.
        offset: Byte offset in the file at which the cause was met, or None where there is no such place.
        hint: What the user can do or type next, or None.
    """

    code: str
    message: str
    file: str | None = None
    offset: int | None = None
    hint: str | None = None

    def in_file(self, file: str) -> Finding:
        """Return the same finding, placed in `file` (parsers do not know where their bytes came from)."""
        return replace(self, file=file)


class SafeloadError(Exception):
    """Base of everything that safeload raises on purpose.

    Attributes:
        exit_code: What the command exits with: 1 for a rejection, 2 where no verdict was reached.
    """

    exit_code: ClassVar[int] = 2


class RejectedError(SafeloadError):
    """The verdict is: do not load. Carries the findings, at least one.

    Attributes:
        findings: Every reason found, in the order in which they were met.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, *findings: Finding) -> None:
        if not findings:
            raise TypeError("a rejection needs at least one finding")
        self.findings = findings
        first = findings[0]
        place = "" if first.file is None else f"{escape(first.file)}: "
        where = "" if first.offset is None else f" (at byte {first.offset})"
        more = "" if len(findings) == 1 else f", and {len(findings) - 1} more finding(s)"
        hint = "" if first.hint is None else f"; {first.hint}"
        super().__init__(f"{place}{first.message}{where}{more}{hint}")


class FormatError(RejectedError):
    """The bytes break the format that they claim to be in."""


class LimitError(RejectedError):
    """The bytes ask for more than the policy's limits."""


class VerificationError(RejectedError):
    """The bytes are not what a trusted key signed."""


class SignatureError(VerificationError):
    """No threshold of trusted keys signed this manifest."""


class ManifestError(VerificationError):
    """The manifest breaks its own schema, signed or not."""


class RevokedError(VerificationError):
    """A key that signed, or the manifest itself, was taken back in the trust store."""


class ExpiredError(VerificationError):
    """The manifest is past the time that its publisher gave it, and the caller did not pin it."""


class RollbackError(VerificationError):
    """The manifest or the trust store is older than one that was accepted before, or contradicts it."""


class FileSetError(VerificationError):
    """The directory does not hold exactly the files that were signed, as regular files."""


class DigestMismatchError(VerificationError):
    """A file's bytes are not those that were signed."""


class PolicyError(RejectedError):
    """Well formed and authentic, but not allowed by the policy."""


class OperationalError(SafeloadError):
    """No verdict was reached. What was to be checked is still untrusted.

    Attributes:
        hint: What the user can do or type next, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.hint = hint
        super().__init__(message if hint is None else f"{message}; {hint}")
        self.message = message


class ConfigError(OperationalError):
    """A policy, a key file, a trust store or an argument is wrong."""


class StagingError(OperationalError):
    """There is no room to stage, or the source could not be read."""


class FetchError(OperationalError):
    """A mirror cannot be reached or misbehaves, or no mirror has what was asked for.

    Attributes:
        mirror: The mirror's URL without credentials and query, or None where no single one is to blame.
        status: The HTTP status that it answered with, or None.
        retry_after: Seconds that it asked to be left alone for, or None.
        lasting: Whether asking the same again is pointless: it has no such file, or refuses us.
    """

    def __init__(
        self,
        message: str,
        *,
        mirror: str | None = None,
        status: int | None = None,
        retry_after: float | None = None,
        lasting: bool = False,
        hint: str | None = None,
    ) -> None:
        self.mirror = mirror
        self.status = status
        self.retry_after = retry_after
        self.lasting = lasting
        super().__init__(message, hint=hint)


class ShardingError(OperationalError):
    """The arrays do not fit the mesh or the structure that was asked for."""


class HostError(OperationalError):
    """Another process of the same job did not answer in time, has no verdict itself, or loads something else."""


def escape(untrusted: str, *, limit: int = 200) -> str:
    r"""Return `untrusted` so that a terminal shows it and never obeys it, nor the runner of a CI job.

    Control characters, terminal escapes, bidirectional overrides and unpaired surrogates (undecodable
    bytes of a file name) come out as backslash escapes; so do backslashes, so that the result is unambiguous. Runners
    obey `##[...]` and its like anywhere in a line, on either stream, and `::...::` where one begins.

    Args:
        untrusted: A string from a file name or from a file's content.
        limit: Longest result in characters before it is cut with an ellipsis.
    """
    shown = "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in untrusted[: limit + 1]
    ).replace("##", r"#\x23")
    if shown.lstrip().startswith("::"):
        shown = shown.replace("::", r"\x3a:", 1)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def reason(err: Exception) -> str:
    """Return why the system refused, in its words and without its numbers and paths."""
    return escape((err.strerror if isinstance(err, OSError) else None) or str(err))
