"""The commands that look at a checkpoint: sign, verify, scan, inspect, load."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from safeload.cli import options
from safeload.cli.keys import claimed, read_secret_keys, require_absent
from safeload.cli.output import Output
from safeload.errors import ConfigError, RejectedError
from safeload.rendering import text
from safeload.rendering.text import shown
from safeload.report import SCHEMA_VERSION, Report
from safeload.sizes import human_size, parse_size

INSTALL_JAX = "pip install 'safeload[jax]'"

_NOT_VERIFIED = "scanned, not verified (no manifest): nothing is said about who made these files"


def sign(
    directory: options.Directory,
    key: Annotated[
        list[Path], typer.Option("--key", metavar="KEY", help="a secret key; repeatable", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="MANIFEST", help="the manifest to write", show_default=False)
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="the model's name (default: the folder's name)")
    ] = None,
    revision: Annotated[
        str, typer.Option("--revision", metavar="REV", help="which state of the model this is")
    ] = "unversioned",
    version: Annotated[
        int, typer.Option("--version", metavar="N", min=1, help="number of this manifest; a later one has a higher")
    ] = 1,
    layout: Annotated[
        Literal["grok-1"] | None, typer.Option("--layout", help="bind each file to the parameter that it holds")
    ] = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """List, scan, hash and sign the files of DIR. What the policy refuses is never signed."""
    out = Output(json=json, verbose=verbose)
    require_absent(output)
    keys = read_secret_keys(key, passphrase_file)

    from safeload import loading
    from safeload.files import publish

    parameters = _grok1_parameters(directory) if layout == "grok-1" else None
    try:
        with out.progress() as progress:
            envelope, report = loading.sign_and_report(
                directory,
                keys=keys,
                model=directory.resolve().name if model is None else model,
                revision=revision,
                version=version,
                policy=policy,
                parameters=parameters,
                progress=progress,
            )
    except RejectedError as err:
        return out.report(Report((), err.findings), note="nothing was signed")
    with claimed(output):
        publish(output, envelope)
    return out.report(report, extra={"output": str(output)}, note=f"wrote     {shown(str(output))}")


def _grok1_parameters(directory: Path) -> Mapping[str, str]:
    from safeload.files import Root
    from safeload.grok1 import name_shards

    with Root(directory) as root:
        return name_shards(file.path for file in root.walk())


def verify(
    directory: options.Directory,
    manifest: options.Manifest,
    trust: options.Trust,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Prove that DIR holds exactly the files that a trusted key signed, and that the policy allows them."""
    out = Output(json=json, verbose=verbose)

    from safeload import loading

    with out.progress() as progress:
        report = loading.check(directory, manifest=manifest, trust=trust, policy=policy, progress=progress)
    return out.report(report)


def scan(
    paths: options.Paths,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    digest: options.Digest = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Say whether a policy allows what is in these files, without running any of it."""
    out = Output(json=json, verbose=verbose)

    report = _scan(out, paths, policy, digest=digest)
    return out.report(report, note=_NOT_VERIFIED)


def inspect(
    paths: options.Paths,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    digest: options.Digest = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Show the name, type, shape and place of every tensor in these files."""
    out = Output(json=json, verbose=verbose)

    report = _scan(out, paths, policy, digest=digest)
    columns = ["file", "tensor", "dtype", "shape", "order", ">offset", ">bytes", *(["sha256"] if digest else [])]
    if any(file.tensors for file in report.files):
        out.table(columns, text.tensor_rows(report))
        out.line()
    return out.report(report, note=_NOT_VERIFIED)


def _scan(out: Output, paths: Sequence[Path], policy: str, *, digest: bool) -> Report:
    from safeload.policy import load_policy
    from safeload.scanning import scan as scan_paths

    rules = load_policy(policy)
    with out.progress() as progress:
        return scan_paths(paths, policy=rules, digests=digest, progress=progress)


def load(
    directory: options.Directory,
    manifest: options.Manifest,
    trust: options.Trust,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", metavar="SIZE", help="most memory to stage in, such as 8GiB")
    ] = None,
    jax: Annotated[bool, typer.Option("--jax", help="assemble the tensors on JAX's devices")] = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Verify DIR and load exactly the verified bytes; print what was loaded and how fast."""
    out = Output(json=json, verbose=verbose)
    budget = None if memory_budget is None else parse_size(memory_budget)

    if jax and importlib.util.find_spec("jax") is None:
        raise ConfigError("JAX is not installed", hint=INSTALL_JAX)

    from safeload import loading

    started = time.perf_counter()
    with out.progress() as progress:
        tree = loading.load(
            directory,
            manifest=manifest,
            trust=trust,
            policy=policy,
            # Where on a mesh a tensor belongs is the model's knowledge; the command puts it on JAX's default device.
            shardings=(lambda _path, _shape: None) if jax else None,
            memory_budget=budget,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    files = {path: list(_arrays(value, "")) for path, value in tree.items()}
    n_tensors = sum(map(len, files.values()))
    n_bytes = sum(array.nbytes for arrays in files.values() for _, array in arrays)
    if json:
        out.object(_loaded_json(files, n_bytes, seconds))
        return 0
    if verbose or len(files) <= text.MAX_LISTED_FILES:
        rows = (
            (shown(path), shown(name) or "-", str(array.dtype), text.shape_text(array.shape), str(array.nbytes))
            for path, arrays in files.items()
            for name, array in arrays
        )
        out.table(["file", "tensor", "dtype", "shape", ">bytes"], rows)
        out.line()
    out.line(
        f"{text.count(len(files), 'file')}, {text.count(n_tensors, 'tensor')}, {human_size(n_bytes)} verified and "
        f"loaded {'into JAX' if jax else 'as numpy arrays'} in {seconds:.2f} s ({n_bytes / seconds / 1e9:.2f} GB/s)"
    )
    return out.verdict("accepted")


def _arrays(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of what a file holds, each with its path there."""
    if hasattr(value, "nbytes") and hasattr(value, "dtype"):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _arrays(child, f"{name}/{index}".removeprefix("/"))
    elif hasattr(value, "items"):
        for key, child in value.items():
            yield from _arrays(child, f"{name}/{key}".removeprefix("/"))


def _loaded_json(files: Mapping[str, Sequence[tuple[str, Any]]], n_bytes: int, seconds: float) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "verdict": "accepted",
        "files": [
            {
                "path": path,
                "verdict": "accepted",
                "findings": [],
                "tensors": [
                    {"name": name, "dtype": str(a.dtype), "shape": list(a.shape), "nbytes": int(a.nbytes)}
                    for name, a in arrays
                ],
            }
            for path, arrays in files.items()
        ],
        "findings": [],
        "bytes": n_bytes,
        "seconds": seconds,
    }
