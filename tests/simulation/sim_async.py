"""Asynchronous training out of one seed, in virtual time: the real loop, queue, tickets, scheduler and router, with a
world whose tools take up to a minute, a policy whose weights change in flight, slow learners, faults and crashes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from toolwise.advantages import Grpo
from toolwise.concurrency.tasks import all_tasks
from toolwise.config.schema import RunConfig
from toolwise.data import Batches
from toolwise.data.sampled_batches import SampledBatches
from toolwise.envs.base import BaseEnv
from toolwise.messages import Message
from toolwise.protocols import Metrics, Sampler
from toolwise.rollout.adaptive_gate import AdaptiveGate
from toolwise.rollout.queue import RolloutQueue
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.routers import DirectRouter
from toolwise.testing.virtual_time import simulate
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.run import Run
from toolwise.training.ticket_book import TicketBook, packed_state
from toolwise.types import CreditedBatch, EvaluateResult, EvaluationFault, Rollout, RouteDecision, Task

DEADLINE_S = 100.0
CLOSE_S = 30.0
MAX_TURNS, MAX_TOKENS = 4, 3


@dataclass(frozen=True)
class AsyncPlan:
    seed: int
    staleness: int
    batch: int
    n: int
    steps: int
    tasks: int
    tool_s: float
    """Tools take up to this long; one in a hundred calls never returns."""
    learn_s: float
    swap_s: float
    faults: float
    """Chance of a fault in each call of policy, world and reward."""
    equal: float
    """Chance that a rollout's score is that of all others, so that its group may have no signal."""
    refills: int
    crashes: tuple[float, ...]
    """When the process dies, in seconds since it started: it begins again from its last checkpoint."""
    save_every: int
    breaks_at: int | None
    """The batch at which the router breaks down for good."""
    fixed: bool
    """Whether the schedule is fixed, as with `deterministic = true`."""
    short: bool
    """Whether the last batch of an epoch may be short."""
    slots: int | None
    """Episodes at a time, if that is measured; the engine's requests at the start."""
    validate_s: float | None
    """How long a validation takes, which runs after every second step; None: there is none."""
    cancels: tuple[float, ...]
    """When whatever an episode waits for is cancelled, in seconds since the process started."""
    curriculum: bool
    """Whether a sampler chooses the tasks, the same ones again and again, by what it hears of them."""

    @classmethod
    def of(cls, seed: int) -> AsyncPlan:
        chance = random.Random(f"async {seed}")
        batch, steps = chance.randint(1, 3), chance.randint(2, 6)
        tool_s, learn_s = chance.choice((0.0, 1.0, 60.0)), chance.choice((0.0, 1.0, 20.0, 300.0))
        lasts_s = steps * (5.0 + tool_s + learn_s / 2)
        return cls(
            seed=seed,
            staleness=chance.choice((0, 1, 1, 2, 4)),
            batch=batch,
            n=chance.randint(1, 3),
            steps=steps,
            tasks=batch * chance.randint(1, 3) + chance.randint(0, 1),
            tool_s=tool_s,
            learn_s=learn_s,
            swap_s=chance.choice((0.0, 0.1, 2.0)),
            faults=chance.choice((0.0, 0.0, 0.05, 0.3)),
            equal=chance.choice((0.0, 0.5, 1.0)),
            refills=chance.choice((0, 0, 1, 3)),
            crashes=tuple(chance.uniform(0, lasts_s) for _ in range(chance.choice((0, 0, 1, 3)))),
            save_every=chance.choice((1, 1, 2)),
            breaks_at=chance.choice((None,) * 9 + (chance.randint(0, 4),)),
            fixed=chance.random() < 0.2,
            short=chance.random() < 0.2,
            slots=chance.choice((None, None, 1, 4)),
            validate_s=chance.choice((None, 0.0, 10.0, 1000.0)),
            cancels=tuple(chance.uniform(0, lasts_s) for _ in range(chance.choice((0, 0, 2, 10)))),
            curriculum=chance.random() < 0.25,
        )


