"""The loop, on one page: data ─► route ─► roll out ─► reward + align ─► annotate ─► credit ─► update."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from toolwise.advantages import credit, learns_from_equal_scores, min_group_size
from toolwise.advantages.step_rewards import reward_settings, total_rewards
from toolwise.concurrency.deadlines import abandoned_counts
from toolwise.concurrency.tasks import spawn
from toolwise.errors import RewardError
from toolwise.protocols import Metrics
from toolwise.rewards.align import align_rollouts
from toolwise.rollout.watchdog import Watchdog
from toolwise.thinking.stage import attach_thinking
from toolwise.tools import isolation
from toolwise.training.metrics import mean, summarize
from toolwise.training.run import Run
from toolwise.training.thinking import annotate_added_rows
from toolwise.types import CreditedRollout, Rollout, RouteDecision, ScoredRollout, ThinkingByRollout


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one turn of the wheel produced."""

    metrics: Metrics
    scored: list[ScoredRollout]
    credited: list[CreditedRollout]


async def train_step(run: Run) -> StepResult:
    """One turn of the wheel: each line feeds the next."""
    began, left_before, drawn_before = time.perf_counter(), _abandoned_work(), _generation_counts(run)
    with Watchdog() as watchdog:
        scored, usable, counts = await collect(run)
    rolled_out = time.perf_counter()
    thought, thinking_metrics = await think(run, scored, usable)
    credited, metrics = update_actor(run, usable, thought)
    metrics |= run.router.learn(scored) | thinking_metrics
    run.policy.version = run.learner.version
    run.queue.advance()
    run.progress.step += 1
    ended = time.perf_counter()
    figures = summarize(scored)
    times = {
        "time/rollout_s": rolled_out - began,
        "time/update_s": ended - rolled_out,
        "time/step_s": ended - began,
        "time/tokens_per_s": figures.get("tokens/sampled", 0.0) / max(rolled_out - began, 1e-9),
    }
    left = {name: count - left_before[name] for name, count in _abandoned_work().items()}
    left |= {name: count - drawn_before.get(name, 0.0) for name, count in _generation_counts(run).items()}
    times |= {"time/blocks": float(watchdog.blocks), "time/blocked_s": watchdog.blocked_s}
    return StepResult(metrics | figures | counts | left | times, scored, credited)


def _generation_counts(run: Run) -> Metrics:
    """What generating has taken since this process began: tokens computed and found again, retries, transfers."""
    counts = run.policy.metrics() if hasattr(run.policy, "metrics") else {}
    return {name: count for name, count in counts.items() if name not in _GAUGE_METRICS}


_GAUGE_METRICS = {"policy/version", "engine/blocks", "engine/blocks_in_use"}


def _abandoned_work() -> Metrics:
    """What did not end when it was told to, since this process began."""
    return {
        "tools/abandoned": float(sum(abandoned_counts().values())),
        "tools/workers_killed": float(isolation.shared_pool().killed),
    }


async def collect(run: Run) -> tuple[list[ScoredRollout], list[ScoredRollout], Metrics]:
    """A step's rollouts: all of them, those to learn from, and what was left out and why."""
    algorithm, batch_size = run.config.algorithm, run.config.data.batch_size
    scored: list[ScoredRollout] = []
    usable: list[ScoredRollout] = []
    shares: list[float] = []
    prompt_of: dict[str, str] = {}
    dropped = 0
    refills = algorithm.max_refills if algorithm.zero_std_groups == "refill" else 0
    for attempt in range(1 + refills):
        tasks = next(run.batches)
        step = run.progress.step
        decisions = run.router.decide(tasks, run.config.rollout.n, step, label=f"step{'-more' * attempt}")
        if attempt:
            run.queue.return_unused(len(tasks))
        rollouts = await roll_out(run, decisions)
        batch = await score(run, rollouts)
        kept, share, lost = select_groups(
            batch,
            keeps_equal=lambda score: (
                algorithm.zero_std_groups == "keep" or learns_from_equal_scores(run.estimator, score)
            ),
            mask_truncated=algorithm.mask_truncated,
            min_group_size=min_group_size(run.estimator),
            totals=partial(total_rewards, **reward_settings(run.estimator)),
        )
        scored += batch
        usable += kept
        shares.append(share)
        dropped += lost
        prompt_of |= {d.group_id: d.prompt_id or d.group_id for d in decisions}
        if len({prompt_of[s.rollout.group_id] for s in usable}) >= batch_size:
            break
    counts = {
        "frac_zero_std": mean(shares),
        "groups/dropped": float(dropped),
        "groups/batches": float(len(shares)),
    }
    return scored, usable, counts


