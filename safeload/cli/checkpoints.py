"""The commands that look at a checkpoint: sign, verify, scan, inspect, load."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from safeload.cli import fetching, options, signatures
from safeload.cli.keys import claimed, read_secret_keys, require_absent
from safeload.cli.output import Output
from safeload.errors import ConfigError, RejectedError, ShardingError, escape
from safeload.rendering import text
from safeload.rendering.text import shown
from safeload.report import SCHEMA_VERSION, Report
from safeload.sizes import human_size, parse_size

if TYPE_CHECKING:
    from safeload.trust.keys import SecretKey

INSTALL_JAX = "install safeload with its extra `jax`: pip install '.[jax]' in its repository"

_MIN_RATED_BYTES = 100_000_000
"""Below this, the time is that of starting, and bytes a second would say nothing."""

_NAME_EXAMPLES = {"--model": "--model xai-org/grok-1", "--revision": "--revision 2024-03-17"}

_BUNDLE_MAY_BE_OLD = (
    "a bundle has no version: an older one would be accepted too, unless --pin sha256:HEX names this one"
)
_MAY_BE_OLD = "an older manifest would be accepted too: --history FILE or --pin sha256:HEX rules that out"

_NOT_VERIFIED = "scanned, not verified (no manifest): nothing is said about who made these files"


def sign(
    directory: options.Directory,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="MANIFEST", help="the manifest to write", show_default=False)
    ],
    key: Annotated[
        list[Path] | None, typer.Option("--key", metavar="KEY", help="a secret key; repeatable", show_default=False)
    ] = None,
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
    epoch: signatures.Epoch = 1,
    expires: signatures.Expires = None,
    kind: signatures.Kind = "inference",
    require: signatures.Require = None,
    blake3: signatures.Blake3 = False,
    payload_only: signatures.PayloadOnly = False,
    form: Annotated[
        Literal["safeload", "oms"], typer.Option("--format", help="a manifest, or a bundle of OpenSSF Model Signing")
    ] = "safeload",
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """List, scan, hash and sign the files of DIR. What the policy refuses is never signed."""
    out = Output(json=json, verbose=verbose)
    require_absent(output)
    model = _label("--model", directory.resolve().name if model is None else model)
    revision = _label("--revision", revision)
    if payload_only == bool(key):
        raise ConfigError("expected either --key KEY or --payload-only", hint="say who signs: a key here, or elsewhere")
    keys = read_secret_keys(key or [], passphrase_file)
    expiry = signatures.parse_expiry(expires)
    if form == "oms":
        stated_too = [
            revision != "unversioned",
            version != 1,
            layout,
            epoch != 1,
            expires,
            kind != "inference",
            require,
        ]
        if any(stated_too) or blake3 or len(keys) != 1:
            raise ConfigError(
                "a bundle is signed by one --key and says a --model and nothing else of a checkpoint",
                hint="leave the other options out, or sign with --format safeload",
            )
        return _sign_bundle(out, directory, output, keys[0], model=model, policy=policy)

    from safeload import publishing
    from safeload.files import publish

    parameters = _grok1_parameters(directory) if layout == "grok-1" else None
    try:
        with out.progress() as progress:
            stated: dict[str, Any] = {
                "model": model,
                "revision": revision,
                "version": version,
                "epoch": epoch,
                "expires": expiry,
                "kind": kind,
                "require": require or [],
                "policy": policy,
                "parameters": parameters,
                "blake3": blake3,
                "progress": progress,
            }
            if payload_only:
                unsigned, report = publishing.describe(directory, **stated)
                envelope = b""
            else:
                unsigned = None
                envelope, report = publishing.sign_and_report(directory, keys=keys, **stated)
    except RejectedError as err:
        return out.report(Report((), err.findings), note="nothing was signed")
    if unsigned is not None:
        return signatures.write_payload(out, output, unsigned, report)
    with claimed(output):
        publish(output, envelope)
    if output.parent.resolve().is_relative_to(directory.resolve()):
        out.note(
            f"safeload: note: {shown(str(output))} lies in the checkpoint, where no file but the listed ones and the "
            "manifest that is given with -m is allowed"
        )
    return out.report(report, extra={"output": str(output)}, note=f"wrote     {shown(str(output))}")


def _sign_bundle(out: Output, directory: Path, output: Path, key: SecretKey, *, model: str, policy: str) -> int:
    from safeload.files import publish
    from safeload.interchange import sign_bundle

    try:
        with out.progress() as progress:
            bundle, report = sign_bundle(directory, key=key, model=model, policy=policy, progress=progress)
    except RejectedError as err:
        return out.report(Report((), err.findings), note="nothing was signed")
    with claimed(output):
        publish(output, bundle)
    return out.report(report, extra={"output": str(output)}, note=f"wrote     {shown(str(output))}")


def _label(option: str, value: str) -> str:
    """Return `value` if it can stand in a manifest as a name.

    Raises:
        ConfigError: It has a character that no name may have, or is empty or too long.
    """
    from safeload.manifest import Label

    if re.fullmatch(get_args(Label)[1].pattern, value) is None:
        raise ConfigError(
            f"{option}: expected a letter or digit, then up to 254 letters, digits and . _ : / @ + -, "
            f"found {escape(value)!r}",
            hint=f"choose a name such as {_NAME_EXAMPLES[option]}",
        )
    return value


def _grok1_parameters(directory: Path) -> Mapping[str, str]:
    from safeload.files import Root
    from safeload.grok1 import name_shards

    with Root(directory) as root:
        return name_shards(file.path for file in root.walk())


def verify(
    directory: options.Directory,
    manifest: options.Manifest,
    trust: options.BundleTrust = None,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    pin: options.Pin = None,
    model: options.ExpectedModel = None,
    revision: options.ExpectedRevision = None,
    history: options.History = None,
    purpose: options.Purpose = None,
    trust_pin: options.TrustPin = None,
    sigstore_identity: options.SigstoreWho = None,
    sigstore_issuer: options.SigstoreIssuer = None,
    sigstore_root: options.SigstoreRoot = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Prove that DIR holds exactly the files that a trusted key signed, and that the policy allows them."""
    out = Output(json=json, verbose=verbose)

    sigstore = (sigstore_identity, sigstore_issuer, sigstore_root)
    if any(sigstore) and not all(sigstore):
        raise ConfigError(
            "--sigstore-identity, --sigstore-issuer and --sigstore-root go together", hint="name all three"
        )
    if not trust and not any(sigstore):
        raise ConfigError("missing option '--trust'", hint="name the public key of who signed: --trust KEY.pub")

    from safeload import loading
    from safeload.trust.store import SigstoreIdentity

    trusted: list[Path | SigstoreIdentity] = [*(trust or [])]
    if sigstore_identity and sigstore_issuer and sigstore_root:
        trusted.append(SigstoreIdentity(sigstore_identity, sigstore_issuer, sigstore_root))
    with out.progress() as progress:
        report = loading.check(
            directory,
            manifest=manifest,
            trust=trusted,
            policy=policy,
            pin=pin,
            model=model,
            revision=revision,
            history=history,
            purpose=purpose,
            trust_pin=trust_pin,
            progress=progress,
        )
    if not report.is_accepted:
        return out.report(report)
    return out.report(report, note=freshness(report.facts))


