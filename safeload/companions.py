"""Companions: the tokenizer and the configuration of a model, which belong to its weights as one revision.

Their bytes are taken from the staged memory, after the digests of the one manifest that lists the weights too have
matched: a tokenizer of another revision is another file, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Unpack, get_args

from safeload import staging
from safeload.agreeing import HOST_TIMEOUT_SECONDS, together
from safeload.decoding import arrays
from safeload.errors import ConfigError, escape
from safeload.expecting import Expectations
from safeload.loading import Held, hold, load_held, load_placed
from safeload.manifest import Role
from safeload.policy import DEFAULT_POLICY, Policy, load_policy
from safeload.report import Progress
from safeload.scanning import admit, require_policy_outside
from safeload.trust.store import Trust
from safeload.verifying import manifest_in

MODEL_ROLES: Final[tuple[Role, ...]] = ("config", "tokenizer", "template")
"""What a model does not run right without, beside its weights."""


@dataclass(frozen=True, slots=True)
class Companion:
    """A file beside the weights, verified and scanned.

    Attributes:
        path: As the manifest lists it.
        role: What the manifest says that it is for.
        data: Its bytes.
    """

    path: str
    role: Role
    data: bytes


@dataclass(frozen=True, slots=True)
class Model:
    """Weights, and what belongs to them, of one manifest.

    Attributes:
        revision: Which state of the model, as its publisher calls it.
        tensors: As `load` returns them.
        companions: By path.
    """

    revision: str
    tensors: Mapping[str, Any]
    companions: Mapping[str, Companion]

    def of_role(self, role: Role) -> tuple[Companion, ...]:
        """Return the companions of a role, by path."""
        return tuple(companion for companion in self.companions.values() if companion.role == role)


def load_companions(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    roles: Sequence[Role] = MODEL_ROLES,
    policy: str | Path | Policy = DEFAULT_POLICY,
    **expected: Unpack[Expectations],
) -> Mapping[str, Companion]:
    """Return the verified bytes of files beside the weights, by path; no file of tensors is read.

    Two calls with a path can meet two manifests: to have weights and tokenizer of one revision for sure, pin it, give
    the manifest's bytes, or call `load_model`.

    Args:
        directory: Where the files are. Untrusted.
        manifest: The signed manifest: a path, or the bytes of the envelope.
        trust: Who may sign.
        roles: Which files to return.
        policy: What may be in them.
        **expected: What to hold the manifest against; see `load`. A history is not told of it, as not all was read.

    Raises:
        RejectedError: As `load`.
        ConfigError: An argument is wrong, or there is no such role.
        StagingError: A file cannot be read.
    """
    _require_roles(roles)
    held = hold(directory, manifest=manifest, trust=trust, **expected)
    return read_companions(directory, held, roles=roles, policy=policy)


def load_model(
    directory: str | Path,
    *,
    manifest: str | Path | bytes,
    trust: Trust,
    roles: Sequence[Role] = MODEL_ROLES,
    policy: str | Path | Policy = DEFAULT_POLICY,
    shardings: Any = None,
    memory_budget: int | str | None = None,
    host_timeout: float = HOST_TIMEOUT_SECONDS,
    progress: Progress | None = None,
    **expected: Unpack[Expectations],
) -> Model:
    """Load a model to run it: its weights as `load` does, with its tokenizer and configuration of the same manifest.

    Args:
        directory: As for `load`; so for the arguments that are not described here.
        manifest: See there.
        trust: See there.
        roles: Which files to return beside the weights.
        policy: See there.
        shardings: See there.
        memory_budget: See there.
        host_timeout: See there.
        progress: See there.
        **expected: See there. The purpose is "inference" unless it is said, so that a checkpoint without a role that
            its manifest requires is refused.

    Raises:
        RejectedError: As `load`.
        ConfigError: An argument is wrong, or there is no such role.
        StagingError: As `load`.
        ShardingError: As `load`.
        HostError: As `load`.
    """
    _require_roles(roles)
    expected.setdefault("purpose", "inference")
    with ExitStack() as stack:
        if shardings is not None:
            # A process that refuses its tokenizer must not leave the others waiting for its part of the weights.
            stack.enter_context(together(seconds=host_timeout))
        held = hold(directory, manifest=manifest, trust=trust, **expected)
        companions = read_companions(directory, held, roles=roles, policy=policy)
        if shardings is None:
            tree = load_held(directory, held, policy=policy, memory_budget=memory_budget, progress=progress)
            tensors: Mapping[str, Any] = {path: arrays(value) for path, value in tree.items()}
        else:
            tensors = load_placed(
                directory, held, policy=policy, memory_budget=memory_budget, place=shardings, progress=progress
            )
    return Model(held.trusted.manifest.revision, tensors, companions)


def read_companions(
    directory: str | Path, held: Held, *, roles: Sequence[Role], policy: str | Path | Policy
) -> Mapping[str, Companion]:
    """Return the verified bytes of the files without tensors that have one of some roles, by path.

    Raises:
        RejectedError: As `load_companions`.
        StagingError: See there.
    """
    require_policy_outside(policy, directory)
    rules = load_policy(policy)
    listed = held.trusted.manifest.files
    wanted = {entry.path: None for entry in listed if entry.role in roles and not entry.tensors}
    found: dict[str, Companion] = {}
    with staging.stream(
        directory,
        held.trusted,
        wanted=wanted,
        ignore=manifest_in(directory, held.manifest, held.envelope),
    ) as batches:
        for staged in batches:
            admit(staged, policy=rules)
            for path, file in staged.files.items():
                found[path] = Companion(path, file.entry.role, bytes(file.view))
    return {path: found[path] for path in wanted}


def _require_roles(roles: Sequence[Role]) -> None:
    for role in roles:
        if role not in get_args(Role):
            raise ConfigError(f"roles: expected {', '.join(get_args(Role))}, found {escape(str(role))!r}")
