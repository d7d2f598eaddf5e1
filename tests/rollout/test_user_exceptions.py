"""Whatever user code raises or does to the event loop only affects its own rollout."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import uuid4

import pytest

from toolwise.concurrency import deadlines
from toolwise.envs.base import BaseEnv
from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.routers import DirectRouter
from toolwise.tools import BaseTool, tool
from toolwise.tools.base import OpenAIFunctionToolSchema
from toolwise.types import Rollout, RouteDecision, StopReason, Task

OTHERS = 3
BAD = "bad"


@pytest.fixture(scope="module", autouse=True)
def _collect_what_is_left() -> Iterator[None]:
    """asyncio logs the errors of tasks that nobody awaits when they are collected: here, not in a later test."""
    yield
    gc.collect()


class Panic(BaseException):
    """Stands for the panic of a Rust extension."""


class Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise GeneratorExit


class NameThatRaises(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit(1)


class Nameless(Exception, metaclass=NameThatRaises):  # noqa: N818
    """An exception whose str() fails."""


async def in_a_task() -> None:
    raise KeyboardInterrupt


def leave_a_task_that_raises() -> None:
    asyncio.get_running_loop().create_task(in_a_task())
    raise ValueError("and a task is left")


def cancel_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    raise ValueError("all are cancelled")


def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def stop_loop() -> None:
    asyncio.get_event_loop().stop()


def close_loop() -> None:
    asyncio.get_event_loop().close()


def raising(fault: Callable[[], BaseException]) -> Callable[[], None]:
    def do() -> None:
        raise fault()

    do.__name__ = getattr(fault, "__name__", "fault")
    return do


RAISED: list[Callable[[], None]] = [
    raising(GeneratorExit),
    raising(KeyboardInterrupt),
    raising(lambda: SystemExit(0)),
    raising(asyncio.CancelledError),
    raising(StopIteration),
    raising(StopAsyncIteration),
    raising(Panic),
    raising(Mute),
    raising(lambda: Nameless()),
    raising(MemoryError),
    raising(lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError()])),
    leave_a_task_that_raises,
    cancel_all_tasks,
    stop_loop,
    close_loop,
]


class Bad(BaseTool):
    """A tool that runs `do` at one point of its life cycle, for the bad task's episode only."""

    def __init__(self, where: str, do: Callable[[], None]) -> None:
        self.where, self.do = where, do
        self.released: list[str] = []
        super().__init__(
            {},
            OpenAIFunctionToolSchema.model_validate(
                {
                    "type": "function",
                    "function": {
                        "name": "look",
                        "description": "looks",
                        "parameters": {"type": "object", "properties": {"who": {"type": "string"}}},
                    },
                }
            ),
        )

    def at(self, where: str, kwargs: dict[str, Any]) -> None:
        if where == self.where and kwargs.get("who") == BAD:
            self.do()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.at("create", kwargs)
        return instance_id or uuid4().hex

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.at("execute", parameters)

        async def work() -> tuple[str, float | None, dict[str, Any]]:
            await asyncio.sleep(0.01)
            self.at("await", parameters)
            await asyncio.sleep(0.01)
            return "seen", None, {}

        return work()

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        self.at("calc_reward", kwargs)
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released.append(instance_id)
        self.at("release", kwargs)


def tasks(*, plain: bool = False) -> list[Task]:
    every = {f"{verb}_kwargs": {"who": BAD} for verb in ("create", "calc_reward", "release")}
    kwargs: list[dict[str, Any]] = [{} if plain else {"look": every}, *({} for _ in range(OTHERS))]
    return [
        Task(
            task_id=f"t{i}",
            prompt=[Message(role="user", content=BAD if i == 0 else str(i))],
            tools_kwargs=given,
        )
        for i, given in enumerate(kwargs)
    ]


def speak(messages: Sequence[Message]) -> str:
    if messages[-1].role == "tool":
        return f"it said {messages[-1].content}"
    return f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'who': messages[0].content}})}</tool_call>"


