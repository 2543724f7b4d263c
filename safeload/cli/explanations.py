"""`safeload explain`: what one file does, opcode by opcode, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.rendering import text
from safeload.rendering.text import printable
from safeload.report import Report

if TYPE_CHECKING:
    from safeload.explaining import Explanation
    from safeload.formats.pickles.tracing import Step


def explain(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="the file", show_default=False)],
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    json: options.Json = False,
) -> int:
    """Show what a pickle does, opcode by opcode, and why it is refused or not. Runs none of it."""
    out = Output(json=json)

    from safeload.explaining import explain as explain_file

    explanation = explain_file(path, policy=policy)
    report = Report((explanation.report,))
    if explanation.steps:
        out.line("what each opcode does")
        out.table(["offset", "opcode", "stack", "leaves on the stack"], map(_row, explanation.steps), indent="  ")
        if explanation.n_steps > len(explanation.steps):
            out.line(f"  ... and {explanation.n_steps - len(explanation.steps)} more opcode(s)")
        out.line()
    if explanation.report.globals:
        out.line("globals that it names")
        for name in explanation.report.globals:
            out.line(f"  {printable(name)}")
        out.line()
    if explanation.report.tensors:
        out.line("tensors that it holds")
        out.table(
            ["file", "tensor", "dtype", "shape", "order", ">offset", ">bytes"], text.tensor_rows(report), indent="  "
        )
        out.line()
    out.line(
        "as a program, had it been run (by fickling; never part of the verdict)"
        if explanation.has_program
        else "as a program"
    )
    for line in explanation.program.splitlines():
        out.line(f"  {printable(line)}")
    out.line()
    return out.report(report, extra=_extra(explanation))


def _row(step: Step) -> tuple[str, ...]:
    marks = f" in {text.count(step.marks, 'mark')}" if step.marks else ""
    result = f"REFUSED: {step.refusal}" if step.refusal is not None else step.result
    return str(step.offset), step.opcode, f"{step.before} -> {step.after}{marks}", printable(result)


def _extra(explanation: Explanation) -> dict[str, Any]:
    return {
        "steps": [
            {
                "offset": step.offset,
                "opcode": step.opcode,
                "nbytes": step.nbytes,
                "marks": step.marks,
                "before": step.before,
                "after": step.after,
                "result": step.result,
                "refusal": step.refusal,
            }
            for step in explanation.steps
        ],
        "steps_total": explanation.n_steps,
        "program": explanation.program if explanation.has_program else None,
    }
