"""safeload: verify a model checkpoint, then load exactly the verified bytes into JAX.

manifest bytes --verify--> TrustedManifest       who signed which files
directory      --stage---> StagedCheckpoint      those bytes, read once, hashed, frozen
               --scan----> AdmittedCheckpoint    nothing in them that the policy does not allow
               --decode--> HostTensor            arrays on the same bytes
               --assemble> jax.Array             sharded over devices

A module that ends in `-ing` is a step; every other module is a noun. `loading` is the whole chain on one screen.
Importing the package loads none of numpy, cryptography and jax; each name below does so when it is first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # Type checkers take the name for true; `typing` takes 9 ms, in which Ctrl-C is not handled yet.
if TYPE_CHECKING:
    from safeload.assembling import partition_rules
    from safeload.auditing import Audit, audit
    from safeload.companions import load_model
    from safeload.converting import convert, copy_verified
    from safeload.diffing import diff
    from safeload.errors import Finding, SafeloadError
    from safeload.fetching.fetch import fetch
    from safeload.fetching.remote import scan_remote
    from safeload.filling import assign, fill, load_into
    from safeload.loading import load, load_and_report, verify
    from safeload.manifest import Manifest, TrustedManifest
    from safeload.placing import Join, join_blocks
    from safeload.policy import Policy
    from safeload.publishing import sign
    from safeload.records import QuantizedWeight8bit
    from safeload.remapping import remap
    from safeload.report import Report
    from safeload.resuming import TrainingState, restore_training, save_training
    from safeload.saving import save
    from safeload.scanning import scan
    from safeload.tally import LoadReport
    from safeload.tensors import TensorSpec
    from safeload.trust.keys import PublicKey, SecretKey

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Finding",
    "Join",
    "LoadReport",
    "Manifest",
    "Policy",
    "PublicKey",
    "QuantizedWeight8bit",
    "Report",
    "SafeloadError",
    "SecretKey",
    "TensorSpec",
    "TrainingState",
    "TrustedManifest",
    "assign",
    "audit",
    "convert",
    "copy_verified",
    "diff",
    "fetch",
    "fill",
    "join_blocks",
    "load",
    "load_and_report",
    "load_into",
    "load_model",
    "partition_rules",
    "remap",
    "restore_training",
    "save",
    "save_training",
    "scan",
    "scan_remote",
    "sign",
    "verify",
]

_MODULES = {
    "Audit": "auditing",
    "Finding": "errors",
    "Join": "placing",
    "LoadReport": "tally",
    "Manifest": "manifest",
    "Policy": "policy",
    "PublicKey": "trust.keys",
    "QuantizedWeight8bit": "records",
    "Report": "report",
    "SafeloadError": "errors",
    "SecretKey": "trust.keys",
    "TensorSpec": "tensors",
    "TrainingState": "resuming",
    "TrustedManifest": "manifest",
    "assign": "filling",
    "audit": "auditing",
    "convert": "converting",
    "copy_verified": "converting",
    "diff": "diffing",
    "fetch": "fetching.fetch",
    "fill": "filling",
    "join_blocks": "placing",
    "load": "loading",
    "load_and_report": "loading",
    "load_into": "filling",
    "load_model": "companions",
    "partition_rules": "assembling",
    "remap": "remapping",
    "restore_training": "resuming",
    "save": "saving",
    "save_training": "resuming",
    "scan": "scanning",
    "scan_remote": "fetching.remote",
    "sign": "publishing",
    "verify": "loading",
}


def __getattr__(name: str) -> object:
    """Import the module of a public name when the name is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
