"""A whole run out of one seed: what is planned, how it is played, and all that can be told of it afterwards."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import warnings
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from sim_people import PlainPolicy, SessionPolicy, SimTool, SimUser, TextWorld, Watched, WatchedToolEnv
from sim_stage import Episode, Gauge, Stage, Visit

from toolwise.concurrency.deadlines import abandoned_counts
from toolwise.concurrency.limits import Gate, Limits
from toolwise.envs.base import BaseEnv
from toolwise.envs.interactions import InteractiveEnv
from toolwise.messages import Message
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.testing.virtual_time import simulate
from toolwise.types import Rollout, RouteDecision, Task

NAMES = ("saw", "hammer", "plane")


@dataclass(frozen=True)
class Cancel:
    """A cancellation from outside: so much later, or so many events later, and then a few rounds of the loop."""

    seconds: float | None
    events: int
    rounds: int

    @classmethod
    def of(cls, chance: random.Random) -> Cancel:
        seconds = chance.choice((None, None, 0.0, chance.uniform(0, 1), chance.uniform(0, 12)))
        return cls(seconds, chance.choice((0, 1, 3, 10, 40)), chance.choice((0, 0, 1, 2, 3, chance.randint(4, 12))))

    @classmethod
    def some(cls, chance: random.Random) -> tuple[Cancel, ...]:
        """None, one, another while the first one's work is under way, or as many as an impatient hand can give."""
        first = cls.of(chance)
        kinds = ((), (), (), (first,), (first, cls.of(chance)), (first, *[cls(0.0, 0, 1)] * 15))
        return chance.choice(kinds)


@dataclass(frozen=True)
class Plan:
    """What a seed stands for."""

    seed: int
    kind: Literal["tools", "shared tools", "text", "user"]
    sizes: tuple[int, ...]
    """The `n` of each decision."""
    faults: float
    tools: tuple[str, ...]
    sessions: bool
    prompt_ids: bool
    lock_step: bool
    deadline_s: float
    tool_timeout_s: float
    max_concurrent: int
    max_steps: int
    model_limit: int | None
    env_limit: int | None
    tool_limit: int | None
    listens: Literal["roll_out", "groups", "stops early"]
    cancels: tuple[Cancel, ...]
    """When somebody cancels everything, and when again."""
    shuffled: bool
    jitter_s: float

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        return cls(
            seed=seed,
            kind=chance.choice(("tools", "tools", "tools", "shared tools", "text", "text", "user")),
            sizes=tuple(chance.choice((0, 1, 1, 2, 2, 3, 4)) for _ in range(chance.choice((1, 2, 3, 4, 4, 12)))),
            faults=chance.choice((0.0, 0.01, 0.03, 0.1, 0.4)),
            tools=NAMES[: chance.randint(1, 3)],
            sessions=chance.random() < 0.8,
            prompt_ids=chance.random() < 0.2,
            lock_step=chance.random() < 0.3,
            deadline_s=chance.choice((1.0, 3.0, 10.0, 60.0, 60.0)),
            tool_timeout_s=chance.choice((0.5, 2.0, 6.0, 6.0)),
            max_concurrent=chance.choice((1, 2, 3, 1024, 1024)),
            max_steps=chance.randint(1, 6),
            model_limit=chance.choice((None, None, 1, 3)),
            env_limit=chance.choice((None, None, 1, 3)),
            tool_limit=chance.choice((None, None, 1, 2)),
            listens=chance.choice(("roll_out", "roll_out", "groups", "stops early")),
            cancels=Cancel.some(chance),
            shuffled=chance.random() < 0.8,
            jitter_s=chance.choice((0.0, 0.001)),
        )

    @property
    def episodes(self) -> list[Episode]:
        return [(place, offset) for place, n in enumerate(self.sizes) for offset in range(n)]

    @property
    def close_timeout_s(self) -> float:
        """What the last rewards, and the closing, may take at most. Worlds of tools keep the tools' deadlines."""
        return max(min(30.0, self.deadline_s), self.tool_timeout_s)


@dataclass
class Play:
    """A run as it went."""

    plan: Plan
    stage: Stage
    states: dict[Episode, list[tuple[float, str]]] = field(default_factory=dict)
    requests: dict[Episode, AsyncRolloutRequest] = field(default_factory=dict)
    worlds: dict[Episode, Watched] = field(default_factory=dict)
    tools: list[SimTool] = field(default_factory=list)
    gates: dict[str, Gate] = field(default_factory=dict)
    groups: list[list[Rollout]] = field(default_factory=list)
    result: list[Rollout] | None = None
    """What `roll_out` gave, or all groups that were listened to, in their order; None where it was cancelled."""
    done: list[Rollout] = field(default_factory=list)
    cancelled_at: float | None = None
    stopped_at: float | None = None
    over_at: float = 0.0
    left_behind: list[str] = field(default_factory=list)
    deaf: list[Visit] = field(default_factory=list)
    late: list[Visit] = field(default_factory=list)
    """Releases under way of tools that were given up for lost and came after all."""
    newly_abandoned: int = 0
    before_curtain: dict[Episode, Any] = field(default_factory=dict)
    after_curtain: dict[Episode, Any] = field(default_factory=dict)
    stragglers: list[str] = field(default_factory=list)
    crash: BaseException | None = None

    @property
    def rollouts(self) -> dict[Episode, Rollout]:
        return {(r.batch_data_id, r.rollout_offset): r for r in self.done}