@dataclass
class Played:
    """What happened, by the simulation's own count."""

    plan: AsyncPlan
    violations: list[str] = field(default_factory=list)
    learned: list[tuple[int, str]] = field(default_factory=list)
    """(step, rollout) on the timeline that survived."""
    told: list[tuple[int, int]] = field(default_factory=list)
    """(step, scores that a sampler should have heard of it), likewise."""
    heard: int | None = None
    """Scores that it says it has heard, in the end."""
    repeats: int = 0
    """Batches with a task more than once."""
    worst: int = 0
    spans: int = 0
    reissued: int = 0
    stored: int = 0
    """Of these, groups that had been complete."""
    open_worlds: int = 0
    most_open: int = 0
    most_groups: int = 0
    most_tokens: int = 0
    """Of groups that are complete and not learned from, as a checkpoint would store them."""
    beside: int = 0
    """Updates during a validation."""
    cancelled: int = 0
    """Calls of a world that somebody cancelled."""
    book: TicketBook | None = None
    waits: list[asyncio.Future[None]] = field(default_factory=list)
    """What worlds wait for at the moment."""
    fault: str = ""
    steps: int = 0
    lives: int = 0

    def measure_memory(self) -> None:
        groups = [group for batch in self.book.open for group in batch.finished.values()] if self.book else []
        steps = [step for group in groups for rollout in group.rollouts for step in rollout.steps]
        self.most_groups = max(self.most_groups, len(groups))
        self.most_tokens = max(self.most_tokens, sum(len(step.tokens.token_ids) for step in steps))


class BrokenRouterError(Exception):
    """The router's own fault."""


class World(BaseEnv):
    """Takes its time, and now and then fails or hangs."""

    def __init__(self, played: Played, chance: random.Random) -> None:
        self.played, self.plan, self.chance, self.open = played, played.plan, chance, False

    async def reset(self) -> str:
        self.open = True
        self.played.open_worlds += 1
        self.played.most_open = max(self.played.most_open, self.played.open_worlds)
        await self._wait()
        return ""

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        await self._wait()
        return "and then?", None, self.chance.random() < 0.4, {}

    async def close(self) -> None:
        self.played.open_worlds -= self.open
        self.open = False

    async def _wait(self) -> None:
        hangs = self.plan.tool_s and self.chance.random() < 0.01
        waits = asyncio.ensure_future(asyncio.sleep(1e6 if hangs else self.chance.uniform(0, self.plan.tool_s)))
        self.played.waits.append(waits)
        self.played.measure_memory()
        try:
            await waits
        finally:
            waits.cancel()
            self.played.waits.remove(waits)
        if self.chance.random() < self.plan.faults:
            raise RuntimeError("the world fell apart")


class Curriculum(Sampler):
    """Draws from the first few tasks, with repetitions, and goes on the more it hears."""

    def __init__(self, plan: AsyncPlan) -> None:
        self.plan, self.draws, self.heard = plan, 0, 0

    def draw(self, count: int) -> list[int]:
        self.draws += 1
        chance = random.Random(f"{self.plan.seed}/draw/{self.draws}")
        return [chance.randrange(1 + self.heard % self.plan.tasks) for _ in range(count)]

    def observe(self, scores: Mapping[int, Sequence[float]]) -> None:
        self.heard += sum(map(len, scores.values()))

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws, "heard": self.heard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws, self.heard = state["draws"], state["heard"]


class Weights:
    """The policy's weights: a version, which no token may be sampled from while it is being replaced."""

    def __init__(self, plan: AsyncPlan) -> None:
        self.plan, self.version, self.ready = plan, 0, asyncio.Event()
        self.ready.set()

    async def publish(self, version: int) -> None:
        self.ready.clear()
        await asyncio.sleep(self.plan.swap_s)
        self.version = version
        self.ready.set()


class Policy:
    """Samples a few tokens per turn, each from the weights of its moment."""

    engine = SimpleNamespace(busy_s=0.0)

    def __init__(self, plan: AsyncPlan, weights: Weights) -> None:
        self.plan, self.weights, self.calls = plan, weights, 0

    def metrics(self) -> Metrics:
        return {}

    async def get_action(self, observation: Sequence[Message], tools: Any = None) -> Any:
        self.calls += 1
        chance = random.Random(f"{self.plan.seed}/{self.calls}")
        versions = []
        for _ in range(chance.randint(1, MAX_TOKENS)):
            await asyncio.sleep(chance.uniform(0, 2.0))
            await self.weights.ready.wait()
            versions.append(self.weights.version)
        if chance.random() < self.plan.faults:
            raise RuntimeError("no answer")
        tokens = {
            "token_ids": [1] * len(versions),
            "logprobs": [-1.0] * len(versions),
            "prompt_ids": [2],
            "policy_version": min(versions),
            "token_versions": versions,
        }
        return {"type": "text", "content": "on"}, "on", tokens, None


