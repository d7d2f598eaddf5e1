"""The training loop: data ─► route ─► roll out ─► reward + align ─► annotate ─► credit ─► update."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from toolwise.advantages import COMPARE_COSTS, cost_metrics, credit
from toolwise.advantages.assign import check_added_tokens, learns_from_equal
from toolwise.advantages.step_rewards import totals_before_costs
from toolwise.concurrency.deadlines import abandoned_counts
from toolwise.concurrency.tasks import spawn
from toolwise.data.sampled_batches import SampledBatches
from toolwise.protocols import Metrics
from toolwise.rollout.watchdog import Watchdog
from toolwise.tools import isolation
from toolwise.training.evaluate import score, with_router_credit
from toolwise.training.metrics import mean, summarize
from toolwise.training.prompt_prefetch import prefetch_prompts, read_next_prompts
from toolwise.training.run import Run
from toolwise.types import CreditedRollout, RewardSettings, Rollout, RouteDecision, ScoredRollout, ThinkingByRollout

log = logging.getLogger("toolwise.training.loop")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one training step."""

    metrics: Metrics
    scored: list[ScoredRollout]
    credited: list[CreditedRollout]


async def train_step(run: Run, before_update: Callable[[], None] = lambda: None) -> StepResult:
    """`before_update` is called before any weight changes."""
    started, counted = time.perf_counter(), counters(run)
    with Watchdog() as watchdog:
        scored, usable, counts = await collect(run)
    rolled_out = time.perf_counter()
    thinking, thinking_metrics = await think(run, scored, usable)
    before_update()
    router_started = time.perf_counter()
    scored, usable = with_credit_of_router(run, scored, usable)
    router_s = time.perf_counter() - router_started
    credited, actor_metrics, estimator_metrics = update_actor(run, usable, thinking)
    observe_scores(run, scored)
    run.queue.advance()
    run.progress.step += 1  # before the router learns: if a user's fails, the updated weights count
    router_started = time.perf_counter()
    read_next_prompts(run)
    router_metrics = run.router.learn(scored)
    run.policy.version = run.learner.version
    finished = time.perf_counter()
    router_s += finished - router_started
    times = {
        "time/rollout_s": rolled_out - started,
        "time/update_s": finished - rolled_out,
        "time/step_s": finished - started,
        "time/router_s": counts.pop("time/router_s") + router_s,
        "time/blocks": float(watchdog.blocks),
        "time/blocked_s": watchdog.blocked_s,
    }
    own = actor_metrics | thinking_metrics | counts | times | gate_metrics(run) | counters_since(run, counted)
    return step_result(scored, credited, own, estimator_metrics, router_metrics)


def gate_metrics(run: Run) -> Metrics:
    """How many episodes may run, if that is measured."""
    return {} if run.scheduler.gate is None else run.scheduler.gate.metrics()


def observe_scores(run: Run, scored: Sequence[ScoredRollout]) -> None:
    """Tell a sampler of tasks how they went."""
    if isinstance(run.batches, SampledBatches):
        run.batches.observe(scored)


def with_credit_of_router(
    run: Run, scored: Sequence[ScoredRollout], usable: Sequence[ScoredRollout]
) -> tuple[list[ScoredRollout], list[ScoredRollout]]:
    """Both with what the router knows about each rollout."""
    known = with_router_credit(run.router, scored)
    by_id = {s.rollout.rollout_id: s for s in known}
    return known, [by_id[s.rollout.rollout_id] for s in usable]


def step_result(
    scored: list[ScoredRollout], credited: list[CreditedRollout], own: Metrics, estimator: Metrics, router: Metrics
) -> StepResult:
    """A step with its metrics: the loop's `own`, those of its rollouts, and what estimator and router report. Tokens
    per second are those of rolling out; of the whole step if it overlaps the update."""
    rollouts = summarize(scored)
    rolled_out_s = own["time/step_s" if "async/learner_wait" in own else "time/rollout_s"]
    speed = rollouts.get("tokens/sampled", 0.0) / max(rolled_out_s, 1e-9)
    own = own | rollouts | {"time/tokens_per_s": speed}
    metrics = own | _distinct("estimator", estimator, own)
    return StepResult(metrics | _distinct("router", router, metrics), scored, credited)


