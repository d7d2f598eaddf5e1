"""Memory and time estimates for a run, extrapolated from the two trial tasks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolwise.checks.dry_run.memory import actor_of, cache_bytes, device_bytes, static_parts, status_bytes
from toolwise.checks.dry_run.trial import RolloutTrial, UpdateTrial
from toolwise.training.run import Run


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    parts: dict[str, int]
    """Bytes by name."""
    total: int
    available: int
    device: str
    basis: str
    """What the estimate is based on."""


TimeRange = NDArray[np.float64]
"""Seconds, [2]: low if all rollouts of a step overlap, high if they run one after another."""


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    rollout: TimeRange
    score_s: float
    update_s: float
    step: TimeRange
    validation: TimeRange
    """All validations of the run."""
    total: TimeRange
    basis: str


def estimate_memory(run: Run, rollouts: RolloutTrial, update: UpdateTrial | None) -> MemoryEstimate:
    config, device = run.config, actor_of(run).device
    scale = config.data.batch_size / len(rollouts.tasks)
    parts = static_parts(run)
    basis = ["weight sizes"]
    sampled = sum(s.rollout.usage.sampled_tokens for s in rollouts.scored)
    rows = update.tokens if update is not None else sampled
    cache = cache_bytes(run)
    if cache is not None:
        cache_size, per_token = cache
        # On a GPU the whole cache is allocated up front; on a CPU it grows with use and is emptied after each update.
        parts["KV cache"] = cache_size if device.type == "cuda" else min(cache_size, int(scale * rows * per_token))
    if update is not None and update.peak_bytes is not None:
        limit = config.actor.micro_batch_tokens
        growth = min(limit, scale * rows) / max(1, min(limit, rows))
        # The measured peak includes the gradients.
        parts["activations"] = max(0, int((update.peak_bytes - parts.get("gradients", 0)) * growth))
        basis.append(f"activations measured for {update.tokens:,} tokens")
    total = sum(parts.values())
    resident = status_bytes("VmRSS:")
    if device.type != "cuda" and resident is not None:
        parts["Python, PyTorch and data"] = max(0, resident - parts["weights"] - parts.get("reference model", 0))
        total += parts["Python, PyTorch and data"]
    return MemoryEstimate(parts, total, device_bytes(device), str(device), ", ".join(basis))


def estimate_time(run: Run, rollouts: RolloutTrial, update: UpdateTrial | None) -> TimeEstimate:
    config = run.config
    scale = config.data.batch_size / len(rollouts.tasks)
    update_s = 0.0
    if update is not None:
        update_s = update.seconds + (config.actor.ppo_epochs - 1) * update.gradient_s
        actor = actor_of(run)
        critic = actor.critic
        if critic is not None:  # its passes cost as much as the actor's, scaled by parameter count
            sizes = [sum(p.numel() for p in model.parameters()) for model in (critic.model, actor.model)]
            update_s += config.critic.epochs * update.gradient_s * sizes[0] / max(1, sizes[1])
    score_s, update_s = scale * rollouts.score_s, scale * update_s
    rollout = rollouts.rollout_s * np.array([min(1.0, scale), scale])
    step = rollout + (score_s + update_s)
    steps, every = config.trainer.total_steps, config.validation.every
    validations = int(config.validation.before) + (-(-steps // every) if every else 1)
    share = len(run.validation_tasks) / max(1, len(rollouts.scored))
    held_out = rollouts.rollout_s * np.array([min(1.0, share), share])
    validation = validations * (held_out + share * rollouts.score_s)
    basis = (
        f"from {len(rollouts.tasks)} tasks × {config.rollout.n} rollouts: low if all rollouts of a step overlap, "
        "high if they run one after another"
    )
    return TimeEstimate(rollout, score_s, update_s, step, validation, steps * step + validation, basis)
