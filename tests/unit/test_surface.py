"""The public names. A change here is a change for every user, and belongs in CHANGELOG.md."""

import inspect
import re

import pytest

import safeload
from safeload.expecting import Expectations

PUBLIC = {
    # verbs
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
    # nouns
    "Audit",
    "Finding",
    "Join",
    "LoadReport",
    "Manifest",
    "Policy",
    "PublicKey",
    "QuantizedWeight8bit",
    "Report",
    "SecretKey",
    "TensorSpec",
    "TrainingState",
    "TrustedManifest",
    # the base of every error; the others are in safeload.errors
    "SafeloadError",
}


def test_the_public_names_are_these() -> None:
    assert set(safeload.__all__) == PUBLIC
    assert len(safeload.__all__) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(safeload, name)
    assert not inspect.ismodule(value)
    assert value.__doc__


def test_public_names_are_listed_by_dir() -> None:
    assert set(dir(safeload)) >= PUBLIC


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    # The names are looked up late, so that `import safeload` is cheap; the lookup must still be an ordinary one.
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = safeload.no_such_name


def test_load_takes_these_arguments() -> None:
    parameters = inspect.signature(safeload.load).parameters.values()
    required = inspect.Parameter.empty
    assert [(p.name, p.kind, p.default) for p in parameters] == [
        ("directory", inspect.Parameter.POSITIONAL_OR_KEYWORD, required),
        ("manifest", inspect.Parameter.KEYWORD_ONLY, required),
        ("trust", inspect.Parameter.KEYWORD_ONLY, required),
        ("policy", inspect.Parameter.KEYWORD_ONLY, "numpy-quantized"),
        ("shardings", inspect.Parameter.KEYWORD_ONLY, None),
        ("memory_budget", inspect.Parameter.KEYWORD_ONLY, None),
        ("cast", inspect.Parameter.KEYWORD_ONLY, None),
        ("joins", inspect.Parameter.KEYWORD_ONLY, ()),
        ("host_timeout", inspect.Parameter.KEYWORD_ONLY, 600.0),
        ("progress", inspect.Parameter.KEYWORD_ONLY, None),
        ("expected", inspect.Parameter.VAR_KEYWORD, required),
    ]


def test_what_a_manifest_can_be_held_against_is_a_closed_list() -> None:
    assert set(Expectations.__annotations__) == {"pin", "model", "revision", "history", "purpose", "trust_pin"}
    with pytest.raises(TypeError, match="skip"):
        safeload.load("nowhere", manifest=b"", trust=[], skip=True)  # type: ignore[call-arg] # that is the claim


@pytest.mark.parametrize("name", ["load", "scan", "sign", "verify"])
def test_no_verb_takes_a_switch(name: str) -> None:
    # `digests` of scan and `blake3` of sign ask for more work, and weaken nothing.
    switches = [
        p.name for p in inspect.signature(getattr(safeload, name)).parameters.values() if isinstance(p.default, bool)
    ]
    assert switches == {"scan": ["digests"], "sign": ["blake3"]}.get(name, [])


def test_the_version_is_semantic() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", safeload.__version__)
