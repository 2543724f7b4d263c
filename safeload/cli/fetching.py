"""The commands that reach out: fetch, quarantine, and what `scan` and `inspect` need to look at files elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import typer

from safeload.cli import options
from safeload.cli.output import Output, new_bars
from safeload.errors import ConfigError, escape
from safeload.rendering import text
from safeload.rendering.text import shown
from safeload.report import SCHEMA_VERSION, Progress, Report
from safeload.sizes import human_size, parse_size

if TYPE_CHECKING:
    from rich.progress import TaskID

    from safeload.expecting import Expectations
    from safeload.fetching.fetch import FetchEvent
    from safeload.fetching.quarantine import Quarantine, Record
    from safeload.fetching.sources import Access
    from safeload.policy import Policy

# Spelled out so that `--help` need not import the HTTP client; a test holds it to `sources.HUB_ENDPOINT`.
DEFAULT_ENDPOINT = "https://huggingface.co"

HubEndpoint = Annotated[
    str, typer.Option("--hf-endpoint", metavar="URL", help="the hub that hf:// stands for", show_default=True)
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", metavar="FILE", help="access token, sent to the (first) source's host and no other"),
]
AllowPrivate = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-private",
        metavar="HOST",
        help="a host that may have a private address, as this machine has; repeatable",
    ),
]
AllowHttp = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-http",
        metavar="HOST",
        help="a host that may be asked without TLS; this machine always may; repeatable",
    ),
]

quarantine = typer.Typer(
    cls=options.Group, no_args_is_help=True, help="Look at what `fetch` refused, or remove it for good."
)

_Item = Annotated[str, typer.Argument(metavar="ID", help="what `quarantine list` calls it", show_default=False)]
_Items = Annotated[
    list[str] | None, typer.Argument(metavar="[ID...]", help="what `quarantine list` calls them", show_default=False)
]
_Target = Annotated[Path, typer.Argument(metavar="DIR", help="the directory that was fetched into", show_default=False)]


class Reach(NamedTuple):
    """The options that say how sources may be reached."""

    endpoint: str
    token_file: Path | None
    allow_private: Sequence[str] | None
    allow_http: Sequence[str] | None

    def access(self, source: str, connections: int | None = None) -> Access:
        """Return what they come to.

        Args:
            source: The source that a token is for: its host gets it, and no other, mirrors least of all.
            connections: Most connections to one source; None for the usual number.

        Raises:
            ConfigError: The token cannot be read.
        """
        from safeload.fetching.sources import DEFAULT_ACCESS, Access, read_token

        return Access(
            endpoint=self.endpoint,
            token=None if self.token_file is None else read_token(self.token_file),
            token_origin=source if source.lower().startswith(("https://", "http://")) else None,
            allow_private=frozenset(self.allow_private or ()),
            allow_http=frozenset(self.allow_http or ()),
            connections=connections or DEFAULT_ACCESS.connections,
        )


# ---------------------------------------------------------------- scan and inspect


def is_remote(argument: str) -> bool:
    """Whether an argument of `scan` is a URL."""
    if "://" not in argument:  # most are not, and need no HTTP client
        return False
    from safeload.fetching.sources import is_remote as names_a_url

    return names_a_url(argument)


def scan(paths: Sequence[str], *, policy: Policy, digest: bool, reach: Reach, progress: Progress | None) -> Report:
    """Scan paths here and URLs elsewhere, and return one report; the files here come first.

    Raises:
        ConfigError: A path does not exist, or digests of what lies elsewhere were asked for.
        FetchError: A source cannot be reached, or has no ranges.
        StagingError: A directory could not be opened.
    """
    from safeload.scanning import scan as scan_paths

    # As `Path` has it, which is how a path that was typed is shown.
    here = [Path(path) for path in paths if not is_remote(path)]
    there = [path for path in paths if is_remote(path)]
    if not there:
        return scan_paths(here, policy=policy, digests=digest, progress=progress)
    if digest:
        raise ConfigError(
            "--digest reads every byte, and files elsewhere are scanned without downloading them",
            hint="fetch them first, or leave --digest out",
        )
    from safeload.fetching.remote import scan_remote

    local = scan_paths(here, policy=policy, progress=progress) if here else Report(())
    remote = scan_remote(there, policy=policy, access=reach.access(there[0]), progress=progress)
    return Report((*local.files, *remote.files), (*local.findings, *remote.findings), {**local.facts, **remote.facts})


def scan_note(report: Report, otherwise: str) -> str:
    """Return what the verdict of a scan does not say."""
    remote = report.facts.get("remote")
    if not isinstance(remote, Mapping):
        return otherwise
    asked = text.count(remote["requests"], "request")
    return (
        f"{otherwise}\nread {human_size(remote['bytes_read'])} of {human_size(remote['bytes_in_all'])} in {asked}; "
        "no digest was checked, and a later download may bring other bytes"
    )


# ---------------------------------------------------------------- fetch


def fetch(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="https://host/folder, hf://org/name@revision or a directory", show_default=False
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="the directory to make", show_default=False)],
    manifest: options.OptionalManifest = None,
    trust: Annotated[
        list[Path] | None,
        typer.Option("--trust", metavar="TRUST", help="a public key or a trust store; repeatable", readable=False),
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option("--mirror", metavar="SOURCE", help="another place with the same files; repeatable"),
    ] = None,
    incremental: Annotated[
        bool,
        typer.Option("--incremental", help="put each file into DIR once it is verified; complete and repair DIR"),
    ] = False,
    reuse: Annotated[
        list[Path] | None,
        typer.Option("--reuse", metavar="DIR", help="take unchanged files from another revision; repeatable"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be fetched, and fetch nothing")] = False,
    unsigned: Annotated[
        bool,
        typer.Option("--unsigned", help="without a manifest: into DIR's quarantine, to look at, and nowhere else"),
    ] = False,
    connections: Annotated[
        int, typer.Option("--connections", metavar="N", min=1, max=64, help="most connections to each mirror")
    ] = 4,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="SIZE", help="most bytes a second, such as 50MB")
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    pin: options.Pin = None,
    model: options.ExpectedModel = None,
    revision: options.ExpectedRevision = None,
    history: options.History = None,
    purpose: options.Purpose = None,
    trust_pin: options.TrustPin = None,
    hf_endpoint: HubEndpoint = DEFAULT_ENDPOINT,
    token_file: TokenFile = None,
    allow_private: AllowPrivate = None,
    allow_http: AllowHttp = None,
    json: Annotated[bool, typer.Option("--json", help="print an event a line in JSON, and the report last")] = False,
    verbose: options.Verbose = False,
) -> int:
    """Bring a signed checkpoint whole, or not at all, from mirrors that may lie."""
    out = Output(json=json, verbose=verbose)
    for place in (source, *(mirror or ())):
        _require_place(place)
    rate = None if bandwidth is None else parse_size(bandwidth)
    reach = Reach(hf_endpoint, token_file, allow_private, allow_http)
    expected: Expectations = {
        "pin": pin,
        "model": model,
        "revision": revision,
        "history": history,
        "purpose": purpose,
        "trust_pin": trust_pin,
    }
    if unsigned:
        if manifest or trust or mirror or incremental or reuse or any(expected.values()):
            raise ConfigError(
                "--unsigned fetches what no manifest lists: nothing can be verified, completed or expected",
                hint="leave the other options out; or leave out --unsigned",
            )
        return _fetch_unsigned(
            out, source, directory, reach, policy=policy, connections=connections, rate=rate, dry_run=dry_run
        )
    if manifest is None or not trust:
        raise ConfigError(
            "expected a manifest and whom to trust for it",
            hint="-m MANIFEST --trust KEY.pub; to look at what nobody signed: --unsigned",
        )

    from safeload.fetching import fetch as engine

    if dry_run:
        plan = engine.plan(directory, manifest=manifest, trust=trust, policy=policy, **expected)
        return _show_plan(out, plan.missing, n_present=len(plan.present), facts=plan.facts)
    watcher = _Watcher(out)
    try:
        with watcher:
            report = engine.fetch_and_report(
                source,
                directory,
                manifest=manifest,
                trust=trust,
                mirrors=mirror or [],
                policy=policy,
                access=reach.access(source, connections),
                incremental=incremental,
                reuse=reuse or [],
                connections=connections,
                bandwidth=rate,
                progress=watcher.progress,
                watch=watcher.watch,
                **expected,
            )
    except KeyboardInterrupt:
        if watcher.n_arrived:
            out.note("safeload: the pieces that were verified are kept: the same command goes on from there")
        raise
    return out.report(report, note=_fetch_note(report, directory))


def _require_place(source: str) -> None:
    """Complain of a source that is neither a URL nor there: most often an address whose scheme was left out."""
    if not is_remote(source) and not os.path.lexists(source):
        raise ConfigError(
            f"there is no directory {escape(source)}",
            hint="check the path; the address of a server begins with https://, that of a repository with hf://",
        )


def _fetch_note(report: Report, directory: Path) -> str | None:
    """Return where the bytes came from, and what the verdict does not say."""
    facts = report.facts.get("fetch")
    if not isinstance(facts, Mapping):
        return None
    lines = [f"fetched   {human_size(facts['fetched_bytes'])}, {human_size(facts['kept_bytes'])} were there already"]
    for mirror in facts["mirrors"]:
        wrong = f", {text.count(mirror['wrong_pieces'], 'wrong piece')}" if mirror["wrong_pieces"] else ""
        gone = f"; given up: {shown(str(mirror['given_up']))}" if mirror["given_up"] else ""
        lines.append(f"from      {shown(mirror['name'])}: {human_size(mirror['bytes'])}{wrong}{gone}")
    if not report.is_accepted:
        lines.append(f"what was refused is in quarantine: safeload quarantine list {shown(str(directory))}")
        return "\n".join(lines)

    from safeload.cli.checkpoints import freshness

    may_be_old = freshness(report.facts)
    return "\n".join(lines if may_be_old is None else [*lines, may_be_old])


def _show_plan(
    out: Output, missing: Sequence[tuple[str, int]], *, n_present: int, facts: Mapping[str, Any] | None = None
) -> int:
    """Print what would be fetched; return the exit code."""
    nbytes = sum(size for _, size in missing)
    listed = [{"path": path, "bytes": size} for path, size in missing]
    plan = {"missing": listed, "bytes": nbytes, "present": n_present}
    out.object({"schema": SCHEMA_VERSION, "plan": plan, **(facts or {})})
    if missing and (out.verbose or len(missing) <= text.MAX_LISTED_FILES):
        out.table(["file", ">bytes"], ((shown(path), str(size)) for path, size in missing))
        out.line()
    there = f"; {text.count(n_present, 'file')} there already" if n_present else ""
    out.line(f"would fetch {text.count(len(missing), 'file')}, {human_size(nbytes)}{there}")
    return 0


def _fetch_unsigned(
    out: Output,
    source: str,
    directory: Path,
    reach: Reach,
    *,
    policy: str,
    connections: int,
    rate: int | None,
    dry_run: bool,
) -> int:
    from safeload.fetching.mirrors import Throttle
    from safeload.fetching.sources import open_source
    from safeload.fetching.unsigned import fetch_unsigned, list_files

    with open_source(source, reach.access(source, connections)) as opened, out.progress() as progress:
        if dry_run:
            return _show_plan(out, list_files(opened), n_present=0)
        records = fetch_unsigned(
            opened,
            directory,
            policy=policy,
            connections=connections,
            throttle=Throttle(rate),
            progress=progress,
        )
    place = str(_quarantine(directory).path)
    out.object(
        {
            "schema": SCHEMA_VERSION,
            "verdict": "unsigned",
            "quarantine": place,
            "items": [_item_json(record) for record in records],
        }
    )
    if out.verbose or len(records) <= text.MAX_LISTED_FILES:
        out.table(
            ["file", "id", "a scan would say"],
            ((shown(record.path), record.id, _scan_says(record)) for record in records),
        )
        out.line()
    out.line(f"{text.count(len(records), 'file')} in {shown(place)}, to look at; nothing was verified")
    # No verdict on the files: the run did what it was told to.
    out.line("unsigned: quarantined")
    return 0


def _scan_says(record: Record) -> str:
    codes = dict.fromkeys(shown(why.code) for why in record.reasons if why.code != "unsigned")
    return f"rejected: {', '.join(codes)}" if codes else "accepted"


_LINE_SECONDS = 10.0
"""How often a run without a terminal says how far it has come."""

_MAX_BARS = 8
"""Files that are shown at a time; the engine works on no more than that."""

_MAX_NAME_COLUMNS = 32


class _Watcher:
    """Shows a fetch while it goes on: bars on a terminal, a line now and then elsewhere, events with `--json`."""

    def __init__(self, out: Output, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._clock = clock
        self._stack = ExitStack()
        self._bars: _Bars | None = None
        self._begun = self._told = clock()
        self._complained: float | None = None
        self._complete: set[str] = set()
        self._arrived = _Arrived()

    def __enter__(self) -> Self:
        # What decides about a bar decides about these: a terminal, and no CI job.
        if self._stack.enter_context(self._out.progress()) is not None:
            self._bars = self._stack.enter_context(_Bars())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def n_arrived(self) -> int:
        """How many verified bytes came from mirrors."""
        return self._arrived.nbytes

    def progress(self, phase: str, done: int, total: int) -> None:
        """Be told how many bytes of all are there."""
        now = self._clock()
        arrived = self._arrived.nbytes
        if not arrived:
            self._begun = now  # so that the rate is that of what arrives, however long what was there took to hash
        if self._bars is not None:
            self._bars.total(phase, done, total, arrived)
        elif not self._out.json and now - self._told >= _LINE_SECONDS:
            self._told = now
            line = progress_line(len(self._complete), done, total, now - self._begun, arrived)
            self._out.note(f"safeload: {line}")

    def watch(self, event: FetchEvent) -> None:
        """Be told what happened."""
        self._arrived.watch(event)
        if event.kind == "file" or (event.kind == "kept" and event.done == event.size):
            self._complete.add(event.path)
        self._out.object(event.to_json())
        if self._bars is not None:
            self._bars.file(event)
        if event.message is not None and not self._out.json and (event.kind != "retry" or self._is_due()):
            # Most messages name the mirror already, or the very URL.
            is_named = event.mirror is None or event.mirror.rstrip("/") in event.message
            where = "" if is_named else f"{shown(str(event.mirror))}: "
            self._out.note(f"safeload: {where}{shown(event.path)}: {text.printable(event.message)}")

    def _is_due(self) -> bool:
        """Whether to tell of a failure that is not the end: at once of the first, and then now and then."""
        now = self._clock()
        is_due = self._complained is None or now - self._complained >= _LINE_SECONDS
        if is_due:
            self._complained = now
        return is_due or self._out.verbose


class _Arrived:
    """Counts the bytes that came from mirrors. Others are there too: of an earlier run, or of another revision."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._done: dict[str, int] = {}

    def watch(self, event: FetchEvent) -> None:
        before = self._done.get(event.path, 0)
        if event.kind in {"piece", "file"}:
            self.nbytes += max(0, event.done - before)
        if event.kind in {"kept", "piece"}:
            self._done[event.path] = max(before, event.done)
        elif event.kind in {"file", "refused"}:
            self._done.pop(event.path, None)


