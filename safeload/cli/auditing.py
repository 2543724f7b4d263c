"""`safeload audit`: the command for CI. Every report that somebody may want comes from one run."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.errors import ConfigError, escape, reason
from safeload.rendering import text
from safeload.rendering.text import printable, shown
from safeload.report import Report

if TYPE_CHECKING:
    from safeload.auditing import Audit

_NO_MANIFEST = "-"


def audit(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="the checkpoints", show_default=False)],
    manifest: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--manifest",
            metavar="MANIFEST",
            help="a signed manifest for each DIR, in the same order; - for a DIR that has none",
            show_default=False,
        ),
    ] = None,
    trust: options.BundleTrust = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    pin: options.Pin = None,
    model: options.ExpectedModel = None,
    revision: options.ExpectedRevision = None,
    history: options.History = None,
    purpose: options.Purpose = None,
    trust_pin: options.TrustPin = None,
    sarif: Annotated[
        Path | None, typer.Option("--sarif", metavar="FILE", help="write a SARIF 2.1.0 log, for code scanning")
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="write JUnit XML")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write one page that holds everything")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the report as JSON")] = None,
    github: Annotated[bool, typer.Option("--github", help="print annotations for GitHub Actions")] = False,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="known findings, by code, path and digest: only new ones fail"),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option("--write-baseline", metavar="FILE", help="write what was found as a baseline, to be reviewed"),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="known|unverified",
            help="fail for known findings too, or for a DIR without a manifest; repeatable",
        ),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option("--cache", metavar="FOLDER", help="remember what was found, by digest and policy")
    ] = None,
    cache_key: Annotated[
        Path | None,
        typer.Option(
            "--cache-key", metavar="FILE", help="32 or more secret bytes that the cache is authenticated with"
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("-j", "--jobs", metavar="N", min=1, help="threads (default: as many as there are processors)"),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option("--dask", metavar="ADDRESS", help="work on a Dask cluster, such as tcp://10.0.0.1:8786"),
    ] = None,
    verbose: options.Verbose = False,
) -> int:
    """Verify what has a manifest, scan all of it in any case, and write reports for people and for CI."""
    out = Output(verbose=verbose)
    outputs = {"sarif": sarif, "junit": junit, "html": html, "json": json, "baseline": write_baseline}
    chosen = _manifests(directories, manifest)
    keep = [path for path in (*(manifest or ()), *(trust or ()), policy, history, cache_key) if path is not None]
    # A baseline that is written again is the one output that may take an input's place.
    if baseline is not None and (write_baseline is None or _place(baseline) != _place(write_baseline)):
        keep.append(baseline)
    _require_writable({kind: path for kind, path in outputs.items() if path is not None}, directories, keep)

    from safeload import auditing
    from safeload.baselines import baseline_json, never_known, read_baseline
    from safeload.files import lies_in, publish

    with ExitStack() as stack:
        executor = None if dask is None else stack.enter_context(auditing.dask_executor(dask))
        progress = stack.enter_context(out.progress())
        found = auditing.audit(
            chosen,
            trust=trust or [],
            policy=policy,
            baseline=baseline,
            fail_on=fail_on or [],
            cache=cache,
            cache_key=cache_key,
            jobs=jobs,
            executor=executor,
            traces=html is not None,
            progress=progress,
            pin=pin,
            model=model,
            revision=revision,
            history=history,
            purpose=purpose,
            trust_pin=trust_pin,
        )
    # Every report is made before any is written, so that a fault of ours leaves none that looks whole.
    renderers = _renderers(found)
    documents = {path: renderers[kind]() for kind, path in outputs.items() if path is not None and kind in renderers}
    if write_baseline is not None:
        earlier = None if baseline is None else read_baseline(baseline)
        documents[write_baseline] = baseline_json(found.report, earlier)
        for finding in never_known(found.report):
            place = "" if finding.file is None else f" in {shown(finding.file)}"
            out.note(f"safeload: note: {finding.code}{place} has no digest or no name, so no baseline can hold it")
    for path, document in documents.items():
        publish(path, document.encode())
        if any(lies_in(path, directory) for directory in directories):
            out.note(f"safeload: note: {shown(str(path))} lies in a checkpoint, whose next audit will find it there")
    _print(out, found, list(documents), github=github)
    return 0 if found.has_passed else 1


def _require_writable(outputs: Mapping[str, Path], directories: Sequence[Path], keep: Sequence[Path | str]) -> None:
    """Say now, and not hours later, that a report has no place to go, or would take that of something else."""
    from safeload.files import lies_in

    kept = {_place(path) for path in keep}
    taken: set[str] = set()
    for path in outputs.values():
        shown_path, place = escape(str(path)), _place(path)
        if str(path) == _NO_MANIFEST:
            raise ConfigError(
                "a report goes to a file, and - is none: the output is for people",
                hint="name a file, such as --json audit.json, and read that",
            )
        if place in taken:
            raise ConfigError("two reports would be written to one file", hint="name a file for each")
        taken.add(place)
        if place in kept:
            raise ConfigError(f"{shown_path} is what this audit reads: a report would replace it", hint="name another")
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError as err:
            if not path.parent.is_dir():
                raise ConfigError(f"cannot write {shown_path}: no such directory", hint="make it first") from err
            continue
        except OSError as err:
            raise ConfigError(f"cannot write {shown_path}: {reason(err)}", hint="name another file") from err
        if not stat.S_ISREG(mode):
            raise ConfigError(f"cannot write {shown_path}: it is there, and no regular file", hint="name another")
        if any(lies_in(path, directory) for directory in directories):
            raise ConfigError(
                f"{shown_path} is a file of the checkpoint: a report would replace it",
                hint="name a file outside of it; an earlier report that lies there can be moved away",
            )


def _place(path: Path | str) -> str:
    """Return where a file is or would be made, however its folder was named."""
    folder, name = os.path.split(path)
    return str(Path(os.path.realpath(folder or "."), name))


def _manifests(
    directories: Sequence[Path], manifests: Sequence[str] | None
) -> dict[str | Path, str | Path | bytes | None]:
    if manifests is None:
        return dict.fromkeys(directories)
    if len(manifests) != len(directories):
        message = f"expected a manifest for each of {len(directories)} DIR, found {len(manifests)}"
        raise ConfigError(message, hint="give -m once for each DIR, in the same order; -m - for one that has none")
    if len(set(directories)) != len(directories):
        raise ConfigError("expected each DIR once, found one twice", hint="leave out the second, and its -m")
    return {
        directory: None if manifest == _NO_MANIFEST else Path(manifest)
        for directory, manifest in zip(directories, manifests, strict=True)
    }


def _renderers(found: Audit) -> Mapping[str, Callable[[], str]]:
    from safeload.rendering.html import OpcodeLine, OpcodeLines, html_page
    from safeload.rendering.json import report_json
    from safeload.rendering.junit import junit_xml
    from safeload.rendering.sarif import sarif_json

    def page() -> str:
        traces = {
            path: OpcodeLines(
                [
                    OpcodeLine(step.offset, step.opcode, f"{step.before} → {step.after}", step.result, step.refusal)
                    for step in trace.steps
                ],
                trace.n_steps,
            )
            for path, trace in found.traces.items()
        }
        return html_page(found.report, traces)

    report = found.report
    return {
        "sarif": lambda: sarif_json(report, root=_here()),
        "junit": lambda: junit_xml(report),
        "html": page,
        "json": lambda: report_json(report) + "\n",
    }


def _here() -> str | None:
    """Return the folder that a job works in, which is that of its repository; None where it is gone."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