def _distinct(part: str, reported: Metrics, own: Metrics) -> Metrics:
    """The metrics that a part of the run reports; those that would hide others are renamed: `estimator/actor/loss`."""
    hidden = [name for name in reported if name in own or name == "step" or name.startswith("eval/")]
    for name in hidden:
        _warn_renamed(part, name)
    return {f"{part}/{name}" if name in hidden else name: value for name, value in reported.items()}


@cache
def _warn_renamed(part: str, name: str) -> None:
    log.warning("the %s reports a metric %s, which the run has too: it is logged as %s/%s", part, name, part, name)


def counters_since(run: Run, before: Metrics) -> Metrics:
    return {name: count - before.get(name, 0.0) for name, count in counters(run).items()}


def counters(run: Run) -> Metrics:
    """Counts since the process started: of calls that did not stop when cancelled, and of the policy (computed and
    cached tokens, retries, transfers)."""
    gauges = {"policy/version", "engine/blocks", "engine/blocks_in_use"}
    return {
        "tools/abandoned": float(sum(abandoned_counts().values())),
        "tools/workers_killed": float(isolation.shared_pool().killed),
        **{name: count for name, count in run.policy.metrics().items() if name not in gauges},
    }


async def collect(run: Run) -> tuple[list[ScoredRollout], list[ScoredRollout], Metrics]:
    """Collect a step's rollouts; return all of them, those to train on, and counts of dropped groups with the
    seconds that the router took."""
    batch_size, refills = run.config.data.batch_size, max_refills(run)
    scored: list[ScoredRollout] = []
    usable: list[ScoredRollout] = []
    shares: list[float] = []
    prompt_of: dict[str, str] = {}
    dropped, router_s = 0, 0.0
    for attempt in range(1 + refills):
        tasks, step = next(run.batches), run.progress.step
        router_started = time.perf_counter()
        decisions = run.router.decide(tasks, run.config.rollout.n, step, label=f"step{'-more' * attempt}")
        router_s += time.perf_counter() - router_started
        if attempt:
            run.queue.return_unused(len(tasks))
        batch = await score(run, await roll_out(run, decisions), step=step)
        selected, share, n_dropped = select_usable(run, batch)
        scored += batch
        usable += selected
        shares.append(share)
        dropped += n_dropped
        prompt_of |= {d.group_id: d.prompt_id or d.group_id for d in decisions}
        if len({prompt_of[s.rollout.group_id] for s in usable}) >= batch_size:
            break
    counts = {"frac_zero_std": mean(shares), "groups/dropped": float(dropped), "groups/batches": float(len(shares))}
    counts["time/router_s"] = router_s
    return scored, usable, counts


def max_refills(run: Run) -> int:
    """How many further batches may replace groups without signal in a step."""
    algorithm = run.config.algorithm
    return algorithm.max_refills if algorithm.zero_std_groups == "refill" else 0


def select_usable(run: Run, batch: Sequence[ScoredRollout]) -> tuple[list[ScoredRollout], float, int]:
    """`select_groups` by the settings of the run."""
    algorithm = run.config.algorithm
    return select_groups(
        batch,
        keeps_equal=partial(keeps_equal, run),
        mask_truncated=algorithm.mask_truncated,
        min_group_size=run.estimator.min_group_size,
        rewards=run.estimator.rewards,
        compare_costs=algorithm.adv_estimator in COMPARE_COSTS and algorithm.zero_std_groups != "keep",
    )


def keeps_equal(run: Run, score: float) -> bool:
    """Whether to train on a group whose rewards all equal `score`: its rollouts may still differ in what they cost."""
    charged = run.thinking is not None and run.thinking.config.subtract_thinking_cost
    return run.config.algorithm.zero_std_groups == "keep" or charged or learns_from_equal(run.estimator, score)


def indices_by_prompt(decisions: Sequence[RouteDecision]) -> dict[str, list[int]]:
    """Prompt -> indices of its decisions, one per route."""
    prompts: dict[str, list[int]] = defaultdict(list)
    for index, decision in enumerate(decisions):
        prompts[decision.prompt_id or decision.group_id].append(index)
    return prompts