def progress_line(n_files: int, done: int, total: int, seconds: float, arrived: int) -> str:
    """Return how far a fetch has come, how fast it is and how long it will take.

    Args:
        n_files: Files that are complete.
        done: Bytes that are there.
        total: Bytes of all files.
        seconds: How long bytes have been arriving.
        arrived: How many did.
    """
    line = f"{text.count(n_files, 'file')} complete, {human_size(done)} of {human_size(total)}"
    if seconds <= 0 or arrived <= 0:
        return line
    rate = arrived / seconds
    minutes, left = divmod(round((total - done) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{line}, {human_size(int(rate))}/s, {hours}:{minutes:02}:{left:02} left"


class _Bars:
    """A bar for the whole and one for each file that is being fetched, gone when all is done."""

    def __init__(self) -> None:
        self._rich = new_bars()
        self._total: TaskID | None = None
        self._arrived = 0
        self._files: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._rich.stop()

    def total(self, phase: str, done: int, total: int, arrived: int) -> None:
        if self._total is None:
            self._total = self._rich.add_task(phase, total=total)
        # The rate is made of what `update` adds: what was there already is put in beforehand.
        came = arrived - self._arrived
        self._arrived = arrived
        self._rich.tasks[self._rich.task_ids.index(self._total)].completed = done - came
        self._rich.update(self._total, description=phase, completed=done, total=total)

    def file(self, event: FetchEvent) -> None:
        if event.kind in {"file", "refused", "published"} or event.done >= event.size:
            if (task := self._files.pop(event.path, None)) is not None:
                self._rich.remove_task(task)
            return
        if event.kind not in {"piece", "kept"}:
            return
        if event.path not in self._files:
            if len(self._files) == _MAX_BARS:
                return
            name = escape(event.path)
            name = name if len(name) <= _MAX_NAME_COLUMNS else f"…{name[1 - _MAX_NAME_COLUMNS :]}"
            kept = event.done if event.kind == "kept" else 0
            self._files[event.path] = self._rich.add_task(name, total=event.size, completed=kept)
        self._rich.update(self._files[event.path], completed=event.done)


# ---------------------------------------------------------------- quarantine


@quarantine.command("list", cls=options.Command)
def list_(directory: _Target, json: options.Json = False) -> int:
    """List what was refused while DIR was fetched: when, what it should have been, and why."""
    out = Output(json=json)
    store = _quarantine(directory)
    records = store.records()
    out.object({"schema": SCHEMA_VERSION, "quarantine": str(store.path), "items": [_item_json(r) for r in records]})
    if not records:
        out.line(_nothing_for(directory))
        return 0
    rows = ((record.id, shown(record.path), _why(record), _where_from(record)) for record in records)
    out.table(["id", "file", "why", "from"], rows)
    out.line(f"\n{text.count(len(records), 'item')} in {shown(str(store.path))}")
    return 0


@quarantine.command(cls=options.Command)
def show(directory: _Target, item: _Item, json: options.Json = False) -> int:
    """Show all that is known of one item: where it came from, what was expected and what was found."""
    out = Output(json=json)
    store = _quarantine(directory)
    record = store.record(item)
    content = store.content(item)
    out.object({"schema": SCHEMA_VERSION, **_item_json(record), "content": None if content is None else str(content)})
    out.line(f"file      {shown(record.path)}")
    out.line(f"time      {shown(record.time)}")
    for mirror in record.mirrors:
        out.line(f"from      {shown(mirror)}")
    if record.offset is not None:
        out.line(f"at byte   {record.offset}")
    out.line(f"expected  {f'sha256:{shown(record.expected)}' if record.expected else 'unsigned: nobody said'}")
    out.line(f"found     {f'sha256:{shown(record.found)}' if record.found else 'not known'}")
    for why in record.reasons:
        out.line(f"why       {shown(why.message)} [{shown(why.code)}]")
    out.line(f"content   {'not kept' if content is None else shown(str(content))}")
    if content is not None:
        out.line("nothing should load it; to see what it holds: safeload scan, or safeload explain")
    return 0


@quarantine.command(cls=options.Command)
def purge(
    directory: _Target,
    items: _Items = None,
    everything: Annotated[bool, typer.Option("--all", help="remove every item")] = False,
    json: options.Json = False,
) -> int:
    """Remove items for good: those that are named, or all of them with --all."""
    out = Output(json=json)
    if bool(items) == everything:
        raise ConfigError("expected either the items to remove or --all", hint="`safeload quarantine list` names them")
    n_removed = _quarantine(directory).purge(None if everything else items)
    out.object({"schema": SCHEMA_VERSION, "removed": n_removed})
    out.line(f"removed {text.count(n_removed, 'item')}" if n_removed else _nothing_for(directory))
    return 0


def _nothing_for(directory: Path) -> str:
    return f"nothing is in quarantine for {shown(str(directory))}"


def _quarantine(directory: Path) -> Quarantine:
    from safeload.fetching.quarantine import Quarantine

    store = Quarantine(directory)
    if not (os.path.lexists(directory) or os.path.lexists(store.path)):
        raise ConfigError(f"there is no {escape(str(directory))}, and no quarantine for it", hint="check the path")
    return store


def _item_json(record: Record) -> dict[str, Any]:
    return record.model_dump(mode="json")


def _why(record: Record) -> str:
    if record.reasons:
        return ", ".join(dict.fromkeys(shown(why.code) for why in record.reasons))
    return "unsigned" if record.unsigned else "-"


def _where_from(record: Record) -> str:
    return ", ".join(map(shown, record.mirrors)) or "-"
