"""The command that writes down or compares the values of a checkpoint under a model's names: fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safeload.cli import options
from safeload.cli.keys import claimed, require_absent
from safeload.cli.output import Output
from safeload.errors import ConfigError, Finding, PolicyError, escape
from safeload.rendering import text
from safeload.rendering.text import shown
from safeload.report import SCHEMA_VERSION

if TYPE_CHECKING:
    from safeload.mapping_rules import MappingRules
    from safeload.remapping import MappingReport


def fingerprint(
    directory: options.Directory,
    manifest: options.Manifest,
    trust: options.Trust,
    mapping: Annotated[
        str | None,
        typer.Option("--map", metavar="RULES", help="rules for names and layouts: a shipped name or a path"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="write the fingerprint to FILE")
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="FILE", help="compare with the fingerprint in FILE")
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", metavar="SIZE", help="most memory to stage in, such as 8GiB")
    ] = None,
    pin: options.Pin = None,
    model: options.ExpectedModel = None,
    revision: options.ExpectedRevision = None,
    history: options.History = None,
    purpose: options.Purpose = None,
    trust_pin: options.TrustPin = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Verify DIR, and write or compare the digests of its values under the names of a model."""
    out = Output(json=json, verbose=verbose)
    if (output is None) == (against is None):
        raise ConfigError("expected either --output or --against", hint="write a fingerprint once, then compare")
    if output is not None:
        require_absent(output)

    from safeload import fingerprinting, loading
    from safeload.files import publish
    from safeload.mapping_rules import MappingRules, load_rules
    from safeload.remapping import remap_and_report

    plain = MappingRules(version=1, name="plain", description="Names as they are.")
    rules = plain if mapping is None else load_rules(mapping)
    expected = None if against is None else fingerprinting.Fingerprint.read(against)
    with out.progress() as progress:
        trusted, loaded = loading.load_host(
            directory,
            manifest=manifest,
            trust=trust,
            policy=policy,
            memory_budget=memory_budget,
            pin=pin,
            model=model,
            revision=revision,
            history=history,
            purpose=purpose,
            trust_pin=trust_pin,
            progress=progress,
        )
    parameters = {file.path: file.parameter for file in trusted.manifest.files if file.parameter is not None}
    tree, report = remap_and_report(loaded, rules, parameters=parameters)
    _require_fitting(rules, report)
    if expected is not None:
        fingerprinting.check_fingerprint(tree, expected)
    # What compared equal need not be hashed again to be shown.
    made = fingerprinting.fingerprint(tree) if expected is None else expected
    if output is not None:
        with claimed(output):
            publish(output, made.to_json())
    if json:
        out.object(
            {
                "schema": SCHEMA_VERSION,
                "verdict": "accepted",
                "findings": [],
                "files": [],
                "fingerprint": {
                    "sha256": made.sha256,
                    "tensors": len(made.tensors),
                    "excluded": report.excluded,
                    "ties": report.ties,
                    "output": None if output is None else str(output),
                    "against": None if against is None else str(against),
                },
            }
        )
        return 0
    if verbose:
        for name, value in made.tensors.items():
            out.line(f"{shown(name)}  {value}")
    for name, why in report.excluded.items():
        out.note(f"safeload: note: left out {shown(name)}: {shown(why)}")
    if output is not None:
        out.line(f"wrote     {shown(str(output))}")
    if expected is not None and expected.forward is not None:
        out.line("the forward pass was not compared, which takes the model's code: safeload.fingerprinting does it")
    verb = "written down" if expected is None else "compared, all equal"
    out.line(f"{text.count(len(made.tensors), 'tensor')} {verb}")
    return out.verdict("accepted")


def _require_fitting(rules: MappingRules, report: MappingReport) -> None:
    """Refuse rules that know none of the names: what they would write down is no model's, under names that are none."""
    n_unused = sum(unused.startswith("rename ") for unused in report.unused)
    if rules.rename and n_unused == len(rules.rename):
        finding = Finding(
            "rules-do-not-fit",
            f"expected names that mapping {escape(rules.name)} renames, found none in {len(report.tensors)} tensors",
            hint="give the --map of the software that wrote the checkpoint",
        )
        raise PolicyError(finding)
