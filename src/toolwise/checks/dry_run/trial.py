"""Runs two tasks of a run, without changing a weight: rollouts, scores and gradients; and estimates the memory and time
of the whole run from them and from tensor shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from toolwise.engine import Engine
from toolwise.learner.memory_estimate import CONTEXT_BYTES, permanent_parts, snapshot_bytes, update_memory
from toolwise.rewards.align import align_rollouts
from toolwise.training.loop import annotate_and_credit, select_groups, think
from toolwise.training.run import Run
from toolwise.training.startup import announce
from toolwise.types import ScoredRollout, Task

if TYPE_CHECKING:
    from toolwise.learner.actor import Actor

TRIAL_TASKS = 2
WARM_UP_TOKENS = 8
FP32 = 4
COPIES = ("weights", "merged weights", "reference model")
"""Parts that are in memory before the first update."""
TimeRange = NDArray[np.float64]
"""Seconds, [2]: low if all rollouts of a step overlap, high if they run one after another."""


@dataclass(frozen=True, slots=True)
class RolloutTrial:
    """Rollouts of the first tasks, made as in a training step."""

    tasks: Sequence[Task]
    scored: Sequence[ScoredRollout]
    rollout_s: float
    score_s: float


@dataclass(frozen=True, slots=True)
class UpdateTrial:
    """Cost of learning from those rollouts."""

    seconds: float
    """Duration of one pass: annotation, thinking alternatives, forward and backward."""
    gradient_s: float
    """Duration of the forward and backward pass alone."""
    peak_bytes: int | None
    """Peak memory of the pass above the level before it; None if it cannot be measured."""
    tokens: int
    """Tokens in the training rows."""


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    rollout: TimeRange
    score_s: float
    update_s: float
    step: TimeRange
    validation: TimeRange
    """All validations of the run."""
    total: TimeRange


def actor_of(run: Run) -> Actor:
    return cast("Actor", run.learner)  # a run has no other learner


async def try_rollouts(run: Run) -> RolloutTrial:
    """Roll out and score whole groups of the first tasks, as a training step does."""
    tasks = run.batches.tasks[:TRIAL_TASKS]
    n = run.config.rollout.n
    announce("warming up the model")
    # One short generation first, so that kernel compilation does not count towards the step time.
    await run.policy.generate([run.chat.end_id], replace(run.policy.sampling, max_new_tokens=WARM_UP_TOKENS))
    announce(f"rolling out {len(tasks)} tasks × {n}")
    start = time.perf_counter()
    decisions = run.router.decide(tasks, n, 0)
    rollouts = await run.scheduler.roll_out(decisions, do_sample=run.config.rollout.do_sample)
    rolled_out = time.perf_counter()
    announce(f"scoring {len(rollouts)} rollouts")
    scored = align_rollouts(rollouts, await run.scoring.evaluate(rollouts, step=0))
    return RolloutTrial(tasks, scored, rolled_out - start, time.perf_counter() - rolled_out)


async def try_update(run: Run, scored: Sequence[ScoredRollout]) -> UpdateTrial | None:
    """The learner's part of a step up to the gradients; None if no rollout is trainable."""
    usable, _, _ = select_groups(
        scored,
        keeps_equal=lambda score: True,  # groups with equal scores cost the same time
        mask_truncated=run.config.algorithm.mask_truncated,
        min_group_size=run.estimator.min_group_size,
    )
    if not usable or not run.config.router.train_actor:
        return None
    announce("computing gradients (weights stay unchanged)")
    start = time.perf_counter()
    thinking, _ = await think(run, scored, usable)
    credited, *_ = annotate_and_credit(run, usable, thinking)
    prepared_s = time.perf_counter() - start
    actor = actor_of(run)
    peak = measure_peak(lambda: actor.dry_run_update(credited), actor.device)
    start = time.perf_counter()  # time the second call: the first also compiles and allocates
    actor.dry_run_update(credited)
    gradient_s = time.perf_counter() - start
    rows = [[len(s.tokens.prompt_ids) + len(s.tokens.token_ids) for s in rollout.steps] for rollout in credited]
    return UpdateTrial(prepared_s + gradient_s, gradient_s, peak, sum(max(lengths, default=0) for lengths in rows))