def roll_out(scheduler: RolloutScheduler, *, plain: bool = False, **more: Any) -> tuple[Rollout, list[Rollout]]:
    async def whole() -> list[Rollout]:
        return await scheduler.roll_out(DirectRouter(0).decide(tasks(plain=plain), 1, 0), **more)

    began = time.monotonic()
    first, *others = deadlines.run(whole())
    assert time.monotonic() - began < 20
    assert [(o.trainable, o.messages[-1].content, o.fault) for o in others] == [(True, "it said seen", None)] * OTHERS
    assert {o.stop_reason for o in others} <= {StopReason.ANSWERED, StopReason.ENV_DONE}
    return first, others


@pytest.mark.parametrize("lock_step", [False, True])
@pytest.mark.parametrize("do", [*RAISED, cancel_itself], ids=lambda do: do.__name__)
@pytest.mark.parametrize("where", ["create", "execute", "await", "calc_reward", "release"])
def test_a_tool(where: str, do: Callable[[], None], *, lock_step: bool) -> None:
    bad = Bad(where, do)
    first, _ = roll_out(RolloutScheduler(ScriptedPolicy(speak), {"look": bad}, lock_step=lock_step))
    assert len(bad.released) == OTHERS + (where != "create" or do is cancel_itself)
    # code that no longer awaits anything is not stopped by its cancellation
    if do is cancel_itself and where != "await":
        assert first.stop_reason in (StopReason.ENV_FAULT, StopReason.ANSWERED)
    elif where in ("execute", "await"):
        assert first.stop_reason is StopReason.ANSWERED
        assert first.usage.failed_calls == {"exception": 1}
    elif where != "release":
        assert first.stop_reason is StopReason.ENV_FAULT
        assert first.fault
        assert not first.trainable
    else:
        assert first.stop_reason is StopReason.ANSWERED
        assert first.fault


@pytest.mark.parametrize("do", RAISED, ids=lambda do: do.__name__)
def test_an_async_function_tool(do: Callable[[], None]) -> None:
    @tool(isolate=False)
    async def look(who: str) -> str:
        """Looks."""
        await asyncio.sleep(0.01)
        if who == BAD:
            do()
        await asyncio.sleep(0.01)
        return "seen"

    first, _ = roll_out(RolloutScheduler(ScriptedPolicy(speak), {"look": look}), plain=True)
    assert first.usage.failed_calls == {"exception": 1}


@pytest.mark.parametrize("do", [do for do in RAISED if do.__name__ in ("GeneratorExit", "KeyboardInterrupt", "Panic")])
def test_a_function_tool_in_a_thread(do: Callable[[], None]) -> None:
    @tool(isolate=False)
    def look(who: str) -> str:
        """Looks."""
        if who == BAD:
            do()
        return "seen"

    first, _ = roll_out(RolloutScheduler(ScriptedPolicy(speak), {"look": look}), plain=True)
    assert first.usage.failed_calls == {"exception": 1}


class World(BaseEnv):
    """An environment of one step; `where` is the method that fails."""

    def __init__(self, where: str, do: Callable[[], None]) -> None:
        self.where, self.do = where, do
        self.closed = 0
        self.at("init")

    def at(self, where: str) -> None:
        if where == self.where:
            self.do()

    def set_seed(self, seed: int) -> None:
        self.at("set_seed")

    async def reset(self) -> str:
        self.at("reset")
        await asyncio.sleep(0.01)
        return ""

    def tool_specs(self) -> None:
        self.at("tool_specs")

    @property
    def state_key(self) -> str | None:
        self.at("state_key")
        return None

    def phase_of(self, action: Any) -> Any:
        self.at("phase_of")
        return "tool"

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        await asyncio.sleep(0.01)
        self.at("step")
        return [Message(role="user", content="it said seen")], None, True, {}

    async def final_rewards(self) -> dict[str, float]:
        self.at("final_rewards")
        return {}

    async def close(self) -> None:
        self.closed += 1
        self.at("close")