class Scoring:
    def __init__(self, plan: AsyncPlan) -> None:
        self.plan, self.rewards = plan, SimpleNamespace(name="sim")

    async def evaluate(self, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        chance = random.Random(f"{self.plan.seed}/{rollouts[0].rollout_id}")
        await asyncio.sleep(chance.uniform(0, self.plan.tool_s))
        return [self._result(chance) for _ in rollouts]

    def _result(self, chance: random.Random) -> EvaluateResult:
        if chance.random() < self.plan.faults:
            return EvaluateResult(error=EvaluationFault(kind="exception", message="down"))
        return EvaluateResult(score=0.5 if chance.random() < self.plan.equal else chance.random())


class Learner:
    """Counts its updates."""

    def __init__(self) -> None:
        self.version = 0

    def annotate(self, scored: Any, thinking: Any = None) -> list[Any]:
        return []

    def update(self, credited: Any) -> Metrics:
        self.version += 1
        return {}


class Estimator(Grpo):
    min_group_size = 1

    def __call__(self, rollouts: Any) -> CreditedBatch:
        return CreditedBatch([])


class Router(DirectRouter):
    breaks_at: int | None = None

    def decide(
        self, tasks: Any, n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        if step == self.breaks_at:
            raise BrokenRouterError(f"batch {step}")
        return super().decide(tasks, n, step, label=label, explore=explore)


def build(plan: AsyncPlan, played: Played) -> Run:
    config = RunConfig.model_validate(
        {
            "data": {"batch_size": plan.batch, "drop_last": not plan.short},
            "deterministic": plan.fixed,
            "rollout": {"n": plan.n},
            "reward": {"max_error_rate": 1.0},
            "algorithm": {"zero_std_groups": "refill", "max_refills": plan.refills} if plan.refills else {},
            "trainer": {"mode": "async", "max_staleness": plan.staleness, "total_steps": plan.steps},
        }
    )
    tasks = [Task(task_id=f"t{i}", prompt=[Message(role="user", content="?")]) for i in range(plan.tasks)]
    played.book = TicketBook(plan.staleness)
    weights, worlds = Weights(plan), random.Random(f"{plan.seed}/worlds/{played.lives}")
    policy = Policy(plan, weights)
    router = Router(plan.seed)
    object.__setattr__(router, "breaks_at", plan.breaks_at)
    scheduler = RolloutScheduler(
        policy,
        {},
        max_episode_steps=MAX_TURNS,
        deadline_s=DEADLINE_S,
        make_env=lambda decision: World(played, random.Random(worlds.random())),
        gate=None if plan.slots is None else _gate(plan),
    )
    batches: Any = Batches(tasks, plan.batch, seed=plan.seed, drop_last=not plan.short)
    if plan.curriculum:
        batches = SampledBatches(tasks, plan.batch, Curriculum(plan))
    order: Any = "finished" if plan.staleness and not plan.fixed else "admitted"
    return cast(
        "Run",
        SimpleNamespace(
            config=config,
            batches=batches,
            router=router,
            scheduler=scheduler,
            policy=policy,
            scoring=Scoring(plan),
            learner=Learner(),
            estimator=Estimator(),
            queue=RolloutQueue(per_update=plan.batch, max_staleness=plan.staleness, order=order),
            progress=SimpleNamespace(step=0),
            thinking=None,
            cache_memory=None,
            weights=weights,
            tickets=played.book,
        ),
    )


def _gate(plan: AsyncPlan) -> AdaptiveGate:
    assert plan.slots is not None
    clock = asyncio.get_running_loop()
    busy = random.Random(f"{plan.seed}/busy").random()
    return AdaptiveGate(
        slots=plan.slots,
        cache_tokens=lambda: 24,
        generating_s=lambda: clock.time() / 3,
        busy_s=lambda: clock.time() * busy,
        n=plan.n,
    )


def play_async(plan: AsyncPlan) -> Played:
    played = Played(plan)
    saved: dict[str, Any] = {}
    crashes = list(plan.crashes)
    while True:
        played.lives += 1
        crash = crashes.pop(0) if crashes else None
        saved, done = simulate(_live(plan, played, saved, crash), seed=plan.seed * 10 + played.lives)
        if done:
            _settle(played)
            return played


async def _live(plan: AsyncPlan, played: Played, saved: dict[str, Any], crash: float | None) -> tuple[Any, bool]:
    """One process, from its start or its last checkpoint until it is done or dies; returns the last checkpoint."""
    run = build(plan, played)
    checkpoints = [saved]
    if saved:
        run.batches.load_state_dict(saved["batches"])
        run.queue.load_state_dict(saved["queue"])
        assert run.tickets is not None
        run.tickets.load_state_dict(saved["tickets"])
        played.reissued += sum(len(batch["tickets"]) for batch in saved["tickets"]["open"])
        played.stored += sum(len(batch["finished"]) for batch in saved["tickets"]["open"])
        run.progress.step = run.learner.version = cast(Any, run.weights).version = saved["step"]
    played.learned = [entry for entry in played.learned if entry[0] < run.progress.step]
    played.told = [entry for entry in played.told if entry[0] < run.progress.step]
    work = asyncio.ensure_future(_train(plan, played, run, checkpoints))
    await asyncio.wait({work}, timeout=crash)
    died = not work.done()
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled() and work.exception() is not None:
        played.violations.append(f"the run failed: {work.exception()}")
    if others := [task for task in all_tasks() if task is not asyncio.current_task()]:
        played.violations.append(f"{len(others)} tasks were left behind")
    if played.open_worlds:
        played.violations.append(f"{played.open_worlds} worlds were never closed")
    return checkpoints[-1], not died


async def _train(plan: AsyncPlan, played: Played, run: Run, checkpoints: list[dict[str, Any]]) -> None:
    clock = asyncio.get_running_loop()

    async def learn(update: Callable[[], Any]) -> Any:
        await asyncio.sleep(random.Random(f"{plan.seed}/{run.progress.step}").uniform(0, plan.learn_s))
        return update()

    loop = AsyncLoop(run, work=learn)
    canceller = asyncio.ensure_future(_cancel_worlds(plan, played))
    validation: asyncio.Task[None] | None = None
    try:
        while run.progress.step < plan.steps:
            started, version = clock.time(), run.learner.version
            result = await loop.train_step(run)
            played.measure_memory()
            _check_step(played, result.scored, version, clock.time() - started)
            played.beside += validation is not None and not validation.done()
            if plan.validate_s is not None and loop.can_hold_weights and (validation is None or validation.done()):
                validation = asyncio.ensure_future(
                    loop.hold_weights(partial(_validate, plan, played, cast(Any, run.weights)))
                )
            if run.progress.step % plan.save_every == 0:
                assert run.tickets is not None
                checkpoints.append(
                    {
                        "batches": run.batches.state_dict(),
                        "queue": dict(run.queue.state_dict()),
                        "tickets": packed_state(run.tickets.state_dict()),
                        "step": run.progress.step,
                    }
                )
    except BrokenRouterError as fault:
        played.fault = str(fault)
    finally:
        played.steps = run.progress.step
        if isinstance(run.batches, SampledBatches):
            played.heard = cast(Curriculum, run.batches.sampler).heard
        canceller.cancel()
        await loop.close()
        await asyncio.wait({canceller})


async def _cancel_worlds(plan: AsyncPlan, played: Played) -> None:
    """Now and then a call of some world is cancelled by somebody else, as when a tool gives up its own work."""
    chance, now = random.Random(f"{plan.seed}/cancels"), 0.0
    for at in sorted(plan.cancels):
        await asyncio.sleep(at - now)
        now = at
        if played.waits:
            chance.choice(played.waits).cancel()
            played.cancelled += 1


async def _validate(plan: AsyncPlan, played: Played, weights: Weights) -> None:
    """The weights must stay what they were at its beginning."""
    assert plan.validate_s is not None
    version = weights.version
    for _ in range(5):
        await asyncio.sleep(plan.validate_s / 5)
        if weights.version != version or not weights.ready.is_set():
            played.violations.append(f"a validation of version {version} ran on version {weights.version}")


def _check_step(played: Played, scored: Sequence[Any], version: int, seconds: float) -> None:
    plan = played.plan
    played.told.append((version, sum(s.result.has_valid_score and s.rollout.trainable for s in scored)))
    played.repeats += len({s.rollout.task.task_id for s in scored}) < len({s.rollout.group_id for s in scored})
    for s in scored:
        played.learned.append((version, s.rollout.rollout_id))
        versions = [v for step in s.steps for v in step.tokens.token_versions or ()]
        if versions:
            played.worst = max(played.worst, version - min(versions))
            played.spans += len(set(versions)) > 1
        if plan.fixed and set(versions) - {max(0, version - plan.staleness)} and not plan.refills:
            played.violations.append(f"{s.rollout.rollout_id} is of versions {set(versions)}, not of the fixed one")
        if versions and version - min(versions) > plan.staleness:
            played.violations.append(f"{s.rollout.rollout_id} is {version - min(versions)} versions old")
    batches = 1 + plan.refills
    if plan.slots is not None:  # one group after the other, in the worst case
        batches *= plan.batch * (1 + plan.staleness) * plan.n
    if plan.fixed:  # before it publishes, it waits for what is under way
        batches += batches
    slow = 2 * plan.learn_s + (plan.validate_s or 0.0)  # the actor's part and the router's
    longest = batches * (2 * DEADLINE_S + 2 * CLOSE_S + plan.tool_s) + slow + plan.swap_s + 1.0
    if seconds > longest:
        played.violations.append(f"a step took {seconds:g} s, more than the deadline explains ({longest:g} s)")


def _settle(played: Played) -> None:
    plan = played.plan
    ids = [rollout for _, rollout in played.learned]
    if len(ids) != len(set(ids)):
        played.violations.append("a rollout was learned from twice")
    if played.most_open > plan.n * plan.batch * (1 + plan.staleness):
        played.violations.append(f"{played.most_open} episodes were open at once")
    groups = plan.batch * (1 + plan.staleness + plan.refills)  # under way, and taken for the step with its refills
    if played.most_groups > groups:
        played.violations.append(f"{played.most_groups} groups were stored at once, more than {groups}")
    if played.most_tokens > groups * plan.n * MAX_TURNS * MAX_TOKENS:
        played.violations.append(f"{played.most_tokens} tokens were stored at once")
    if not played.fault and played.steps != plan.steps:
        played.violations.append(f"{played.steps} of {plan.steps} steps, and nobody said why")
    if played.fault and plan.breaks_at is None:
        played.violations.append("a fault that nobody had")
    if plan.curriculum and played.heard != sum(count for _, count in played.told) and not played.fault:
        played.violations.append(f"the sampler heard {played.heard} scores instead of {played.told}")
    if plan.curriculum and not played.fault and not plan.refills and len(ids) != plan.steps * plan.batch * plan.n:
        played.violations.append(f"{len(ids)} rollouts were learned from")
    if not played.fault and not plan.refills and not plan.short and not plan.curriculum:
        expected = _expected(plan)
        if sorted(ids) != sorted(expected):
            missing, extra = set(expected) - set(ids), set(ids) - set(expected)
            played.violations.append(f"not learned from: {sorted(missing)[:3]}; not drawn: {sorted(extra)[:3]}")


def _expected(plan: AsyncPlan) -> list[str]:
    """The rollouts of the batches in their order: those of a run without crashes."""
    tasks = [Task(task_id=f"t{i}", prompt=[Message(role="user", content="?")]) for i in range(plan.tasks)]
    batches = Batches(tasks, plan.batch, seed=plan.seed)
    return [
        f"{decision.group_id}/{offset}"
        for step in range(plan.steps)
        for decision in DirectRouter(plan.seed).decide(next(batches), plan.n, step)
        for offset in range(plan.n)
    ]