def measure_peak(work: Callable[[], object], device: torch.device) -> int | None:
    """Run `work`; return its peak memory in bytes above the level before it, or None if unknown."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak resident size (Linux)
        resident = status_bytes("VmRSS:")
    except OSError:
        resident = None
    work()
    peak = status_bytes("VmHWM:")
    return None if resident is None or peak is None else max(0, peak - resident)


def status_bytes(field: str) -> int | None:
    """Memory of this process, such as "VmRSS:"; None if the system does not report it."""
    try:
        with open("/proc/self/status") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(field)), None)
    except OSError:
        return None


def estimate_memory(run: Run, rollouts: RolloutTrial, update: UpdateTrial | None) -> dict[str, int]:
    """Bytes by component at the peak of an update. On a GPU by the formula of learner/memory_estimate.py; on a CPU the
    activations are measured, and left out if they cannot be."""
    config, device = run.config, actor_of(run).device
    scale = config.data.batch_size / len(rollouts.tasks)
    rows = update.tokens if update is not None else sum(s.rollout.usage.sampled_tokens for s in rollouts.scored)
    limit = actor_of(run).memory.tokens
    parts = _static_parts(run)
    engine = run.policy.engine
    if isinstance(engine, Engine):  # others manage their own cache
        block = engine.runner.block_bytes
        whole, per_token = engine.blocks.count * block, block // engine.blocks.size
        # On a GPU the whole cache is allocated up front; on a CPU it grows with use and is emptied after each update.
        parts["KV cache"] = whole if device.type == "cuda" else min(whole, int(scale * rows * per_token))
    if device.type == "cuda":
        return _device_peak(run, parts, update, tokens=min(limit, int(scale * rows)))
    if update is not None and update.peak_bytes is not None:
        growth = min(limit, scale * rows) / max(1, min(limit, rows))
        # The measured peak includes the gradients.
        parts["activations"] = max(0, int((update.peak_bytes - parts.get("gradients", 0)) * growth))
    resident = status_bytes("VmRSS:")
    if device.type != "cuda" and resident is not None:
        parts["Python, PyTorch and data"] = max(0, resident - sum(parts.get(name, 0) for name in COPIES))
    return parts


def _device_peak(run: Run, parts: dict[str, int], update: UpdateTrial | None, *, tokens: int) -> dict[str, int]:
    """On a GPU: the larger of the update's peak and the rollouts'. Where the trial's update took more than the formula
    says, which assumes fused kernels, the activations are larger by the same factor."""
    learner = actor_of(run)
    model, optimizer, actor = learner.model, learner.optimizer, run.config.actor
    if update is None:
        return {name: size for name, size in parts.items() if "gradients" not in name} | {"CUDA": CONTEXT_BYTES}
    memory = update_memory(model, optimizer, actor, tokens)
    factor = 1.0
    if update.peak_bytes is not None and update.tokens <= learner.memory.tokens:
        trial = update_memory(model, optimizer, actor, update.tokens)
        # In a single micro-batch the sums of the gradients appear when the activations are gone.
        if update.peak_bytes > max(trial.activations + trial.logits, trial.gradients + trial.half_gradients):
            factor = (update.peak_bytes - trial.logits) / trial.activations
    if run.cache_memory is not None and run.cache_memory.frees_each_update:
        parts.pop("KV cache", None)
    estimated = memory.parts()
    estimated["activations"] = int(factor * estimated["activations"])
    return parts | estimated | {"CUDA": CONTEXT_BYTES}


def checkpoint_copy_bytes(run: Run) -> int:
    """CPU memory of the copy from which checkpoints are written; 0 if training waits for them."""
    if not run.config.trainer.async_checkpoints:
        return 0
    learner = actor_of(run)
    size = snapshot_bytes(learner.model, learner.optimizer)
    if learner.critic is not None:
        size += snapshot_bytes(learner.critic.model, learner.critic.optimizer)
    return size


def _static_parts(run: Run) -> dict[str, int]:
    """Bytes of everything that lives as long as the run, and of the gradients."""
    learner = actor_of(run)
    parts = permanent_parts(learner.model, learner.optimizer)
    parts["gradients"] = FP32 * sum(weight.numel() for weight in learner.optimizer.weights)
    if learner.reference is not None and learner.adapters is None:  # adapters are turned off instead
        parts["reference model"] = parts["weights"]
    if learner.critic is not None:
        critic, optimizer = learner.critic.model, learner.critic.optimizer
        trained = permanent_parts(critic, optimizer)
        parts["critic"] = trained.pop("weights")
        parts["critic's training"] = sum(trained.values())
        if learner.device.type != "cuda":  # there, they are gone when the actor's update reaches its peak
            parts["critic's training"] += FP32 * sum(weight.numel() for weight in optimizer.weights)
    return {name: size for name, size in parts.items() if size}


def estimate_time(run: Run, rollouts: RolloutTrial, update: UpdateTrial | None) -> TimeEstimate:
    config = run.config
    scale = config.data.batch_size / len(rollouts.tasks)
    update_s = 0.0
    if update is not None:
        update_s = update.seconds + (config.actor.ppo_epochs - 1) * update.gradient_s
        actor = actor_of(run)
        if actor.critic is not None:  # its passes cost as much as the actor's, scaled by parameter count
            sizes = [sum(p.numel() for p in model.parameters()) for model in (actor.critic.model, actor.model)]
            update_s += config.critic.epochs * update.gradient_s * sizes[0] / max(1, sizes[1])
    score_s, update_s = scale * rollouts.score_s, scale * update_s
    rollout = rollouts.rollout_s * np.array([min(1.0, scale), scale])
    step = rollout + (score_s + update_s)
    steps, every = config.trainer.total_steps, config.validation.every
    validations = int(config.validation.before) + (-(-steps // every) if every else 1)
    share = len(run.validation_tasks) / max(1, len(rollouts.scored))
    held_out = rollouts.rollout_s * np.array([min(1.0, share), share])
    validation = validations * (held_out + share * rollouts.score_s)
    return TimeEstimate(rollout, score_s, update_s, step, validation, steps * step + validation)
