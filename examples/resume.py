# ruff: noqa: INP001, T201
"""Stop a training run after three steps, take it up from a signed checkpoint, and get step four bit for bit.

    python examples/resume.py

It needs optax. The run is a small regression with dropout, so that a step depends on everything that is saved: the
parameters, both moments of Adam, the number of the step (by the schedule), the random key, and the place in the data.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import safeload
from safeload.resuming import TrainingState, restore_training, save_training
from safeload.trees import named_leaves

OPTIMIZER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=2, decay_steps=10))
BATCHES = np.random.default_rng(0).standard_normal((10, 8, 4), np.float32)


def begin() -> TrainingState:
    """Return the state before the first step."""
    first, second, rest = jax.random.split(jax.random.key(0), 3)
    params = {"in": jax.random.normal(first, (4, 16)), "out": jax.random.normal(second, (16, 4))}
    return TrainingState(params, OPTIMIZER.init(params), step=0, rng=rest, data_progress={"next_batch": 0})


def loss(params: Any, batch: Any, key: Any) -> Any:
    """Return how badly the batch is reconstructed, with dropout."""
    hidden = jax.numpy.tanh(batch @ params["in"]) * jax.random.bernoulli(key, 0.9, (len(batch), 16))
    return ((hidden @ params["out"] - batch) ** 2).mean()


@jax.jit
def update(params: Any, moments: Any, batch: Any, key: Any) -> tuple[Any, Any]:
    """Return parameters and optimizer state after one step."""
    gradients = jax.grad(loss)(params, batch, key)
    updates, moments = OPTIMIZER.update(gradients, moments, params)
    return optax.apply_updates(params, updates), moments


def train(state: TrainingState, n_steps: int) -> TrainingState:
    """Return the state some steps later."""
    for _ in range(n_steps):
        rest, key = jax.random.split(state.rng)
        at = state.data_progress["next_batch"]
        params, moments = update(state.params, state.optimizer, BATCHES[at], key)
        state = TrainingState(params, moments, state.step + 1, rest, data_progress={"next_batch": at + 1})
    return state


def are_equal(one: TrainingState, other: TrainingState) -> bool:
    """Whether the parameters of two states have the same bits."""
    ours, theirs = named_leaves(one.params), named_leaves(other.params)
    return all(np.asarray(ours[name]).tobytes() == np.asarray(theirs[name]).tobytes() for name in ours)


def main() -> None:
    """Run without a break and with one, and compare; then leave something out, and compare again."""
    key = safeload.SecretKey.generate("ed25519")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        save_training(train(begin(), 3), directory, keys=[key], model="example", revision="step-3")
        # Only the shapes of a run that begins: nothing is initialized to be overwritten.
        params, moments, rng = jax.eval_shape(lambda: ((run := begin()).params, run.optimizer, run.rng))
        resumed = restore_training(directory, TrainingState(params, moments, 0, rng), trust=key.public)
    without_a_break = train(begin(), 4)
    print(f"resumed at step {resumed.step}, batch {resumed.data_progress['next_batch']}")
    print(f"step 4 is bit-identical: {are_equal(train(resumed, 1), without_a_break)}")
    without_moments = replace(resumed, optimizer=OPTIMIZER.init(resumed.params))
    print(f"without the optimizer's state it is: {are_equal(train(without_moments, 1), without_a_break)}")


if __name__ == "__main__":
    main()
