"""The command that says what a load would take, before there is anything to load with or to load from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safeload.cli import options
from safeload.cli.output import Output
from safeload.errors import ConfigError, PolicyError, RejectedError, VerificationError, escape
from safeload.rendering import text
from safeload.rendering.text import shown
from safeload.report import SCHEMA_VERSION, Report, finding_json
from safeload.sizes import human_size, parse_size

if TYPE_CHECKING:
    from safeload.planning import Inventory, LoadPlan, Partition, PlacedTensor, PlannedTensor

GROK1 = "grok-1"
"""What stands for the published checkpoint, and for its partition rules, on the command line."""

_SHORT_SECONDS = 120
"""From here on, a time is shown in minutes."""


def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="DIR|MANIFEST|grok-1",
            help="a checkpoint, its manifest, or the published Grok-1",
            show_default=False,
        ),
    ],
    mesh: Annotated[
        str, typer.Option("--mesh", metavar="MESH", help="devices along each axis, such as 1x8 or data=1,model=8")
    ] = "1x1",
    device_memory: Annotated[
        str | None, typer.Option("--device-memory", metavar="SIZE", help="what a device has, such as 80GiB")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option("--rules", metavar="FILE.toml|grok-1", help="how tensors are cut (default: whole on each device)"),
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", metavar="SIZE", help="most memory to stage in, such as 8GiB")
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Say what each device and the host need for a load, and whether it fits, without reading a tensor."""
    out = Output(json=json, verbose=verbose)
    room = None if device_memory is None else parse_size(device_memory)
    budget = None if memory_budget is None else parse_size(memory_budget)

    from safeload import planning

    axes = planning.parse_mesh(mesh)
    try:
        inventory = _inventory(out, target, policy)
    except RejectedError as err:
        return out.report(Report((), err.findings), note="nothing was planned")
    made = planning.plan(
        inventory,
        mesh=axes,
        rules=_rules(GROK1 if rules is None and _is_grok1(target) else rules),
        device_memory=room,
        memory_budget=budget,
        rates=planning.measure_rates(),
    )
    if json:
        found = [finding_json(finding) for finding in made.findings]
        out.object({"schema": SCHEMA_VERSION, **made.to_json(), "findings": found})
        return 1 if made.findings else 0
    for finding in made.findings:
        out.finding(finding)
    _show(out, made, verbose=verbose)
    if made.findings:
        return out.verdict(f"rejected: {text.count(len(made.findings), 'finding')}")
    return out.verdict("accepted")


def _is_grok1(target: str) -> bool:
    return target == GROK1 and not Path(target).exists()


def _inventory(out: Output, target: str, policy: str) -> Inventory:
    from safeload import planning

    if _is_grok1(target):
        from safeload.formats.pickles.writing import shard_layout
        from safeload.grok1 import shard_table

        tensors = tuple(
            planning.PlannedTensor(
                f"{shard.parameter}/{spec.name}" if spec.name else shard.parameter, shard.parameter, shard.file, spec
            )
            for shard in shard_table()
            for spec in shard_layout(shard.tensors).tensors
        )
        files = tuple(planning.PlannedFile(shard.file, shard.size, has_chunks=True) for shard in shard_table())
        return planning.Inventory("the published Grok-1, by its table of shapes", tensors, files)
    if Path(target).is_dir():
        return _scanned(out, target, policy)

    from safeload.manifest import Manifest
    from safeload.trust.dsse import Envelope
    from safeload.trust.oms import is_bundle
    from safeload.verifying import read_manifest

    envelope, source = read_manifest(Path(target))
    if is_bundle(envelope):
        raise ConfigError(
            f"{escape(source)} is a bundle, which lists no sizes and no tensors: nothing can be planned by it",
            hint="name the directory that it is for, or a manifest that `safeload sign` made of it",
        )
    try:
        manifest = Manifest.parse(Envelope.parse(envelope).payload)
    except VerificationError as err:
        raise type(err)(*(finding.in_file(source) for finding in err.findings)) from err
    return planning.inventory_of_manifest(manifest, source=f"{shown(target)}, whose signature was not checked")