def play(plan: Plan, *, schedule: int | None = None) -> Play:
    """The whole run, in virtual time; `schedule` chooses another order of events than the seed's own."""
    seed = schedule if schedule is not None else plan.seed if plan.shuffled else None
    _sweep_once()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run = simulate(_play(plan), seed=seed, jitter_s=plan.jitter_s)
        except SystemExit:
            raise RuntimeError("somebody's sys.exit() ended the run") from None
        gc.collect(0)
    # A play has neither files nor sockets: those that are found unclosed now are other tests'.
    run.stage.violations += [f"warned: {w.message}" for w in caught if w.category is not ResourceWarning]
    return run


@functools.cache
def _sweep_once() -> None:
    """What earlier tests of this process left lying about (unclosed sockets, say) would be swept up, with its
    warnings, in the middle of a play, and be taken for the play's own."""
    gc.collect()


async def _play(plan: Plan) -> Play:
    run = Play(plan, Stage(plan.seed, faults=plan.faults))
    run.stage.loop.set_exception_handler(lambda loop, context: run.stage.broken(f"unheard: {context}"))
    scheduler = _scheduler(run)
    decisions = _decisions(plan)
    abandoned_before = sum(abandoned_counts().values())
    listening = asyncio.create_task(_listen(run, scheduler, decisions))
    try:
        await _disturb(run, listening)
        await asyncio.wait({listening})
    finally:
        run.over_at = run.stage.now
    if listening.cancelled():
        run.stage.note("run", "cancelled")
    elif listening.exception() is not None:
        run.crash = listening.exception()
    else:
        run.result = listening.result()
    await asyncio.sleep(10 * plan.jitter_s)  # timers of the same instant may ring a little apart
    for _ in range(10):
        await asyncio.sleep(0)
    run.left_behind = [_name(task) for task in _others()]
    run.deaf = [v for v in run.stage.visits if v.ended is None and v.asked_to_end is not None]
    made_late = {v.who for v in run.stage.visits if v.what == "create" and v.asked_to_end is not None}
    run.late = [v for v in run.stage.visits if v.ended is None and v.what == "release" and v.who in made_late]
    run.newly_abandoned = sum(abandoned_counts().values()) - abandoned_before
    run.before_curtain = {episode: _told(request) for episode, request in run.requests.items()}
    for name, gate in run.gates.items():
        _check_gate(run.stage, name, gate)
    await _let_the_curtain_fall(run)
    run.after_curtain = {episode: _told(request) for episode, request in run.requests.items()}
    return run


def _others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


def _name(task: asyncio.Task[Any]) -> str:
    """The innermost coroutine that a task waits in."""
    coroutine: Any = task.get_coro()
    names = []
    while hasattr(coroutine, "cr_await"):
        names.append(coroutine.__qualname__)
        coroutine = coroutine.cr_await
    return " > ".join(names)