WHERE = ["init", "set_seed", "reset", "tool_specs", "state_key", "phase_of", "step", "final_rewards", "close"]


@pytest.mark.parametrize("do", RAISED, ids=lambda do: do.__name__)
@pytest.mark.parametrize("where", WHERE)
def test_a_world(where: str, do: Callable[[], None]) -> None:
    worlds: list[World] = []

    def make(decision: RouteDecision) -> World:
        world = World(where if decision.task.task_id == "t0" else "", do)
        worlds.append(world)
        return world

    first, _ = roll_out(RolloutScheduler(ScriptedPolicy(lambda _: "on"), {}, make_env=make))
    assert [world.closed for world in worlds] == [1] * len(worlds)
    if where == "close":
        assert first.stop_reason is StopReason.ENV_DONE or first.fault
    else:
        assert first.stop_reason is StopReason.ENV_FAULT
    assert first.fault


class Thinker:
    def __init__(self, where: str, do: Callable[[], None]) -> None:
        self.where, self.do = where, do

    def session(self, **_: Any) -> Thinker:
        return self

    async def get_action(self, observation: Sequence[Message], specs: Any = None) -> Any:
        await asyncio.sleep(0.01)
        if observation[0].content == BAD:
            self.do()
        await asyncio.sleep(0.01)
        text = "it said seen"
        return {"type": "text", "content": text}, text, None, None


@pytest.mark.parametrize("do", [*RAISED, cancel_itself], ids=lambda do: do.__name__)
def test_a_policy(do: Callable[[], None]) -> None:
    first, _ = roll_out(RolloutScheduler(Thinker("get_action", do), {}))
    assert first.stop_reason in (StopReason.POLICY_FAULT, StopReason.ENV_FAULT)
    assert first.fault
    assert not first.trainable


@pytest.mark.parametrize("do", RAISED, ids=lambda do: do.__name__)
def test_whoever_watches(do: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    def told(what: Any) -> None:
        if what.task.task_id == "t0":
            do()

    bad = Bad("", do)
    first, _ = roll_out(RolloutScheduler(ScriptedPolicy(speak), {"look": bad}, on_state=told))
    assert first.stop_reason is StopReason.ANSWERED
    assert "on_state: " in caplog.text


@pytest.mark.parametrize("do", RAISED[:4], ids=lambda do: do.__name__)
def test_whoever_keeps_the_rollouts_ends_all_in_good_order(do: Callable[[], None]) -> None:
    bad = Bad("", do)
    with pytest.raises(RuntimeError, match=r"it (raised|called|cancelled)"):
        roll_out(RolloutScheduler(ScriptedPolicy(speak), {"look": bad}), on_done=lambda _: do())
    assert len(bad.released) == OTHERS + 1


@pytest.mark.parametrize("times", [1, 2])
def test_the_users_own_interrupt_ends_all(times: int) -> None:
    """asyncio cancels at the first interrupt, which all code obeys, and raises at the second."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    bad = Bad("await", lambda: [signal.raise_signal(signal.SIGINT) for _ in range(times)] and None)

    async def whole() -> None:
        await RolloutScheduler(ScriptedPolicy(speak), {"look": bad}).roll_out(DirectRouter(0).decide(tasks(), 1, 0))

    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            deadlines.run(whole())
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 10
    assert len(bad.released) == OTHERS + 1


def test_a_fault_in_a_thread_that_runs_a_loop_of_its_own() -> None:
    """As in a notebook, whose event loop runs in the main thread."""
    found: list[Rollout] = []
    thread = threading.Thread(
        target=lambda: found.append(
            roll_out(RolloutScheduler(ScriptedPolicy(speak), {"look": Bad("await", raising(KeyboardInterrupt))}))[0]
        )
    )
    thread.start()
    thread.join(30)
    assert found[0].usage.failed_calls == {"exception": 1}
