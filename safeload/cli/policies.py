"""`safeload policy`: what the shipped policies allow, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.errors import Finding
from safeload.rendering.text import printable
from safeload.report import SCHEMA_VERSION, finding_json

app = typer.Typer(cls=options.Group, help="List, show and compare policies.", no_args_is_help=True)


def _argument(metavar: str, what: str) -> Any:
    return typer.Argument(metavar=metavar, help=what, show_default=False, autocompletion=options.complete_policy)


@app.command("list", cls=options.Command)
def list_policies(json: options.Json = False) -> int:
    """List the shipped policies."""
    from safeload.policy import load_policy, shipped_policies

    out = Output(json=json)
    policies = [load_policy(name) for name, _ in shipped_policies()]
    out.object(
        {
            "schema": SCHEMA_VERSION,
            "policies": [{"name": p.name, "sha256": p.sha256, "description": p.description} for p in policies],
        }
    )
    width = max((len(policy.name) for policy in policies), default=0)
    for policy in policies:
        out.line(f"{policy.name.ljust(width)}  {policy.description}")
    return 0


@app.command(cls=options.Command)
def show(
    name: Annotated[str, _argument("NAME", "a shipped policy's name, or a path")],
    json: options.Json = False,
) -> int:
    """Print what a policy comes to (stdout) and its digest (stderr): its file, or the result of what it extends."""
    from safeload.policy import Policy, policy_text

    out = Output(json=json)
    content, source = policy_text(name)
    # Parsed even where only the text is shown: a file that is no policy must not look like one.
    policy = Policy.parse(content, source=source)
    if json:
        out.object(
            {
                "schema": SCHEMA_VERSION,
                "name": policy.name,
                "sha256": policy.sha256,
                "source": source,
                "policy": policy.model_dump(mode="json"),
            }
        )
    else:
        # A file that stands alone is shown with its comments; a derived one as what it comes to.
        out.verbatim(policy.to_toml() if policy.is_derived else content.decode("utf-8"))
        out.note(f"sha256:{policy.sha256}  {printable(source)}")
    return 0


@app.command(cls=options.Command)
def diff(
    old: Annotated[str, _argument("OLD", "a shipped policy's name, or a path")],
    new: Annotated[str, _argument("NEW", "another")],
    json: options.Json = False,
) -> int:
    """Say what NEW allows and OLD does not, and the other way round. Rejected if NEW is anywhere wider."""
    from safeload.policy import load_policy

    out = Output(json=json)
    before, after = load_policy(old), load_policy(new)
    wider, narrower = after.additions_to(before), before.additions_to(after)
    for sign, entries in (("+", wider), ("-", narrower)):
        for entry in entries:
            out.line(f"{sign} {printable(entry)}")
    findings = tuple(
        Finding("policy-wider", f"policy {after.name} allows {entry}; policy {before.name} does not") for entry in wider
    )
    if json:
        facts = {"wider": wider, "narrower": narrower, "old": before.sha256, "new": after.sha256}
        verdict = "rejected" if wider else "accepted"
        out.object(
            {
                "schema": SCHEMA_VERSION,
                "verdict": verdict,
                "files": [],
                "findings": [finding_json(finding) for finding in findings],
                **facts,
            }
        )
        return 1 if wider else 0
    return out.verdict(f"rejected: {len(wider)} addition(s)" if wider else "accepted")
