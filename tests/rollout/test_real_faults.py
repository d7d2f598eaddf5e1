"""A few real faults in real time, besides the simulation: each ends only its own call or episode."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from process_state import is_running

from toolwise.concurrency import deadlines
from toolwise.config.imports import load_reference
from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.routers import DirectRouter
from toolwise.tools import BaseTool, isolation, tool
from toolwise.types import Rollout, StopReason, Task

T = TypeVar("T")
FILE = Path(__file__).with_name("faulty_tools.py")
OTHERS = 7


@pytest.fixture(autouse=True, scope="module")
def _none_is_left() -> Iterator[None]:
    yield
    isolation.close()


def load(*names: str) -> dict[str, BaseTool]:
    return {name: load_reference(f"{FILE}:{name}", what="tool") for name in names}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(bad: str) -> ScriptedPolicy:
    """Task 0 makes the bad call, all others sleep; then they answer."""

    def speak(messages: Sequence[Message]) -> str:
        if messages[-1].role == "tool":
            return f"it said {messages[-1].content}"
        return bad if messages[0].content == "0" else call("nap", seconds=0.05)

    return ScriptedPolicy(speak)


def roll_out(scheduler: RolloutScheduler, *beside: Coroutine[Any, Any, None]) -> tuple[Rollout, list[Rollout], float]:
    """The faulty rollout, the others, and the total seconds."""
    tasks = [Task(task_id=f"t{i}", prompt=[Message(role="user", content=str(i))]) for i in range(1 + OTHERS)]

    async def whole() -> list[Rollout]:
        rollouts, *_ = await asyncio.gather(scheduler.roll_out(DirectRouter(0).decide(tasks, 1, 0)), *beside)
        return rollouts

    began = time.monotonic()
    first, *others = deadlines.run(whole())
    return first, others, time.monotonic() - began


def assert_unaffected(others: Sequence[Rollout]) -> None:
    assert len(others) == OTHERS
    for rollout in others:
        assert rollout.stop_reason is StopReason.ANSWERED
        assert rollout.messages[-1].content == "it said rested"
        assert rollout.usage.failed_calls == {}
        assert rollout.trainable


def is_gone(pid: int, limit_s: float = 20.0) -> bool:
    """Whether the process ends, or becomes a zombie, within the time limit."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if not is_running(pid):
            return True
        time.sleep(0.01)
    return False


def test_a_tool_that_sleeps_in_c_is_killed_at_its_deadline(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    policy = script(call("sleep_in_c", note=str(note)))
    scheduler = RolloutScheduler(policy, load("sleep_in_c", "nap"), tool_timeout_s=4.0)
    first, others, took_s = roll_out(scheduler)
    assert first.messages[-1].content == "it said error: sleep_in_c took longer than 4 s"
    assert first.usage.failed_calls == {"timeout": 1}
    assert first.stop_reason is StopReason.ANSWERED
    assert is_gone(int(note.read_text()))
    assert_unaffected(others)
    assert took_s < 20


@pytest.mark.long
def test_a_tool_that_sleeps_in_c_is_killed_at_the_deadline_of_its_episode(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    policy = script(call("sleep_in_c", note=str(note)))
    scheduler = RolloutScheduler(policy, load("sleep_in_c", "nap"), tool_timeout_s=60.0, deadline_s=5.0)
    first, others, took_s = roll_out(scheduler)
    assert first.stop_reason is StopReason.DEADLINE
    assert is_gone(int(note.read_text()))
    assert_unaffected(others)
    assert took_s < 20


def test_a_tool_that_swallows_its_cancellation_is_left_behind_and_counted() -> None:
    @tool
    async def cling() -> str:
        """Does not let go."""
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    policy = script(call("cling"))
    scheduler = RolloutScheduler(policy, {"cling": cling, **load("nap")}, tool_timeout_s=4.0)
    before = sum(deadlines.abandoned_counts().values())
    first, others, took_s = roll_out(scheduler)
    assert first.messages[-1].content == "it said error: cling took longer than 4 s"
    assert sum(deadlines.abandoned_counts().values()) > before
    assert_unaffected(others)
    assert took_s < 20


def test_a_worker_process_that_dies_is_nobodys_fault_but_the_infrastructures() -> None:
    first, others, took_s = roll_out(RolloutScheduler(script(call("drop_dead")), load("drop_dead", "nap")))
    assert first.stop_reason is StopReason.ANSWERED
    assert first.infrastructure_fault
    assert not first.trainable
    assert "SIGKILL" in (first.messages[2].content or "")
    assert first.usage.failed_calls == {"died": 1}
    assert_unaffected(others)
    assert took_s < 20


def test_a_worker_process_that_somebody_kills_in_the_middle_of_a_call(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def kill() -> None:
        while not (note.exists() and note.read_text()):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.01)
        os.kill(int(note.read_text()), signal.SIGKILL)

    policy = script(call("wait_to_be_killed", note=str(note)))
    scheduler = RolloutScheduler(policy, load("wait_to_be_killed", "nap"), tool_timeout_s=60.0)
    first, others, took_s = roll_out(scheduler, kill())
    assert first.infrastructure_fault
    assert first.usage.failed_calls == {"died": 1}
    assert_unaffected(others)
    assert took_s < 20


def test_cancelling_everything_kills_what_sleeps_in_c(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    async def cancel() -> None:
        scheduler = RolloutScheduler(script(call("sleep_in_c", note=str(note))), load("sleep_in_c", "nap"))
        task = Task(task_id="t", prompt=[Message(role="user", content="0")])
        everything = asyncio.create_task(scheduler.roll_out(DirectRouter(0).decide([task], 1, 0)))
        while not (note.exists() and note.read_text()):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.01)
        everything.cancel()
        with pytest.raises(asyncio.CancelledError):
            await everything

    began = time.monotonic()
    deadlines.run(cancel())
    assert is_gone(int(note.read_text()))
    assert time.monotonic() - began < 20
