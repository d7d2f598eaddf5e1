"""Metrics of simulated runs that learn as they should, and of some that collapse: how often is the doctor wrong?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from toolwise.training.diagnosis.doctor import RunDoctor
from toolwise.training.diagnosis.history import History

Row = dict[str, float]
STEPS, RISE, N = 150, 60, 8
"""Steps of a run, those within which it learns, and rollouts of a task."""
SPARSE = ((0.005, 0.5), (0.01, 0.5), (0.03, 0.6), (0.1, 0.6), (0.3, 0.7))
"""Share of rewarded rollouts at the beginning and at the end."""


def rewards(rng: np.random.Generator, p: float, batch: int) -> Any:
    """0 or 1 for each rollout of a batch; tasks differ in difficulty."""
    tasks = rng.beta(max(p, 1e-3), max(1 - p, 1e-3), batch)
    return (rng.random((batch, N)) < tasks[:, None]).astype(float)


def row(step: int, scores: Any, tokens: float = 100.0) -> Row:
    return {
        "step": step,
        "rollouts": float(scores.size),
        "score/mean": float(scores.mean()),
        "score/std": float(scores.std()),
        "score/max": float(scores.max()),
        "frac_zero_std": float((scores.std(1) == 0).mean()),
        "actor/updates": 1.0,
        "tokens/sampled": scores.size * tokens,
    }


def sparse(rng: np.random.Generator, batch: int) -> Iterator[Row]:
    """A rare reward becomes frequent, and stays so."""
    low, high = SPARSE[int(rng.integers(len(SPARSE)))]
    for step in range(1, STEPS + 1):
        yield row(step, rewards(rng, low + (high - low) * min(1.0, step / RISE), batch))


def penalty(rng: np.random.Generator, batch: int) -> Iterator[Row]:
    """Penalties, until nothing is wrong any more: the best score is 0."""
    for step in range(1, STEPS + 1):
        yield row(step, -rewards(rng, 0.5 * max(0.0, 1 - step / RISE), batch))


def curriculum(rng: np.random.Generator, batch: int) -> Iterator[Row]:
    """The sampler turns to harder tasks; held-out tasks, where there are any, get better."""
    change, validated = int(rng.integers(20, 80)), bool(rng.integers(2))
    for step in range(1, STEPS + 1):
        yield row(step, rewards(rng, 0.8 if step < change else 0.3, batch))
        if validated and step % 10 == 0:
            score = rng.binomial(100, 0.4 + 0.2 * step / STEPS) / 100
            yield {"step": step, "eval/score": score, "eval/n": 100.0}


def longer(rng: np.random.Generator, batch: int) -> Iterator[Row]:
    """Longer rollouts solve more tasks."""
    for step in range(1, STEPS + 1):
        done = min(1.0, step / RISE)
        yield row(step, rewards(rng, 0.3 + 0.5 * done, batch), 100.0 * (1 + 3 * done))


def collapse(rng: np.random.Generator, batch: int) -> Iterator[Row]:
    """Ill: a rare reward becomes frequent, and within 10 steps nearly as rare as before."""
    low, high = SPARSE[int(rng.integers(len(SPARSE)))]
    for step in range(1, STEPS + 1):
        p = low + (high - low) * min(1.0, step / RISE) if step <= 90 else max(0.02, high * (1 - (step - 90) / 10))
        yield row(step, rewards(rng, p, batch))


HEALTHY: dict[str, Callable[[np.random.Generator, int], Iterator[Row]]] = {
    "sparse": sparse,
    "penalty": penalty,
    "curriculum": curriculum,
    "longer": longer,
}


def said_about(kind: str, seed: int) -> set[str]:
    """All that the doctor ever says about a simulated run, also if it takes it back; batches of 8 or 16 tasks."""
    rng, batch = np.random.default_rng(seed), (8, 16)[seed % 2]
    settings: dict[str, Any] = {"data": {"batch_size": batch}, "rollout": {"n": N}}
    if kind == "curriculum":
        settings["data"]["sampler"] = "difficulty"
    doctor, simulate = RunDoctor(History(settings)), collapse if kind == "collapse" else HEALTHY[kind]
    return {finding.name for line in simulate(rng, batch) for finding in doctor.add(line).found}
