"""`safeload policy`: what the shipped policies allow, and why."""

from __future__ import annotations

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.rendering.text import printable
from safeload.report import SCHEMA_VERSION

app = typer.Typer(help="List the shipped policies, or show one.", no_args_is_help=True)


@app.command("list")
def list_policies(json: options.Json = False, verbose: options.Verbose = False) -> int:
    """List the shipped policies."""
    from safeload.policy import load_policy, shipped_policies

    out = Output(json=json, verbose=verbose)
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


@app.command()
def show(
    name: str = typer.Argument(metavar="NAME", help="a shipped policy's name, or a path", show_default=False),
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Print a policy's file as it is (stdout) and its digest (stderr); copy it, narrow it, pass it by path."""
    from safeload.policy import Policy, policy_text

    out = Output(json=json, verbose=verbose)
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
        out.verbatim(content.decode("utf-8"))
        out.note(f"sha256:{policy.sha256}  {printable(source)}")
    return 0
