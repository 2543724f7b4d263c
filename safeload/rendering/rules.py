"""What each finding's code stands for, in words that do not depend on the file: the rules of a SARIF log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from safeload.errors import Finding
from safeload.report import Report


@dataclass(frozen=True, slots=True)
class Rule:
    """One code, as people are told of it.

    Attributes:
        code: The finding's code; it never changes its meaning.
        title: What it is, in a few words.
        kind: What sort of reason it is, as one word for filters.
        help: Why that is a reason to refuse, and what can be done.
    """

    code: str
    title: str
    kind: str
    help: str


_HELP: Final[Mapping[str, str]] = MappingProxyType(
    {
        "authenticity": "Without a signature that counts, nobody vouches for these bytes. Get the manifest, and the "
        "public key of who signs it, from the publisher by a way of their own. Never add a key just because a manifest "
        "names it.",
        "rollback": "What was offered is older than what was accepted before, or contradicts it. Whoever can replay an "
        "old checkpoint can bring back its faults. Get the newest manifest from the publisher.",
        "file-set": "The directory is not exactly what was signed, or holds what cannot be read as a plain file. A "
        "loader that follows a link, or takes a file that nobody listed, loads what nobody vouched for. Restore the "
        "directory from its publisher.",
        "integrity": "The bytes are not those that were signed, or changed while they were read. Fetch the file again; "
        "if that does not help, ask the publisher.",
        "code": "The file names or calls something that is not data. A reader that unpickles it would run code of its "
        "maker's choosing. `safeload explain FILE` shows what it would do without doing it. Do not load it anywhere "
        "else either.",
        "policy": "The policy that was chosen does not allow what the file is, or what is in it. If it should, and a "
        "policy can, the hint names the lines that one of your own would need.",
        "limit": "The file asks for more than the policy's limits, which bound time and memory. A file that is honest "
        "and large needs a policy with higher limits; the hint names the line.",
        "format": "The file breaks its format, or has none that is known. Two readers can take such a file for two "
        "different things, so it is refused rather than repaired. Write or fetch it again; if it came like this, do "
        "not trust who made it.",
        "ambiguous": "The file can be read as two different things, or is not what its name says. What one tool scans "
        "is then not what another loads. Save it again, under the name of what it is.",
        "consistency": "Files that belong together do not agree with one another. They may be of two revisions. Fetch "
        "all of them from one.",
        "other": "The finding's message says what was expected and what was found, and its hint what to do.",
    }
)

_TITLES: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "authenticity": {
            "bad-envelope": "the manifest's envelope breaks its format",
            "bad-bundle": "a bundle breaks its format",
            "bad-json": "a signed document is not strict JSON",
            "bad-manifest": "the manifest breaks its schema",
            "bad-payload": "the signed payload is not what it is said to be",
            "bad-signature": "a signature does not fit what it signs",
            "bad-trust-store": "the trust store breaks its schema",
            "bundle-says-less": "a bundle cannot be held to what was asked for",
            "certificate": "a bundle's certificate is not one that counts",
            "empty-model": "a bundle lists no file",
            "expired": "the manifest is past its time",
            "key-not-valid": "a key that signed does not count",
            "model-mismatch": "the manifest is of another model",
            "never-hashed": "a signature lists a file without a digest",
            "no-signatures": "nobody signed it",
            "payload-type": "the envelope holds something other than a manifest",
            "pin-mismatch": "the manifest is not the one that was pinned",
            "revision-mismatch": "the manifest is of another revision",
            "revoked-key": "a key that signed was taken back",
            "revoked-manifest": "the manifest was taken back",
            "role-missing": "the checkpoint lacks what the restore needs",
            "root-digest": "a bundle's digest of the whole does not fit its files",
            "root-threshold-not-met": "too few root keys signed the trust store",
            "sigstore": "a signature without a key could not be verified",
            "stream-not-in-scope": "who signed may not sign for this model",
            "symlinks-signed": "a bundle covers symbolic links",
            "threshold-not-met": "too few of the publisher's keys signed",
            "too-many-signatures": "there are more signatures than anybody needs",
            "too-much-to-hash": "the trust store is larger than is looked at",
            "untrusted-key": "no trusted key signed the manifest",
            "version-not-next": "a trust store does not follow the one before it",
        },
        "rollback": {
            "fast-forward": "a version jumps further than publishers do",
            "equivocation": "two different manifests claim one version",
            "rollback": "an older manifest than was accepted before",
            "trust-rollback": "an older trust store than was accepted before",
        },
        "file-set": {
            "bad-path": "a path is not plain and relative",
            "empty-file": "a file is empty",
            "hard-link": "a file has a second name",
            "missing-file": "a listed file is missing",
            "not-a-regular-file": "something is there that is no regular file",
            "nothing-to-scan": "there is no file",
            "symlink": "a symbolic link is in the way",
            "too-deep": "directories are nested too deeply",
            "too-many-files": "there are more files than are looked at",
            "undecodable-name": "a name is not UTF-8",
            "unlisted-file": "a file is there that nobody signed",
            "unreadable": "something could not be read",
        },
        "integrity": {
            "changed-while-read": "a file changed while it was read",
            "digest-mismatch": "the bytes are not those that were signed",
            "manifest-disagrees": "the file's tensors are not those that the manifest lists",
            "size-mismatch": "the length is not the signed one",
            "table-checksum": "a table does not have its checksum",
            "zip-checksum": "a member does not have its checksum",
        },
        "code": {
            "bad-call": "a pickle calls something with what it must not",
            "global-not-allowed": "a pickle names something that the policy does not allow",
            "opcode-not-allowed": "a pickle uses an instruction that data has no need of",
            "pytorch-module": "a PyTorch file holds code objects",
            "torchscript": "a TorchScript file is a program",
            "tensorflow-graph": "a TensorFlow graph is a program",
        },
        "policy": {
            "bundle-dtype": "a bundle holds a type of element that is not read",
            "bundle-sliced": "a bundle holds a tensor in slices",
            "dtype-not-numeric": "an array holds something other than numbers",
            "format-not-allowed": "the policy does not allow this format",
            "format-not-supported": "a file is in a format that is not read",
            "git-lfs-pointer": "a file stands for one that was not fetched",
            "gguf-version": "a GGUF file is of a version that is not read",
            "npy-dtype": "an npy file has a type of element that is not read",
            "protocol-not-allowed": "the policy does not allow this pickle protocol",
            "pytorch-big-endian": "a PyTorch file is big-endian",
            "pytorch-compressed": "a PyTorch file is compressed",
            "shard-content": "a shard holds something other than the policy says",
            "shard-dtype": "a shard has another type of element than the policy says",
            "shard-name": "a shard's name is not of the form that the policy says",
            "view-not-resolved": "a tensor is a view that is not read",
            "zip-encrypted": "an archive's member is encrypted",
            "zip-method": "an archive's member is compressed in a way that is not read",
        },
        "limit": {
            "integer-too-long": "an integer has too many digits",
            "limit-exceeded": "a limit of the policy is exceeded",
            "name-too-long": "a name is too long",
            "not-staged": "more bytes are needed than were asked for",
            "too-many-findings": "there are more findings than are kept",
            "too-many-number-keys": "a dictionary has too many keys that are numbers",
            "too-much-inline": "a table or inline data is too large",
        },
        "ambiguous": {
            "ambiguous-format": "a file can be read as two formats",
            "ambiguous-name": "a name can be read in two ways",
            "ambiguous-number": "a number can be read in two ways",
            "ambiguous-text": "a text can be read in two ways",
            "data-after-stop": "data follows the end of a pickle",
            "name-contradicts-content": "a file is not what its name says",
            "two-formats": "a file is in two formats at once",
        },
        "consistency": {
            "bundle-extent": "a bundle's tensors do not fit its data",
            "bundle-file-name": "a bundle's data file is not one of its own",
            "bundle-index-missing": "a bundle's index is not there",
            "bundle-overlap": "a bundle's tensors overlap",
            "bundle-unlisted-bytes": "a bundle's data holds bytes that no tensor has",
            "index-disagrees": "an index and its files do not agree",
            "index-file-missing": "a file that an index names is not there",
        },
        "format": {
            "bad-append": "a pickle appends to what is no list",
            "bad-arguments": "a constructor gets arguments that it does not take",
            "bad-build": "a pickle sets the state of what has none",
            "bad-dtype": "an element type is none",
            "bad-dtype-state": "an element type contradicts itself",
            "bad-global": "a pickle names what cannot be a name",
            "bad-index": "an index breaks its format",
            "bad-items": "a dictionary gets keys without values",
            "bad-key": "a dictionary's key is none",
            "bad-length": "a length is negative or too large",
            "bad-memo-index": "a memo index is negative or too large",
            "bad-number": "a number is none",
            "bad-persistent-id": "a reference to a storage breaks its format",
            "bad-protobuf": "a message breaks its format",
            "bad-quantizer": "a quantized tensor's scheme is none",
            "bad-record": "a record's fields do not fit its rule",
            "bad-record-fields": "a record has other fields than its rule",
            "bad-setitem": "a pickle sets an item of what has none",
            "bad-shape": "a shape is none",
            "bad-state": "an array's state is none",
            "bad-stop": "a pickle ends with other than one value",
            "bad-storage": "a storage is none",
            "bad-table": "a table breaks its format",
            "bad-text": "a text breaks its format",
            "bad-varint": "a number of variable length does not end",
            "bad-view": "a view is none",
            "cycle": "a value holds itself",
            "damaged-file": "a file is not of the format that its name promises, nor of any other",
            "data-after-storages": "data follows the last storage",
            "duplicate-key": "a key is there twice",
            "frame-straddled": "a pickle's frame ends within an instruction",
            "gguf-bad-metadata": "a GGUF file's metadata breaks its format",
            "gguf-bad-tensor": "a GGUF file's tensor breaks its format",
            "gguf-data-behind": "data follows the last tensor of a GGUF file",
            "incomplete-array": "an array was never given its data",
            "incomplete-record": "a record was never given its fields",
            "misplaced-proto": "a pickle states its protocol in the middle",
            "nested-frame": "a pickle's frame lies within another",
            "no-mark": "a pickle refers to a mark that is not there",
            "not-a-pickle": "the file is in no format that is known",
            "not-data": "the file holds something other than data",
            "not-utf-8": "a text is not UTF-8",
            "npy-bad-header": "an npy file's header breaks its format",
            "npy-data-behind": "data follows an npy file's array",
            "opcode-too-new": "an instruction is newer than the stated protocol",
            "payload-size": "an array's data does not have its size",
            "pytorch-member": "a PyTorch archive has a member that does not belong",
            "pytorch-preamble": "a PyTorch file's beginning breaks its format",
            "pytorch-record": "a PyTorch archive's record breaks its format",
            "safetensors-bad-header": "a safetensors header breaks its format",
            "safetensors-bad-offsets": "safetensors offsets overlap, or leave a gap",
            "safetensors-data-behind": "data follows the last safetensors tensor",
            "stack-underflow": "a pickle takes more than it put down",
            "state-twice": "an array is given its state twice",
            "storage-differs": "one storage is described in two ways",
            "storage-keys": "the list of storages breaks its format",
            "storage-missing": "a storage is not there",
            "storage-size": "a storage does not have its size",
            "storage-unused": "a storage belongs to no tensor",
            "truncated": "the file ends too early",
            "unknown-memo-index": "a pickle recalls what it never remembered",
            "unknown-opcode": "a byte is no instruction",
            "unknown-protocol": "a pickle states a protocol that does not exist",
            "view-out-of-bounds": "a view reaches out of its storage",
            "zip-bad-data": "an archive's compressed data breaks its format",
            "zip-bad-end": "an archive's end breaks its format",
            "zip-bad-entry": "an archive's entry breaks its format",
            "zip-bad-name": "an archive's member has a name that is not plain",
            "zip-duplicate-name": "an archive has a name twice",
            "zip-gap": "an archive has bytes that belong to no member",
            "zip-headers-disagree": "an archive's two descriptions of a member disagree",
        },
    }
)

RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        code: Rule(code, title, kind, _HELP[kind])
        for kind, titles in _TITLES.items()
        for code, title in sorted(titles.items())
    }
)
"""Each code that an audit can meet."""


def rule_of(code: str) -> Rule:
    """Return what a code stands for; of one that is not listed, its own words."""
    return RULES.get(code) or Rule(code, code.replace("-", " "), "other", _HELP["other"])


def known_reasons(report: Report) -> Mapping[tuple[str, str], str]:
    """Return why each finding is known that the run's baseline lists, by path and code; empty without a baseline."""
    audit: Any = report.facts.get("audit") or {}
    return {(entry["path"], entry["code"]): entry["reason"] for entry in audit.get("known", ())}


def is_known(finding: Finding, reasons: Mapping[tuple[str, str], str]) -> bool:
    """Whether a finding is one of `known_reasons`."""
    return finding.file is not None and (finding.file, finding.code) in reasons