def _print(out: Output, found: Audit, written: Sequence[Path], *, github: bool) -> None:
    from safeload.rendering.github import annotation_lines, resume_commands, stop_commands
    from safeload.rendering.rules import is_known, known_reasons

    report = found.report
    token = secrets.token_hex(16)
    if github:
        for line in annotation_lines(report):
            out.line(line)
        # A runner looks for commands in all that a step prints, and what follows quotes names from a checkpoint.
        out.line(stop_commands(token))
    reasons = known_reasons(report)
    for finding in report.all_findings:
        if not is_known(finding, reasons):
            out.finding(finding)
    for line in text.summary_lines(report, verbose=out.verbose):
        out.line(line)
    for line in _audit_lines(report, reasons):
        out.line(line)
    for path in written:
        out.line(f"wrote     {shown(str(path))}")
    if github:
        out.line(resume_commands(token))
    line = _last_line(report, has_passed=found.has_passed)
    if line.startswith(("accepted", "rejected")):
        out.verdict(line)
    else:
        out.line(line)


def _audit_lines(report: Report, reasons: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield what an audit adds to a report: each directory, what is known, and what was and was not checked."""
    facts: Mapping[str, Any] = report.facts["audit"]
    roots = facts["roots"]
    if len(roots) > 1:
        for root in roots:
            signed = root["manifest"] or root["bundle"]
            by = f" of {printable(str(signed['model']))}" if signed else ", nobody vouches for it"
            yield f"{root['verdict']}  {shown(root['path'])}  ({root['mode']}{by}; {text.count(root['files'], 'file')})"
    for (path, code), why in reasons.items():
        yield f"known     {code} in {shown(path)}: {printable(why)}"
    baseline = facts["baseline"]
    if baseline is not None and baseline["stale"]:
        count = text.count(len(baseline["stale"]), "finding")
        yield f"stale     {count} of the baseline that nothing has any more, under the paths that were typed"
    cache = facts["cache"]
    if cache is not None:
        damaged = f", {cache['damaged_parts']} part(s) not authentic and not used" if cache["damaged_parts"] else ""
        yield f"cache     {cache['reused']} reused, {cache['parsed']} parsed{damaged}"
    yield from (f"checked   {printable(line)}" for line in facts["checked"])
    yield from (f"unchecked {printable(line)}" for line in facts["not_checked"])


def _last_line(report: Report, *, has_passed: bool) -> str:
    """Return the last line, without any name: it stands where a runner obeys commands again."""
    facts: Mapping[str, Any] = report.facts["audit"]
    if report.is_accepted:
        return "accepted" if has_passed else "rejected: nothing was found, but a directory has no manifest (--fail-on)"
    if has_passed:
        return (
            f"passed: nothing new; {text.count(len(facts['known']), 'known finding')}, still refused by load and verify"
        )
    from safeload.rendering.rules import is_known, known_reasons

    reasons = known_reasons(report)
    new = [finding for finding in report.all_findings if not is_known(finding, reasons)]
    n_known = len(report.all_findings) - len(new)
    codes = sorted({finding.code for finding in new or report.all_findings})
    more = ", ..." if len(codes) > _MAX_CODES else ""
    known = f"; {n_known} known" if n_known else ""
    noun = "new finding" if n_known else "finding"
    return f"rejected: {text.count(len(new), noun)}: {', '.join(codes[:_MAX_CODES])}{more}{known}"


_MAX_CODES = 3