async def roll_out(run: Run, decisions: Sequence[RouteDecision]) -> list[Rollout]:
    """Generate rollouts through the queue: per prompt with all its routes, in order of admission."""
    prompts = indices_by_prompt(decisions)
    prompt_of = {index: prompt for prompt, indices in prompts.items() for index in indices}

    async def produce() -> None:
        try:
            tickets = {prompt: await run.queue.admit() for prompt in prompts}
            collected: dict[str, list[Rollout]] = defaultdict(list)
            missing = {prompt: len(indices) for prompt, indices in prompts.items()}
            async for group in run.scheduler.groups(decisions, do_sample=run.config.rollout.do_sample):
                prompt = prompt_of[group[0].batch_data_id]
                collected[prompt] += group
                missing[prompt] -= 1
                if not missing[prompt]:
                    rollouts = sorted(collected.pop(prompt), key=lambda r: (r.batch_data_id, r.rollout_offset))
                    run.queue.put(tickets[prompt], rollouts)
        except Exception as fault:
            run.queue.fail(fault)

    producer, prefetch = spawn(produce()), spawn(prefetch_prompts(run))
    try:
        deliveries = await run.queue.take(len(prompts))
    finally:
        producer.cancel()  # already done, unless this coroutine was cancelled
        prefetch.cancel()
        await asyncio.wait({producer, prefetch})
    return [rollout for delivery in deliveries for rollout in delivery.group]


def update_actor(
    run: Run, usable: Sequence[ScoredRollout], thinking: ThinkingByRollout
) -> tuple[list[CreditedRollout], Metrics, Metrics]:
    """Update the actor on `usable`; does nothing if only the router is trained. Also returns the learner's metrics and
    the estimator's."""
    if not run.config.router.train_actor:
        return [], {}, {}
    if run.cache_memory is not None:
        run.cache_memory.before_update()
    credited, costs, estimated = annotate_and_credit(run, usable, thinking)
    metrics = run.learner.update(credited) | costs
    if run.cache_memory is not None:
        metrics |= run.cache_memory.after_update()
    return credited, metrics, estimated


def annotate_and_credit(
    run: Run, usable: Sequence[ScoredRollout], thinking: ThinkingByRollout
) -> tuple[list[CreditedRollout], Metrics, Metrics]:
    """Rollouts with advantages, including those that the estimator added; metrics of costs, and the estimator's."""
    annotated = run.learner.annotate(usable, thinking)
    batch = credit(run.estimator, annotated)
    if batch.added:
        check_added_tokens(batch.added, run.policy.model.get_input_embeddings().num_embeddings)
    added_annotated = run.learner.annotate([row.scored for row in batch.added])
    added = [
        CreditedRollout(rollout, row.scored.steps, row.advantages)
        for rollout, row in zip(added_annotated, batch.added, strict=True)
    ]
    return [*batch.rollouts, *added], cost_metrics(annotated), dict(batch.metrics)


async def think(
    run: Run, scored: Sequence[ScoredRollout], usable: Sequence[ScoredRollout]
) -> tuple[ThinkingByRollout, Metrics]:
    """Run the thinking stage, if enabled: thoughts at the other levels, and metrics."""
    if run.thinking is None:
        return {}, {}
    result = await run.thinking.think(scored, usable, training_step=run.progress.step)
    run.thinking.end_step()
    return result


def select_groups(
    scored: Sequence[ScoredRollout],
    *,
    keeps_equal: Callable[[float], bool],
    mask_truncated: bool = False,
    min_group_size: int = 2,
    rewards: RewardSettings | None = None,
    compare_costs: bool = False,
) -> tuple[list[ScoredRollout], float, int]:
    """Select trainable rollouts in groups of at least `min_group_size` whose rewards differ.

    `keeps_equal(score)`: keep a group whose rewards all equal `score`? `rewards` says which rewards the estimator
    compares; with `compare_costs` it compares costs too, so that a group of equal rewards and costs teaches nothing.
    Also returns the share of groups without a difference to learn from (equal rewards, kept or not, and
    groups that are too small), and the number of dropped groups.
    """
    groups: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        groups[s.rollout.group_id].append(s)
    selected: list[ScoredRollout] = []
    flat = dropped = 0
    for members in groups.values():
        valid = [s for s in members if s.trainable and not (mask_truncated and s.rollout.stop_reason.truncated)]
        all_equal = len(valid) >= 2 and len(set(totals_before_costs(valid, rewards))) == 1
        same_cost = compare_costs and len({s.cost for s in valid}) == 1
        flat_group = all_equal and (same_cost or not keeps_equal(min(s.score for s in valid)))
        drop = len(valid) < min_group_size or flat_group
        flat += all_equal or drop
        dropped += drop
        selected += [] if drop else valid
    return selected, flat / max(1, len(groups)), dropped