async def _disturb(run: Play, listening: asyncio.Task[Any]) -> None:
    """Cancel from outside, as the plan has it."""
    for cancel in run.plan.cancels:
        if cancel.seconds is None:
            reached = asyncio.create_task(run.stage.until(len(run.stage.events) + cancel.events))
            await asyncio.wait({listening, reached}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
        elif cancel.seconds:
            await asyncio.wait({listening}, timeout=cancel.seconds)
        for _ in range(cancel.rounds):
            await asyncio.sleep(0)
        if listening.done():
            return
        run.stage.note("somebody", "cancels everything")
        listening.cancel()
        if run.cancelled_at is None:
            run.cancelled_at = run.stage.now


async def _let_the_curtain_fall(run: Play) -> None:
    """Those who were left behind come back now: nothing may change any more."""
    run.stage.curtain.set()
    until = run.stage.now + 1000
    while (others := _others()) and run.stage.now < until:
        await asyncio.wait(others, timeout=100)
    run.stragglers = [_name(task) for task in _others()]
    for task in _others():
        task.cancel()


def _told(request: AsyncRolloutRequest) -> Any:
    """All that a request says of itself: a worker's caller holds the very same lists."""
    steps = [s.model_dump(mode="json") for s in request.steps]
    messages = [m.to_openai() for m in request.messages]
    said = (request.state, request.stop_reason, request.fault, request.infrastructure_fault)
    return said, steps, messages, request.usage, dict(request.tool_rewards)


def _check_gate(stage: Stage, name: str, gate: Gate) -> None:
    for semaphore in gate._by_loop.values():
        if gate.limit is not None and semaphore._value != gate.limit:
            stage.broken(f"{name}: {semaphore._value} of {gate.limit} places are free after all is over")


async def _listen(run: Play, scheduler: RolloutScheduler, decisions: list[RouteDecision]) -> list[Rollout]:
    if run.plan.listens == "roll_out":
        return await scheduler.roll_out(decisions, on_done=run.done.append)
    found: list[Rollout] = []
    stop_after = 1 if run.plan.listens == "stops early" else len(decisions) + 1
    groups = cast("AsyncIterator[list[Rollout]]", scheduler.groups(decisions, on_done=run.done.append))
    async with aclosing(groups) as listened:  # type: ignore[type-var]
        async for group in listened:
            run.stage.note("listener", f"got {[(r.batch_data_id, r.rollout_offset) for r in group]}")
            run.groups.append(group)
            found += group
            if len(run.groups) >= stop_after:
                run.stopped_at = run.stage.now
                break
    return found


def _decisions(plan: Plan) -> list[RouteDecision]:
    tasks = [
        Task(
            task_id=f"t{place}",
            prompt=[Message(role="user", content=f"task {place}")],
            prompt_ids=[1, 2, 3] if plan.prompt_ids else None,
            termination_regex=r"FINAL: \d",
        )
        for place in range(len(plan.sizes))
    ]
    return [
        RouteDecision(task, f"g{place}", n, place, task.prompt)
        for place, (task, n) in enumerate(zip(tasks, plan.sizes, strict=True))
    ]


def _scheduler(run: Play) -> RolloutScheduler:
    plan, stage = run.plan, run.stage
    running = Gauge(stage, "max_concurrent", plan.max_concurrent)
    model, env = Gauge(stage, "model", plan.model_limit), Gauge(stage, "env", plan.env_limit)
    by_tool = {name: Gauge(stage, name, plan.tool_limit) for name in plan.tools}
    run.gates = {"model": Gate(plan.model_limit), "env": Gate(plan.env_limit)}
    tool_gates = {name: Gate(plan.tool_limit) for name in plan.tools if plan.tool_limit is not None}
    limits = Limits(run.gates["model"], run.gates["env"], tool_gates)
    run.gates |= tool_gates
    episodes = {place * 4099 + offset: (place, offset) for place, offset in plan.episodes}
    names = () if plan.kind == "text" else plan.tools
    policy = SessionPolicy(stage, names, model, episodes) if plan.sessions else PlainPolicy(stage, names, model)
    shared = {name: SimTool(stage, name, [by_tool[name]]) for name in plan.tools}
    if plan.kind == "shared tools":
        run.tools = list(shared.values())
    coming = iter(plan.episodes)

    def make_env(decision: RouteDecision) -> BaseEnv:
        episode = next(coming)
        if plan.kind == "text":
            world = run.worlds[episode] = TextWorld(stage, episode, env)
            return world
        tools = {name: SimTool(stage, name, [by_tool[name], env], episode) for name in plan.tools}
        run.tools.extend(tools.values())
        tool_env = WatchedToolEnv(decision.task, tools, tool_timeout_s=plan.tool_timeout_s, gates=limits.tools)
        tool_env.begin(stage, episode)
        run.worlds[episode] = tool_env
        if plan.kind == "user":
            user = SimUser(stage, episode)
            return InteractiveEnv(tool_env, user, decision.task, timeout_s=plan.tool_timeout_s, max_user_turns=3)
        return tool_env

    def on_state(request: AsyncRolloutRequest) -> None:
        episode = (request.batch_data_id, request.rollout_offset)
        stage.note(f"episode {episode}", request.state)
        run.requests[episode] = request
        states = run.states.setdefault(episode, [])
        states.append((stage.now, str(request.state)))
        if len(states) == 1 and request.state == "running":
            running.enter(episode)
        if request.state in ("completed", "failed") and episode in running.inside:
            running.leave(episode)

    return RolloutScheduler(
        policy,
        shared if plan.kind == "shared tools" else {},
        max_episode_steps=plan.max_steps,
        max_concurrent=plan.max_concurrent,
        deadline_s=plan.deadline_s,
        tool_timeout_s=plan.tool_timeout_s,
        limits=limits,
        make_env=None if plan.kind == "shared tools" else make_env,
        lock_step=plan.lock_step,
        on_state=on_state,
    )