def _scanned(out: Output, target: str, policy: str) -> Inventory:
    from safeload.grok1 import name_shards
    from safeload.planning import inventory_of_report
    from safeload.scanning import scan

    with out.progress() as progress:
        report = scan(target, policy=policy, progress=progress)
    if not report.is_accepted:
        raise PolicyError(*report.all_findings)
    paths = [Path(file.path).relative_to(target).as_posix() for file in report.files]
    try:
        parameters = name_shards(paths)
    except ConfigError:  # some other layout, whose tensors go by the names that they have in their files
        parameters = {}
    return inventory_of_report(report, paths, source=shown(target), parameters=parameters)


def _rules(rules: str | None) -> Callable[[str], Partition]:
    from safeload import planning

    if rules is None:
        return planning.replicated
    if rules == GROK1:
        from safeload.grok1 import PARTITION_RULES

        return planning.partitions(PARTITION_RULES)
    if not rules.endswith(".toml"):
        raise ConfigError(f"--rules: expected a file *.toml or grok-1, found {escape(rules)!r}", hint="check the name")
    return planning.partitions(planning.read_rules(rules))


def _show(out: Output, made: LoadPlan, *, verbose: bool) -> None:
    groups: dict[tuple[object, ...], list[PlacedTensor]] = {}
    for placed in made.placed:
        tensor = placed.tensor
        key = (tensor.name,) if verbose else (tensor.dtype, tensor.shape, placed.partition)
        groups.setdefault(key, []).append(placed)
    rows = (
        (
            str(len(group)),
            shown(_kind(group[0].tensor, len(group))),
            group[0].tensor.dtype,
            text.shape_text(group[0].tensor.shape),
            _partition_text(group[0].partition),
            "-" if group[0].device_shape is None else text.shape_text(group[0].device_shape),
            f"{sum(placed.device_nbytes for placed in group):,}",
        )
        for group in groups.values()
    )
    out.table([">tensors", "first", "dtype", "shape", "cut by", "on a device", ">bytes there"], rows)
    out.line()
    axes = ", ".join(f"{name}={size}" for name, size in made.mesh.items())
    out.line(f"source       {made.inventory.source}")
    out.line(f"mesh         {axes}: {text.count(made.n_devices, 'device')}")
    nbytes = made.inventory.nbytes
    out.line(f"checkpoint   {text.count(len(made.inventory.files), 'file')}, {nbytes:,} bytes ({human_size(nbytes)})")
    room = ""
    if made.device_memory is not None:
        left = made.device_memory - made.device_bytes
        room = f" of {human_size(made.device_memory)}, " + (
            f"{human_size(left)} left" if left >= 0 else f"{human_size(-left)} too much"
        )
    out.line(f"each device  {made.device_bytes:,} bytes ({human_size(made.device_bytes)}){room}; tensors only")
    bound = "all files at once; --memory-budget bounds it" if made.memory_budget is None else "by the memory budget"
    out.line(f"host         at most {human_size(made.host_peak_bytes)} to stage in on one that loads all: {bound}")
    least = made.least_budget
    on_host = f"; {least.on_host:,} where the devices are the host's own processors" if least.copies else ""
    out.line(f"least budget {least.nbytes:,} bytes ({human_size(least.nbytes)}) to load with this mesh{on_host}")
    if made.rates is not None and made.seconds is not None:
        rates = made.rates
        out.line(
            f"time         {_duration(made.seconds)} of hashing ({rates.hash_bytes_per_second / 1e9:.2f} GB/s, "
            f"{text.count(rates.threads, 'thread')}) and copying ({rates.copy_bytes_per_second / 1e9:.2f} GB/s), rates "
            "of this machine just now; the disk and the way to the devices were not measured"
        )


def _kind(tensor: PlannedTensor, n: int) -> str:
    return tensor.name if n == 1 else f"{tensor.name}, ..."


def _partition_text(partition: Partition) -> str:
    entries = ["-" if e is None else e if isinstance(e, str) else "+".join(e) for e in partition]
    return ", ".join(entries) or "-"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < _SHORT_SECONDS else f"{seconds / 60:.0f} min"