def freshness(facts: Mapping[str, Any]) -> str | None:
    """Return what the verdict does not say of whether a manifest is the newest, None where it says that."""
    expected = facts["expected"]
    if "bundle" in facts:
        return None if expected["pin"] is not None else _BUNDLE_MAY_BE_OLD
    memory = expected["history"]
    if memory is not None and memory["clock_moved_back_seconds"]:
        return (
            f"the clock is {memory['clock_moved_back_seconds']} seconds behind what {shown(memory['path'])} remembers"
        )
    if expected["pin"] is not None or (memory is not None and not memory["first_use"]):
        return None
    if memory is not None:
        model = shown(facts["manifest"]["model"])
        return f"first use of {shown(memory['path'])} for {model}: from now on it refuses older manifests"
    return _MAY_BE_OLD


def scan(
    paths: options.Paths,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    digest: options.Digest = False,
    hf_endpoint: fetching.HubEndpoint = fetching.DEFAULT_ENDPOINT,
    token_file: fetching.TokenFile = None,
    allow_private: fetching.AllowPrivate = None,
    allow_http: fetching.AllowHttp = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Say whether a policy allows what is in these files, without running any of it."""
    out = Output(json=json, verbose=verbose)

    reach = fetching.Reach(hf_endpoint, token_file, allow_private, allow_http)
    report = _scan(out, paths, policy, digest=digest, reach=reach)
    return out.report(report, note=fetching.scan_note(report, _NOT_VERIFIED))


def inspect(
    paths: options.Paths,
    policy: options.Policy = options.DEFAULT_POLICY_NAME,
    digest: options.Digest = False,
    hf_endpoint: fetching.HubEndpoint = fetching.DEFAULT_ENDPOINT,
    token_file: fetching.TokenFile = None,
    allow_private: fetching.AllowPrivate = None,
    allow_http: fetching.AllowHttp = None,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> int:
    """Show the name, type, shape and place of every tensor in these files."""
    out = Output(json=json, verbose=verbose)

    reach = fetching.Reach(hf_endpoint, token_file, allow_private, allow_http)
    report = _scan(out, paths, policy, digest=digest, reach=reach)
    columns = ["file", "tensor", "dtype", "shape", "order", ">offset", ">bytes", *(["sha256"] if digest else [])]
    if any(file.tensors for file in report.files):
        out.table(columns, text.tensor_rows(report))
        out.line()
    elif report.verdict == "accepted":  # of a file that is refused it is not known
        out.line("no tensors\n")
    return out.report(report, note=fetching.scan_note(report, _NOT_VERIFIED))


def _scan(out: Output, paths: Sequence[str], policy: str, *, digest: bool, reach: fetching.Reach) -> Report:
    from safeload.policy import load_policy

    rules = load_policy(policy)
    with out.progress() as progress:
        return fetching.scan(paths, policy=rules, digest=digest, reach=reach, progress=progress)


def load(
    directory: options.Directory,
    manifest: options.Manifest,
    trust: options.Trust,
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

    try:
        with out.progress() as progress:
            tree, taken = loading.load_and_report(
                directory,
                manifest=manifest,
                trust=trust,
                policy=policy,
                # Where on a mesh a tensor belongs is the model's knowledge; this puts it on JAX's default device.
                shardings=(lambda _path, _shape: None) if jax else None,
                memory_budget=budget,
                pin=pin,
                model=model,
                revision=revision,
                history=history,
                purpose=purpose,
                trust_pin=trust_pin,
                progress=progress,
            )
    except ShardingError as err:
        if "jax_enable_x64" not in (err.hint or ""):
            raise
        # Nobody can call a function of the process that this command is; JAX reads its own variable.
        raise ShardingError(err.message, hint="let JAX keep 64 bits: JAX_ENABLE_X64=1 safeload load ...") from err
    seconds = taken.seconds["total"]
    files = {path: list(_arrays(value, "")) for path, value in tree.items()}
    n_tensors = sum(map(len, files.values()))
    n_bytes = sum(array.nbytes for arrays in files.values() for _, array in arrays)
    if json:
        out.object({**_loaded_json(files, n_bytes, seconds, jax=jax), "load": taken.to_json()})
        return 0
    if verbose or len(files) <= text.MAX_LISTED_FILES:
        rows = (
            (
                shown(path),
                shown(name) or "-",
                str(array.dtype),
                text.shape_text(array.shape),
                str(array.nbytes),
                *([", ".join(_devices(array))] if jax else []),
            )
            for path, arrays in files.items()
            for name, array in arrays
        )
        out.table(["file", "tensor", "dtype", "shape", ">bytes", *(["devices"] if jax else [])], rows)
        out.line()
    if pin is None and history is None:
        out.line(_MAY_BE_OLD)
    rate = f" ({n_bytes / seconds / 1e9:.2f} GB/s)" if n_bytes >= _MIN_RATED_BYTES else ""
    out.line(
        f"{text.count(len(files), 'file')}, {text.count(n_tensors, 'tensor')}, {human_size(n_bytes)} verified and "
        f"loaded {'into JAX' if jax else 'as numpy arrays'} in {seconds:.2f} s{rate}"
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


def _devices(array: Any) -> list[str]:
    """Name the devices that a `jax.Array` lies on: `cpu:0`."""
    return [f"{device.platform}:{device.id}" for device in sorted(array.devices(), key=lambda device: device.id)]


def _loaded_json(
    files: Mapping[str, Sequence[tuple[str, Any]]], n_bytes: int, seconds: float, *, jax: bool
) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "verdict": "accepted",
        "files": [
            {
                "path": path,
                "verdict": "accepted",
                "findings": [],
                "tensors": [
                    {
                        "name": name,
                        "dtype": str(a.dtype),
                        "shape": list(a.shape),
                        "nbytes": int(a.nbytes),
                        **({"devices": _devices(a)} if jax else {}),
                    }
                    for name, a in arrays
                ],
            }
            for path, arrays in files.items()
        ],
        "findings": [],
        "bytes": n_bytes,
        "seconds": seconds,
    }
