"""Runs two tasks of a run: rollouts, scores and gradients, without changing a weight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolwise.checks.dry_run.memory import actor_of, measure_peak
from toolwise.rewards.align import align_rollouts
from toolwise.training.loop import annotate_and_credit, select_groups, think
from toolwise.training.run import Run
from toolwise.training.startup import announce
from toolwise.types import CreditedRollout, ScoredRollout, Task

TRIAL_TASKS = 2
WARM_UP_TOKENS = 8


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


async def try_rollouts(run: Run) -> RolloutTrial:
    """Roll out and score whole groups of the first tasks, as a training step does."""
    tasks = run.batches.tasks[:TRIAL_TASKS]
    n = run.config.rollout.n
    announce("warming up the model")
    # One short generation first, so that kernel compilation does not count towards the step time.
    sampling = replace(run.policy.sampling, max_new_tokens=WARM_UP_TOKENS)
    await run.policy.generate([run.chat.end_id], sampling)
    announce(f"rolling out {len(tasks)} tasks × {n}")
    start = time.perf_counter()
    decisions = run.router.decide(tasks, n, 0)
    rollouts = await run.scheduler.roll_out(decisions, do_sample=run.config.rollout.do_sample)
    rolled_out = time.perf_counter()
    announce(f"scoring {len(rollouts)} rollouts")
    results = await run.scoring.evaluate(rollouts, step=0)
    scored = align_rollouts(rollouts, results)
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
    credited, _ = annotate_and_credit(run, usable, thinking)
    prepared_s = time.perf_counter() - start
    actor = actor_of(run)
    _, peak = measure_peak(lambda: actor.dry_run_update(credited), actor.device)
    start = time.perf_counter()  # time the second call: the first also compiles and allocates
    actor.dry_run_update(credited)
    gradient_s = time.perf_counter() - start
    return UpdateTrial(prepared_s + gradient_s, gradient_s, peak, sum(map(_tokens, credited)))


def _tokens(rollout: CreditedRollout) -> int:
    """Length of the rollout's longest row."""
    return max((len(step.tokens.prompt_ids) + len(step.tokens.token_ids) for step in rollout.steps), default=0)
