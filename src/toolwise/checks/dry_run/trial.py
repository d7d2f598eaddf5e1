"""Two tasks of a run for real: rolled out, scored, and taken through the learner without changing a weight."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from toolwise.advantages import credit, min_group_size
from toolwise.checks.dry_run.memory import measure_peak
from toolwise.rewards.align import align_rollouts
from toolwise.thinking.stage import attach_thinking
from toolwise.training.loop import select_groups, think
from toolwise.training.run import Run
from toolwise.training.startup import announce
from toolwise.training.thinking import annotate_added_rows
from toolwise.types import CreditedRollout, ScoredRollout, Task

TRIAL_TASKS = 2
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RolloutTrial:
    """The rollouts of the first tasks, as a training step would make them."""

    tasks: Sequence[Task]
    scored: Sequence[ScoredRollout]
    rollout_s: float
    score_s: float


@dataclass(frozen=True, slots=True)
class UpdateTrial:
    """What those rollouts cost the learner."""

    seconds: float
    """Of one pass: annotation, thinking alternatives, forward and backward."""
    gradient_s: float
    """Of the forward and backward pass alone."""
    peak_bytes: int | None
    """Memory that the pass needed beyond what was held before; None where it cannot be measured."""
    tokens: int
    """Tokens in the rows that were learned from."""


async def try_rollouts(run: Run) -> RolloutTrial:
    """Roll out and score the first tasks in whole groups: the path of a training step."""
    tasks = run.batches.tasks[:TRIAL_TASKS]
    n = run.config.rollout.n
    _skip_warm_start(run)
    announce("warming up the model")
    # One short generation first: kernels that are compiled on first use are no part of a step's time.
    sampling = replace(run.policy.sampling, max_new_tokens=WARM_UP_TOKENS)
    await run.policy.generate([run.chat.end_id], sampling)
    announce(f"rolling out {len(tasks)} tasks × {n}")
    began = time.perf_counter()
    decisions = run.router.decide(tasks, n, 0)
    rollouts = await run.scheduler.roll_out(decisions, do_sample=run.config.rollout.do_sample)
    rolled_out = time.perf_counter()
    announce(f"scoring {len(rollouts)} rollouts")
    rollouts = list(run.router.with_written_usage(rollouts))
    results = await run.scoring.evaluate(rollouts, step=0)
    scored = align_rollouts(rollouts, results)
    return RolloutTrial(tasks, scored, rolled_out - began, time.perf_counter() - rolled_out)


async def try_update(run: Run, scored: Sequence[ScoredRollout]) -> UpdateTrial | None:
    """The learner's part of a step, up to the gradients; None where there is nothing to learn from."""
    usable, _, _ = select_groups(
        scored,
        keeps_equal=lambda score: True,  # equal scores cost as much as others
        mask_truncated=run.config.algorithm.mask_truncated,
        min_group_size=min_group_size(run.estimator),
    )
    if not usable or not run.config.router.train_actor:
        return None
    announce("computing gradients, without changing a weight")
    began = time.perf_counter()
    thought, _ = await think(run, scored, usable)
    credited, _ = credit(run.estimator, attach_thinking(run.learner.annotate(usable), thought))
    if run.thinking is not None:
        credited = annotate_added_rows(run.learner, credited)
    prepared_s = time.perf_counter() - began
    _, peak = measure_peak(lambda: run.learner.dry_run_update(credited), run.learner.device)
    began = time.perf_counter()  # the second time: the first one also compiles and allocates
    run.learner.dry_run_update(credited)
    gradient_s = time.perf_counter() - began
    return UpdateTrial(prepared_s + gradient_s, gradient_s, peak, sum(map(_tokens, credited)))


def _tokens(rollout: CreditedRollout) -> int:
    """The length of a rollout's longest row."""
    told = [step.policy_logprobs or {} for step in rollout.steps]
    return max((len(t.get("prompt_ids", ())) + len(t.get("token_ids", ())) for t in told), default=0)


def _skip_warm_start(run: Run) -> None:
    """A router's warm start goes over all labelled tasks: too long for a trial, and it changes weights."""
    state: dict[str, Any] = run.router.state_dict()
    if "warmed" in state:
        run.router.load_state_dict({**state, "warmed": True})