async def roll_out(run: Run, decisions: Sequence[RouteDecision]) -> list[Rollout]:
    """Rollouts through the queue, a prompt at a time with all its routes, in the order of their admission."""
    prompts: dict[str, list[int]] = defaultdict(list)
    for place, decision in enumerate(decisions):
        prompts[decision.prompt_id or decision.group_id].append(place)
    prompt_of = {place: prompt for prompt, places in prompts.items() for place in places}

    async def produce() -> None:
        try:
            tickets = {prompt: await run.queue.admit() for prompt in prompts}
            whole: dict[str, list[Rollout]] = defaultdict(list)
            missing = {prompt: len(places) for prompt, places in prompts.items()}
            async for group in run.scheduler.groups(decisions, do_sample=run.config.rollout.do_sample):
                prompt = prompt_of[group[0].batch_data_id]
                whole[prompt] += group
                missing[prompt] -= 1
                if not missing[prompt]:
                    rollouts = sorted(whole.pop(prompt), key=lambda r: (r.batch_data_id, r.rollout_offset))
                    run.queue.put(tickets[prompt], rollouts)
        except Exception as fault:
            run.queue.fail(fault)

    producer = spawn(produce())
    try:
        deliveries = await run.queue.take(len(prompts))
    finally:
        producer.cancel()  # done, unless somebody ended the waiting
        await asyncio.wait({producer})
    return [rollout for delivery in deliveries for rollout in delivery.group]


def update_actor(
    run: Run, usable: Sequence[ScoredRollout], thought: ThinkingByRollout
) -> tuple[list[CreditedRollout], Metrics]:
    """The actor's lesson from what can be learned from; none where it is to stay as it is while the router learns."""
    if not run.config.router.train_actor:
        return [], {}
    annotated = attach_thinking(run.learner.annotate(usable), thought)
    credited, metrics = credit(run.estimator, annotated)
    if run.thinking is not None:
        credited = annotate_added_rows(run.learner, credited)
    return credited, run.learner.update(credited) | metrics


async def think(
    run: Run, scored: Sequence[ScoredRollout], usable: Sequence[ScoredRollout]
) -> tuple[ThinkingByRollout, Metrics]:
    """What the other thinking levels would have thought, where the run wants to know."""
    if run.thinking is None:
        return {}, {}
    found = await run.thinking.think(scored, usable, training_step=run.progress.step)
    run.thinking.end_step()
    return found


async def score(run: Run, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
    """Rewards for all, aligned to steps; the run stops only where too many could not be had."""
    rollouts = run.router.with_written_usage(rollouts)
    results = await run.scoring.evaluate(rollouts, step=run.progress.step)
    faults = [(r, result.error) for r, result in zip(rollouts, results, strict=True) if result.error is not None]
    if len(faults) > run.config.reward.max_error_rate * len(rollouts):
        rollout, fault = faults[0]
        reason = " ".join(fault.message.split())
        error = RewardError(
            f"reward {run.scoring.rewards.name} failed on {len(faults)} of {len(rollouts)} rollouts, more than "
            f"reward.max_error_rate allows; first on {rollout.rollout_id}: {fault.kind}: {reason}"
        )
        if fault.traceback:
            error.add_note(fault.traceback.rstrip())
        raise error
    return align_rollouts(rollouts, results)


def select_groups(
    scored: Sequence[ScoredRollout],
    *,
    keeps_equal: Callable[[float], bool],
    mask_truncated: bool = False,
    min_group_size: int = 2,
    totals: Callable[[Sequence[ScoredRollout]], Iterable[float]] = total_rewards,
) -> tuple[list[ScoredRollout], float, int]:
    """What to learn from: rollouts that count, in groups of `min_group_size` or more, whose rewards differ.

    `keeps_equal(score)`: keep a group whose rewards all equal `score`? `totals` gives the rewards that the estimator
    compares. Gives also the share of groups without a difference to learn from (equal rewards, kept or not, and groups
    too small to compare), and how many were dropped.
    """
    groups: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        groups[s.rollout.group_id].append(s)
    kept: list[ScoredRollout] = []
    flat = dropped = 0
    for members in groups.values():
        cut = [s for s in members if mask_truncated and s.rollout.stop_reason.truncated]
        valid = [s for s in members if s.trainable and s not in cut]
        same = len(valid) >= 2 and len(set(totals(valid))) == 1
        drop = len(valid) < min_group_size or (same and not keeps_equal(min(s.score for s in valid)))
        flat += same or drop
        dropped += drop
        kept += [] if drop else valid
    return kept, flat / max(1, len(groups)), dropped
