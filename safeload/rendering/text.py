"""A report in plain text, line by line: what was refused and why, what was accepted, and the verdict.

Every name that came from a checkpoint is escaped, so that a terminal shows it and never obeys it. There is no markup,
and no color: whoever prints may add it.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from safeload.errors import Finding, escape
from safeload.rendering.rules import rule_of
from safeload.report import FileReport, Report
from safeload.sizes import human_size

MAX_LISTED_FILES = 20
"""Up to this many accepted files are listed one by one; more would push the reasons for a refusal off the screen."""

MAX_NAME_CHARACTERS = 4096
"""Names are shown whole up to the longest path that Linux opens (PATH_MAX)."""

_MAX_CODES_IN_VERDICT = 3
_OF_SIGNATURES = frozenset({"authenticity", "rollback"})
"""Kinds of reasons that lie in a manifest, which is no file of the checkpoint; see `rendering.rules`."""

_COLUMN_GAP = "  "


def shown(name: str) -> str:
    """Return an untrusted name, whole and escaped."""
    return escape(name, limit=MAX_NAME_CHARACTERS)


def printable(message: str) -> str:
    """Return a sentence of ours on one line. What it quotes is escaped where it was made; this is the second net."""
    return "".join(c if c.isprintable() else escape(c) for c in message)


def one_line(hint: str) -> str:
    """Return a hint on one line, with the lines to paste that it may end with: for where there is no room for them."""
    return " ".join(map(printable, hint.split("\n")))


def hint_lines(hint: str) -> Iterator[str]:
    """Yield a hint as lines for stderr. What is to be pasted is indented, so that no line of it passes for ours."""
    first, *rest = hint.split("\n")
    yield f"safeload: hint: {printable(first)}"
    yield from (f"  {printable(line)}" for line in rest)


def error_lines(finding: Finding) -> Iterator[str]:
    """Yield a finding as lines for stderr: the file and what is wrong, then where, then what to do."""
    place = "" if finding.file is None else f"{shown(finding.file)}: "
    yield f"safeload: error: {place}{printable(finding.message)} [{finding.code}]"
    if finding.offset is not None:
        yield f"safeload:   at byte {finding.offset}"
    if finding.hint is not None:
        yield from hint_lines(finding.hint)


def summary_lines(report: Report, *, verbose: bool = False) -> Iterator[str]:
    """Yield what was accepted, the counts, and what the run was held against; not the verdict.

    Args:
        report: What to show.
        verbose: Whether to list every accepted file, and not only a few.
    """
    accepted = [file for file in report.files if file.verdict == "accepted"]
    if verbose or len(accepted) <= MAX_LISTED_FILES:
        yield from (f"accepted  {shown(file.path)}  ({_contents(file)})" for file in accepted)
    size = sum(file.size or 0 for file in report.files)
    # What is missing, not listed or no regular file was not read, and is refused all the same.
    of_files = (f for f in report.findings if f.file is not None and rule_of(f.code).kind not in _OF_SIGNATURES)
    unread = {finding.file for finding in of_files} - {file.path for file in report.files}
    n_files = len(report.files) + len(unread)
    more = f" ({len(unread)} not read)" if unread else ""
    yield (
        f"{count(n_files, 'file')}, {human_size(size)}: "
        f"{len(accepted)} accepted, {n_files - len(accepted)} rejected{more}"
    )
    yield from _fact_lines(report.facts)


def verdict_line(report: Report) -> str:
    """Return the last line of every run: `accepted`, or `rejected: ` and why in a few words."""
    if report.verdict == "accepted":
        return "accepted"
    findings = report.all_findings
    if not findings:
        return "rejected: no file was found"
    if len(findings) == 1:
        only = findings[0]
        return f"rejected: {only.code}" if only.file is None else f"rejected: {only.code} in {shown(only.file)}"
    codes = [code for code, _ in Counter(finding.code for finding in findings).most_common()]
    more = ", ..." if len(codes) > _MAX_CODES_IN_VERDICT else ""
    return f"rejected: {len(findings)} findings: {', '.join(codes[:_MAX_CODES_IN_VERDICT])}{more}"


def tensor_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tensor: file, name, dtype, shape, order, offset, bytes and, where asked for, digest.

    A payload that the file holds in an encoding of its own lies nowhere as it is: it has no offset.
    """
    for file in report.files:
        for tensor in file.tensors:
            extent = tensor.extent
            row = (
                shown(file.path),
                shown(tensor.name) or "-",
                str(tensor.dtype),
                shape_text(tensor.shape),
                tensor.order,
                str(extent.offset) if extent.inline is None else "-",
                str(extent.nbytes) if extent.inline is None else f"{extent.nbytes} (decoded)",
            )
            yield row if tensor.sha256 is None else (*row, tensor.sha256)


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape as `2x3`, or `scalar` for rank 0."""
    return "x".join(str(n) for n in shape) or "scalar"


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, width: int | None = None, indent: str = ""
) -> Iterator[str]:
    """Yield a table with a heading.

    Where it would be wider than the terminal, the first column gets lines of its own, each cell above the rows that
    have it; where that is too wide as well, each cell gets a line.

    Args:
        columns: Headings. One that starts with `>` makes a column of numbers, set to the right.
        rows: Cells, escaped already. A row may lack cells at its end.
        width: Columns of the terminal, or None where the output is no terminal.
        indent: What every line begins with.
    """
    right = [column.startswith(">") for column in columns]
    headings = [column.removeprefix(">") for column in columns]
    body = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    widths = [max(map(_cell_width, column)) for column in zip(headings, *body, strict=True)]

    def line(cells: Sequence[str], first: int) -> str:
        shape = zip(cells[first:], widths[first:], right[first:], strict=True)
        return (indent + _COLUMN_GAP.join(_padded(*cell) for cell in shape)).rstrip()

    def fits(first: int) -> bool:
        needed = len(indent) + sum(widths[first:]) + len(_COLUMN_GAP) * (len(widths) - first - 1)
        return width is None or needed <= width

    if fits(0):
        yield from (line(row, 0) for row in [headings, *body])
        return
    indent, margin = indent + _COLUMN_GAP, indent
    yield margin + headings[0]
    if fits(1):
        yield line(headings, 1)
    for number, row in enumerate(body):
        if number == 0 or row[0] != body[number - 1][0]:
            yield margin + row[0]
        if fits(1):
            yield line(row, 1)
        else:
            yield from (f"{indent}{name} {cell}" for name, cell in zip(headings[1:], row[1:], strict=True) if cell)


def _cell_width(text: str) -> int:
    """Columns that a terminal gives to printable text: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def _padded(text: str, width: int, right: bool) -> str:  # noqa: FBT001 - three cells of one zip
    space = " " * (width - _cell_width(text))
    return space + text if right else text + space


