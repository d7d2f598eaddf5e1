"""Measured concurrency, in virtual time: the engine stays busy, the cache does not overflow, and everyone is let in."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.rollout.adaptive_gate import CACHE_SHARE, AdaptiveGate
from toolwise.testing.virtual_time import simulate
from toolwise.types import Rollout, StepData
from toolwise.types.tokens import SampledTokens


@dataclass
class World:
    """An engine of `slots` requests at a time, episodes of `turns` turns that wait `tool_s` after each, and a cache."""

    slots: int
    turns: int
    turn_s: float
    tool_s: float
    cache: int
    tokens: int
    episodes: int
    reads_idle: bool = False
    """Whether the gate is told in how much of the time the engine has nothing to do; else it is always busy."""
    again_s: float = 0.0
    """What computing an episode again takes, which is necessary while more tokens are in flight than fit."""
    generating_s: float = 0.0
    busy_s: float = 0.0
    in_cache: int = 0
    late_busy_s: float = 0.0
    """Slot-seconds in use, like the next two after half of the episodes and while others wait."""
    late_s: float = 0.0
    late_most: int = 0
    """The most tokens in the cache."""


def rollout(tokens: int) -> Rollout:
    step = StepData.unchecked(policy_logprobs=SampledTokens([1], [0.0], [1] * (tokens - 1)))
    return cast("Rollout", type("Ended", (), {"steps": (step,)})())


async def play(world: World, seed: int) -> AdaptiveGate:
    clock, chance = asyncio.get_running_loop(), random.Random(seed)
    gate = AdaptiveGate(
        slots=world.slots,
        cache_tokens=lambda: world.cache,
        generating_s=lambda: world.generating_s,
        busy_s=lambda: world.busy_s if world.reads_idle else clock.time(),
    )
    engine = asyncio.Semaphore(world.slots)
    ended, times = 0, list[float]()

    async def episode() -> None:
        nonlocal ended
        async with gate:
            world.in_cache += world.tokens
            if late():
                world.late_most = max(world.late_most, world.in_cache)
            for _ in range(world.turns):
                asked = clock.time()
                async with engine:
                    spent = chance.uniform(0.5, 1.5) * world.turn_s
                    spent += world.again_s * (world.in_cache > world.cache)
                    await asyncio.sleep(spent)
                    world.busy_s += spent  # of one slot
                    world.late_busy_s += spent * late()
                world.generating_s += clock.time() - asked
                await asyncio.sleep(chance.uniform(0, 2) * world.tool_s)
            world.in_cache -= world.tokens
        ended += 1
        gate.observe(rollout(world.tokens))
        if late():
            times.append(clock.time())

    def late() -> bool:
        return world.episodes // 2 <= ended and gate.waiting > 0

    async with asyncio.timeout(1e7):
        await asyncio.gather(*(episode() for _ in range(world.episodes)))
    world.late_s = times[-1] - times[0]
    assert ended == world.episodes
    assert gate.held == 0
    return gate


@settings(max_examples=15, deadline=None)
@given(
    slots=st.integers(2, 4),
    ratio=st.floats(0.0, 6.0),
    room=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_the_engine_stays_busy_as_far_as_the_cache_allows(slots: int, ratio: float, room: int, seed: int) -> None:
    """`ratio`: time with tools over time in the engine. `room`: episodes whose tokens fit into the cache."""
    world = World(slots, turns=3, turn_s=1.0, tool_s=ratio, cache=100 * room, tokens=100, episodes=120 * slots)
    gate = simulate(play(world, seed), seed=seed)
    holds = max(1, int(CACHE_SHARE * room))
    assert world.late_most <= 100 * max(holds, 1), "more than the cache holds"
    assert gate.limit is not None
    assert gate.limit <= max(holds, 1)
    used = world.late_busy_s / world.late_s / slots
    enough = slots * (1.0 + ratio)  # episodes that fill the engine on average
    possible = min(1.0, holds / enough)
    assert used > 0.75 * possible, f"busy for {used:.2f} of the time, {possible:.2f} were possible"


def test_with_fast_tools_no_more_run_than_the_engine_computes() -> None:
    world = World(4, turns=3, turn_s=1.0, tool_s=0.0, cache=10**6, tokens=100, episodes=300)
    gate = simulate(play(world, 0), seed=0)
    assert gate.limit is not None
    assert gate.limit <= 6
    assert gate.generating_share == pytest.approx(1.0, abs=0.1)


def test_with_slow_tools_more_run_in_proportion() -> None:
    world = World(4, turns=3, turn_s=1.0, tool_s=7.0, cache=10**6, tokens=100, episodes=1500)
    gate = simulate(play(world, 0), seed=0)
    assert gate.limit is not None
    assert 24 <= gate.limit <= 60
    assert 1 / 8 <= gate.metrics()["rollout/generating_share"] < 1 / 4  # with the time they wait for the engine


def test_while_the_engine_idles_more_run_than_the_cache_holds() -> None:
    """One request at a time, and tools that take twenty times as long: two episodes fit, which leaves it idle."""
    sizes: Any = {"slots": 1, "turns": 3, "turn_s": 1.0, "tool_s": 20.0, "cache": 250, "tokens": 100, "episodes": 600}
    bound, free = World(**sizes), World(**sizes, reads_idle=True, again_s=0.1)
    narrow, wide = simulate(play(bound, 0), seed=0), simulate(play(free, 0), seed=0)
    assert narrow.limit == 2
    assert wide.limit is not None
    assert wide.limit > 8
    assert free.late_busy_s / free.late_s > 4 * bound.late_busy_s / bound.late_s


def test_an_engine_that_computes_everything_again_gets_what_fits() -> None:
    """Where that takes ten times as long as the rest, it is never idle beyond the cache: the limit comes back."""
    limits: list[int] = []
    world = World(
        1, turns=3, turn_s=1.0, tool_s=3.0, cache=450, tokens=100, episodes=900, reads_idle=True, again_s=10.0
    )
    measure = AdaptiveGate._measure_idle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveGate, "_measure_idle", lambda gate: (measure(gate), limits.append(gate.limit or 0))[0])
        simulate(play(world, 0), seed=0)
    assert min(limits[len(limits) // 2 :]) <= 4
    assert max(limits) <= 8


def test_a_cancelled_episode_gives_its_place_back_whether_it_had_it_or_not() -> None:
    async def work() -> None:
        gate = AdaptiveGate(slots=1, cache_tokens=lambda: 100, generating_s=lambda: 0.0, busy_s=lambda: 0.0)

        async def hold(seconds: float) -> None:
            async with gate:
                await asyncio.sleep(seconds)

        first, second, third = (asyncio.ensure_future(hold(s)) for s in (10.0, 10.0, 1.0))
        await asyncio.sleep(1.0)
        second.cancel()  # waits
        await asyncio.sleep(0)
        first.cancel()  # holds; the third is let in
        await asyncio.sleep(0)
        await third
        assert gate.held == 0
        fourth, fifth = asyncio.ensure_future(hold(1.0)), asyncio.ensure_future(hold(1.0))
        await asyncio.sleep(0.5)
        gate.leave()  # as if the fourth had ended: the fifth is let in and cancelled before it knows
        fifth.cancel()
        await asyncio.wait({fourth, fifth})
        assert gate.held == -1

    simulate(work(), seed=0)


def test_one_who_is_cancelled_just_before_his_turn_ends_as_cancelled() -> None:
    async def work() -> None:
        gate = AdaptiveGate(slots=1, cache_tokens=lambda: 10**6, generating_s=lambda: 0.0, busy_s=lambda: 0.0)
        await gate.enter()
        waiting = asyncio.ensure_future(gate.enter())
        await asyncio.sleep(0)
        waiting.cancel()
        gate.leave()  # passes it over before it knows
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.wait_for(gate.enter(), 1.0)
        assert (gate.held, gate.waiting) == (1, 0)

    simulate(work(), seed=0)


def test_episodes_that_share_a_prompt_count_it_once() -> None:
    async def work() -> AdaptiveGate:
        gate = AdaptiveGate(slots=8, cache_tokens=lambda: 10**6, generating_s=lambda: 0.0, busy_s=lambda: 0.0, n=4)
        tokens: Any = SampledTokens([1] * 20, [0.0] * 20, [1] * 80)
        gate.observe(cast("Rollout", type("E", (), {"steps": (type("S", (), {"tokens": tokens})(),)})()))
        return gate

    assert simulate(work(), seed=0).tokens == 100 - 80 * 0.75


def test_between_batches_the_engine_does_not_idle() -> None:
    """It is busy while episodes run, and nothing runs for longer than that during each update."""

    async def training() -> AdaptiveGate:
        clock, busy_s = asyncio.get_running_loop(), 0.0
        gate = AdaptiveGate(slots=8, cache_tokens=lambda: 400, generating_s=lambda: 8 * busy_s, busy_s=lambda: busy_s)

        async def episode() -> None:
            await gate.enter()
            await asyncio.sleep(1.0)
            gate.observe(rollout(50))
            gate.leave()

        for _ in range(6):
            began = clock.time()
            batch = [asyncio.create_task(episode()) for _ in range(32)]
            while any(not task.done() for task in batch):
                await asyncio.sleep(0.5)
                busy_s += 0.5
            await asyncio.sleep(3 * (clock.time() - began))
        return gate

    gate = simulate(training())
    assert gate.limit is not None
    assert gate.limit <= CACHE_SHARE * 400 / 50
