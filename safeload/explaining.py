"""Explain: what one pickle does, opcode by opcode, with the decision on each. For people; never part of a verdict."""

from __future__ import annotations

import ast
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from safeload.errors import ConfigError, Finding, RejectedError, escape
from safeload.files import Root, StreamSource
from safeload.formats import MemorySource, Source
from safeload.formats.detection import HEAD_BYTES, detect
from safeload.formats.pickles import parse_pickle
from safeload.formats.pickles.tracing import Step, TracingMachine, TracingTorchMachine
from safeload.formats.pytorch import is_legacy, parse_pytorch, parse_pytorch_legacy, pickle_of
from safeload.formats.zips import read_zip
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import FileReport
from safeload.scanning import scan

MAX_DECOMPILED_BYTES = 4 * 1024 * 1024
"""Size of a file that fickling is given: it reads a file whole, and takes about 26 microseconds an opcode."""

MAX_STEPS = 10_000
"""Steps that are kept. A shard has about 60; whoever needs more than this needs no page of text."""

MAX_PROGRAM_NODES = 100_000
"""Parts of a program that are written out; a tuple that holds itself twice, twenty times over, has a million."""

MAX_LISTED_PICKLES = 8
"""Pickles of an archive that are named; TorchScript writes two or three."""

MAX_DECOMPILED_LINES = 40
"""Lines of the decompiled program that are kept: enough to see what it is after."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one file holds and does.

    Attributes:
        report: Its verdict, findings, globals and tensors, as `scan` gives them.
        steps: The opcodes that were run, up to the end or to where the run was refused; at most `MAX_STEPS`.
        n_steps: How many there were.
        program: What the pickle would have run, as Python source (from fickling), or why that is not known.
        has_program: Whether `program` is source.
    """

    report: FileReport
    steps: tuple[Step, ...]
    n_steps: int
    program: str
    has_program: bool


def explain(path: str | Path, *, policy: str | Path | Policy = DEFAULT_POLICY) -> Explanation:
    """Show what one file does, without doing it; never fails on a broken file, but shows how far it got.

    Args:
        path: The file.
        policy: What is allowed.

    Raises:
        ConfigError: The path is no file, or the policy is not valid.
        StagingError: The file cannot be read.
    """
    rules = load_policy(policy)
    if not Path(path).is_file():
        raise ConfigError(f"{escape(str(path))} is no file", hint="name one file")
    report = scan(path, policy=rules).files[0]
    steps: list[Step] = []
    n_steps = 0

    def keep(step: Step) -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps <= MAX_STEPS:
            steps.append(step)

    target = Path(os.path.realpath(path))
    with Root(target.parent) as root, StreamSource(root.open(target.name), str(path)) as stream:
        head = stream.read(0, HEAD_BYTES)
        kind = detect(head, stream.size)
        torch = partial(TracingTorchMachine, tell=keep)
        pickle: Source = stream
        if kind is not None and kind.name == "zip":
            parsed = parse_pytorch(stream, rules, machine=torch)
            with suppress(RejectedError):
                pickle = MemorySource(pickle_of(stream, rules))
            if pickle is stream:
                return Explanation(report, (), 0, _no_one_pickle(stream, rules), has_program=False)
        elif kind is not None and kind.name != "pickle":
            return Explanation(report, (), 0, f"it is {kind.noun}, and no pickle", has_program=False)
        elif is_legacy(head):
            parsed = parse_pytorch_legacy(stream, rules, machine=torch)
        else:
            parsed = parse_pickle(stream, rules, machine=TracingMachine(stream, rules, keep))
        report = replace(report, globals=parsed.globals, findings=tuple(map(_without_this_hint, report.findings)))
        if is_legacy(head):
            program, has_program = "it is several pickles, and this is the one that names the tensors", False
        else:
            program, has_program = _decompile(pickle)
    return Explanation(report, tuple(steps), n_steps, program, has_program)


def _no_one_pickle(source: Source, policy: Policy) -> str:
    """Say why the pickle of an archive is not shown: it has none, or is not the archive that `torch.save` writes."""
    try:
        names = [entry.name for entry in read_zip(source, policy).entries]
    except RejectedError:
        return "it is a zip archive whose members cannot be told for sure, so neither can its pickle"
    pickles = [name for name in names if name.endswith(".pkl")]
    if not pickles:
        return "it is a zip archive, and no pickle was found in it"
    listed = ", ".join(escape(name, limit=80) for name in pickles[:MAX_LISTED_PICKLES])
    more = f" and {len(pickles) - MAX_LISTED_PICKLES} more" if len(pickles) > MAX_LISTED_PICKLES else ""
    has_code = any("/code/" in name or name.endswith("/constants.pkl") for name in names)
    what = "a TorchScript archive" if has_code else "a zip archive, and not one that torch.save writes"
    return f"it is {what}, whose pickles are looked at by nothing here: {listed}{more}"


def _without_this_hint(finding: Finding) -> Finding:
    # The hint to explain the file has been taken.
    return replace(finding, hint=None) if "safeload explain" in (finding.hint or "") else finding


def _decompile(source: Source) -> tuple[str, bool]:
    """Return the pickle as a Python program, or why there is none, and which of the two it is. Runs nothing of it."""
    try:
        from fickling.fickle import Pickled
    except ImportError:
        return "fickling is not installed: pip install '.[explain]' in safeload's repository", False
    if source.size > MAX_DECOMPILED_BYTES:
        return f"the file has more than {MAX_DECOMPILED_BYTES:,} bytes, which fickling would read whole", False
    try:
        program = Pickled.load(source.read(0, source.size)).ast
        if not _is_small(program):
            return f"it is a program of more than {MAX_PROGRAM_NODES:,} parts", False
        lines = ast.unparse(program).splitlines()
    except Exception as err:  # noqa: BLE001 - a foreign parser on hostile bytes: whatever it raises, we only lose this view
        return f"fickling cannot read it: {escape(str(err)) or type(err).__name__}", False
    # The lines are Python source, whose own backslashes are to be read as such.
    shown = [escape(line).replace("\\\\", "\\") for line in islice(lines, MAX_DECOMPILED_LINES)]
    more = [f"# ... and {len(lines) - MAX_DECOMPILED_LINES} more line(s)"] if len(lines) > MAX_DECOMPILED_LINES else []
    return "\n".join([*shown, *more]), True


def _is_small(program: ast.AST) -> bool:
    """Whether a program is small when written out: parts that are shared count each time, as they are written."""
    n_nodes = 0
    waiting: list[object] = [program]
    while waiting:
        node = waiting.pop()
        n_nodes += 1
        if n_nodes > MAX_PROGRAM_NODES:
            return False
        if isinstance(node, ast.AST):
            waiting += [getattr(node, name, None) for name in node._fields]
        elif isinstance(node, list | tuple):
            waiting += node
    return True