def count(n: int, noun: str) -> str:
    """Return `1 file`, `2 files`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _contents(file: FileReport) -> str:
    tensors = f", {count(len(file.tensors), 'tensor')}" if file.tensors else ""
    size = "" if file.size is None else f", {human_size(file.size)}"
    return f"{file.format}{tensors}{size}"


def _fact_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """What the run was held against, as far as the report knows it."""
    policy, manifest, bundle = facts.get("policy"), facts.get("manifest"), facts.get("bundle")
    if isinstance(policy, Mapping):
        yield f"policy    {printable(str(policy.get('name')))}  sha256:{printable(str(policy.get('sha256')))}"
    if isinstance(manifest, Mapping):
        model, revision, sha256 = (printable(str(manifest.get(key))) for key in ("model", "revision", "sha256"))
        yield f"manifest  {model}, revision {revision}, version {manifest.get('version')}  sha256:{sha256}"
        yield from _signer_lines(manifest)
    if isinstance(bundle, Mapping):
        model, method, sha256 = (printable(str(bundle.get(key))) for key in ("model", "method", "sha256"))
        yield f"bundle    {model}, signed by {method}  sha256:{sha256}"
        yield from _signer_lines(bundle)
        ignored = facts.get("ignored") or ()
        if ignored:
            names = ", ".join(shown(str(path)) for path in ignored[:MAX_LISTED_FILES])
            yield f"ignored   {count(len(ignored), 'path')} that the signature leaves out, never opened: {names}"


def _signer_lines(signed: Mapping[str, Any]) -> Iterator[str]:
    for signer in signed.get("signers", ()):
        if isinstance(signer, Mapping):
            name = printable(str(signer.get("name") or ""))
            yield f"signed by {f'{name}  ' if name else ''}keyid {printable(str(signer.get('keyid')))}"
