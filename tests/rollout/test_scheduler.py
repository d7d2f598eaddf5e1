"""Many episodes at once: in order, within limits, and with every tool released whatever happens."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any, TypeVar

import pytest
import torch

from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.protocols import Sampling
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.routers import DirectRouter
from toolwise.tools import BaseTool, build_tools
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.types import Rollout, RouteDecision, StopReason, Task

torch.set_num_threads(1)
T = TypeVar("T")
both_ways = pytest.mark.parametrize("lock_step", [False, True], ids=["free", "in step"])


class Ledger(BaseTool):
    """Counts the calls on each instance; `naps` maps a method to the seconds it sleeps."""

    def __init__(self, name: str = "ledger", **naps: float) -> None:
        schema = FunctionSchema(name=name, parameters={"type": "object", "properties": {"x": {}}})
        super().__init__({}, OpenAIFunctionToolSchema(function=schema))
        self.naps = naps
        self.done: Counter[tuple[str, str]] = Counter()
        self.reached = asyncio.Event()
        self.most_at_once = 0

    async def _do(self, verb: str, instance: str) -> None:
        self.done[verb, instance] += 1
        if verb in self.naps:
            self.reached.set()
            await asyncio.sleep(self.naps[verb])

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance = await super().create(instance_id, **kwargs)
        await self._do("create", instance)
        self.done["created", instance] += 1
        alive = self.count("created") - self.count("release")
        self.most_at_once = max(self.most_at_once, alive)
        return instance

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        await self._do("execute", instance_id)
        await asyncio.sleep(parameters.get("x", 0.0))
        return "noted", None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        await self._do("calc_reward", instance_id)
        return 1.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("release", instance_id)

    def count(self, verb: str) -> int:
        return sum(n for (what, _), n in self.done.items() if what == verb)

    def assert_balanced(self) -> None:
        """Every instance was asked for its reward and released exactly once."""
        made = {instance for verb, instance in self.done if verb == "created"}
        for instance in made:
            assert self.done["calc_reward", instance] == 1
            assert self.done["release", instance] == 1
        assert self.count("release") == self.count("calc_reward") == len(made)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def decisions(n_tasks: int, n: int, **more: Any) -> list[RouteDecision]:
    tasks = [Task(task_id=f"t{i}", prompt=[Message(role="user", content=str(i))], **more) for i in range(n_tasks)]
    return DirectRouter(1).decide(tasks, n, 0)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(limited())


def ledger_then_answer(messages: Sequence[Message]) -> str:
    """Later tasks are faster."""
    if messages[-1].role == "tool":
        return f"done {messages[0].content}"
    return call("ledger", x=max(0.0, 0.05 - 0.01 * int(messages[0].content or 0)))


@both_ways
def test_results_come_in_the_order_of_prompts_and_offsets(lock_step: bool) -> None:
    tool = Ledger()
    finished: list[Rollout] = []
    scheduler = RolloutScheduler(ScriptedPolicy(ledger_then_answer), {"ledger": tool}, lock_step=lock_step)
    rollouts = run(scheduler.roll_out(decisions(5, 3), on_done=finished.append))
    assert [(r.batch_data_id, r.rollout_offset) for r in rollouts] == [(i, j) for i in range(5) for j in range(3)]
    assert [r.messages[-1].content for r in rollouts] == [f"done {i}" for i in range(5) for _ in range(3)]
    assert [r.task.task_id for r in rollouts] == [f"t{i}" for i in range(5) for _ in range(3)]
    assert len({r.rollout_id for r in rollouts}) == 15
    assert len({r.group_id for r in rollouts}) == 5
    assert {r.stop_reason for r in rollouts} == {StopReason.ANSWERED}
    assert all(r.tool_rewards == {"ledger": 1.0} for r in rollouts)
    assert sorted(r.rollout_id for r in finished) == sorted(r.rollout_id for r in rollouts)
    tool.assert_balanced()
    assert tool.count("created") == 15


def test_free_running_episodes_do_not_wait_for_each_other() -> None:
    finished: list[int] = []
    scheduler = RolloutScheduler(ScriptedPolicy(ledger_then_answer), {"ledger": Ledger()})
    run(scheduler.roll_out(decisions(5, 1), on_done=lambda r: finished.append(r.batch_data_id)))
    assert finished[-1] == 0


def test_a_tenth_of_a_second_in_many_rollouts_is_a_tenth_of_a_second() -> None:
    scheduler = RolloutScheduler(ScriptedPolicy([call("ledger", x=0.1), "done"]), {"ledger": Ledger()})
    began = time.monotonic()
    assert len(run(scheduler.roll_out(decisions(32, 8)))) == 256
    assert time.monotonic() - began < 8


@both_ways
def test_no_decisions_no_rollouts(lock_step: bool) -> None:
    assert run(RolloutScheduler(ScriptedPolicy([]), {}, lock_step=lock_step).roll_out([])) == []


@both_ways
def test_no_more_run_at_once_than_allowed(lock_step: bool) -> None:
    tool = Ledger()
    policy = ScriptedPolicy([call("ledger", x=0.01), "done"])
    scheduler = RolloutScheduler(policy, {"ledger": tool}, max_concurrent=4, lock_step=lock_step)
    assert len(run(scheduler.roll_out(decisions(5, 2)))) == 10
    assert tool.most_at_once == 4
    tool.assert_balanced()


@both_ways
def test_the_deadline_holds_and_the_others_go_on(lock_step: bool) -> None:
    def slow_for_one(messages: Sequence[Message]) -> str:
        if messages[-1].role == "tool":
            return "done"
        return call("ledger", x=60.0 if messages[0].content == "1" else 0.0)

    tool = Ledger()
    scheduler = RolloutScheduler(
        ScriptedPolicy(slow_for_one), {"ledger": tool}, deadline_s=0.3, lock_step=lock_step, tool_timeout_s=30
    )
    began = time.monotonic()
    rollouts = run(scheduler.roll_out(decisions(3, 2)))
    assert time.monotonic() - began < 10
    late = [r for r in rollouts if r.batch_data_id == 1]
    assert {r.stop_reason for r in late} == {StopReason.DEADLINE}
    assert all(r.fault == "the episode took longer than 0.3 s" for r in late)
    if not lock_step:  # in lock step the others are held up beyond their own deadlines
        assert {r.stop_reason for r in rollouts if r.batch_data_id != 1} == {StopReason.ANSWERED}
    tool.assert_balanced()


@both_ways
def test_a_slow_tool_is_ended_and_the_episode_goes_on(lock_step: bool) -> None:
    tool = Ledger()
    policy = ScriptedPolicy([call("ledger", x=60.0), "never mind"])
    scheduler = RolloutScheduler(policy, {"ledger": tool}, tool_timeout_s=0.05, lock_step=lock_step)
    (rollout,) = run(scheduler.roll_out(decisions(1, 1)))
    assert rollout.stop_reason is StopReason.ANSWERED
    assert rollout.messages[2].content == "error: ledger took longer than 0.05 s"
    assert rollout.usage.failed_calls == {"timeout": 1}
    tool.assert_balanced()


@both_ways
@pytest.mark.parametrize("verb", ["create", "execute", "calc_reward", "release"])
def test_a_tool_that_fails_anywhere_leaves_the_others_balanced(verb: str, lock_step: bool) -> None:
    class Failing(Ledger):
        async def _do(self, what: str, instance: str) -> None:
            await super()._do(what, instance)
            if what == verb:
                raise OSError("broken")

    good, bad = Ledger("good"), Failing("bad")
    policy = ScriptedPolicy([call("bad") + call("good"), "done"])
    scheduler = RolloutScheduler(policy, {"good": good, "bad": bad}, lock_step=lock_step)
    rollouts = run(scheduler.roll_out(decisions(2, 2)))
    expected = {
        "create": StopReason.ENV_FAULT,
        "execute": StopReason.ANSWERED,
        "calc_reward": StopReason.ENV_FAULT,
        "release": StopReason.ANSWERED,
    }
    assert {r.stop_reason for r in rollouts} == {expected[verb]}
    good.assert_balanced()
    bad.assert_balanced()
    assert good.count("created") == 4


@both_ways
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("verb", ["create", "execute", "calc_reward", "release"])
def test_when_all_is_cancelled_every_tool_is_still_given_back(verb: str, times: int, lock_step: bool) -> None:
    async def cancel() -> tuple[Ledger, Ledger]:
        first, tool = Ledger("first"), Ledger("ledger", **{verb: 0.1})
        policy = ScriptedPolicy([call("ledger"), "done"])
        scheduler = RolloutScheduler(policy, {"first": first, "ledger": tool}, max_concurrent=6, lock_step=lock_step)
        everything = asyncio.create_task(scheduler.roll_out(decisions(4, 2)))
        await tool.reached.wait()
        await asyncio.sleep(0.01)
        for _ in range(times):
            everything.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await everything
        alone = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        assert len(alone) <= 1  # the test's own task; no rollout is still running
        return first, tool

    first, tool = run(cancel())
    first.assert_balanced()
    tool.assert_balanced()
    assert first.count("created") == 6


@both_ways
def test_a_callback_that_fails_ends_everything_in_good_order(lock_step: bool) -> None:
    async def fail() -> Ledger:
        tool = Ledger()

        def on_done(rollout: Rollout) -> None:
            raise OSError("disk full")

        scheduler = RolloutScheduler(ScriptedPolicy(ledger_then_answer), {"ledger": tool}, lock_step=lock_step)
        with pytest.raises(OSError, match="disk full"):
            await scheduler.roll_out(decisions(5, 2), on_done=on_done)
        tool.assert_balanced()
        return tool

    assert run(fail()).count("created") == 10


@both_ways
def test_a_broken_policy_breaks_its_own_episodes_only(lock_step: bool) -> None:
    def sometimes(messages: Sequence[Message]) -> str:
        if messages[0].content == "1":
            raise OSError("server down")
        return "fine"

    tool = Ledger()
    scheduler = RolloutScheduler(ScriptedPolicy(sometimes), {"ledger": tool}, lock_step=lock_step)
    rollouts = run(scheduler.roll_out(decisions(3, 1)))
    assert [r.stop_reason for r in rollouts] == [StopReason.ANSWERED, StopReason.POLICY_FAULT, StopReason.ANSWERED]
    assert rollouts[1].fault == "OSError: server down"
    tool.assert_balanced()


def test_a_route_may_offer_fewer_tools_and_another_prompt() -> None:
    tools = {name: Ledger(name) for name in ("a", "b")}
    task = Task(task_id="t", prompt=[Message(role="user", content="q")], tools=["a", "b"])
    routed = [Message(role="system", content="Search."), *task.prompt]
    decision = RouteDecision(task, "g", 1, 0, routed, tools=("b",), route="SEARCH")
    (rollout,) = run(RolloutScheduler(ScriptedPolicy(["ok"]), tools).roll_out([decision]))
    assert rollout.route == "SEARCH"
    assert [m.content for m in rollout.messages] == ["Search.", "q", "ok"]
    assert (tools["a"].count("created"), tools["b"].count("created")) == (0, 1)


def test_the_tasks_arguments_reach_the_tools() -> None:
    tools = build_tools(["calc_gsm8k_reward"])
    task = Task(
        task_id="t",
        prompt=[Message(role="user", content="q")],
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "8"}}},
    )
    policy = ScriptedPolicy([call("calc_gsm8k_reward", answer="8"), "8"])
    (rollout,) = run(RolloutScheduler(policy, tools).roll_out(DirectRouter(0).decide([task], 1, 0)))
    assert rollout.tool_rewards == {"calc_gsm8k_reward": 1.0}


def test_finished_rollouts_share_their_histories() -> None:
    scheduler = RolloutScheduler(ScriptedPolicy([call("ledger")] * 4 + ["done"]), {"ledger": Ledger()})
    (rollout,) = run(scheduler.roll_out(decisions(1, 1)))
    shared = {
        id(history._items) for s in rollout.steps for history in (s.observation_data, s.resulting_messages_history)
    }
    assert len(shared) == 1
    assert list(rollout.steps[-1].resulting_messages_history) == list(rollout.messages)


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


def told(rollout: Rollout) -> Any:
    tokens = [
        (list(s.policy_logprobs["prompt_ids"]), list(s.policy_logprobs["token_ids"]))
        for s in rollout.steps
        if s.policy_logprobs
    ]
    return rollout.rollout_id, [m.to_openai() for m in rollout.messages], rollout.stop_reason, tokens


def real_rollouts(*, lock_step: bool, temperature: float = 1.0) -> list[Rollout]:
    model, chat = loaded()
    # A `deterministic` run sets both: otherwise the batches depend on timing.
    policy = LocalPolicy(model, chat, Sampling(max_new_tokens=24, temperature=temperature), deterministic=lock_step)
    scheduler = RolloutScheduler(policy, build_tools(["calculator"]), max_episode_steps=3, lock_step=lock_step)
    tasks = [Task(task_id=f"t{i}", prompt=[Message(role="user", content=f"What is {i} + 17?")]) for i in range(4)]
    return run(scheduler.roll_out(DirectRouter(3).decide(tasks, 3, 0)))


def test_a_real_model_gives_the_same_rollouts_free_and_in_step() -> None:
    free, in_step = real_rollouts(lock_step=False), real_rollouts(lock_step=True)
    assert [told(r) for r in free] == [told(r) for r in in_step]


def test_in_step_the_same_run_again_is_the_same_to_the_bit() -> None:
    def bits(rollouts: Sequence[Rollout]) -> list[Any]:
        return [list(s.policy_logprobs["logprobs"]) for r in rollouts for s in r.steps if s.policy_logprobs]

    first, second = real_rollouts(lock_step=True, temperature=2.0), real_rollouts(lock_step=True, temperature=2.0)
    assert [told(r) for r in first] == [told(r) for r in second]
    assert bits(first) == bits(second)


def test_rollouts_of_a_group_differ_and_every_step_extends_the_last() -> None:
    rollouts = real_rollouts(lock_step=False, temperature=2.0)
    firsts = [tuple(r.steps[0].policy_logprobs["token_ids"]) for r in rollouts[:3] if r.steps[0].policy_logprobs]
    assert len(set(firsts)) == 3
    for rollout in rollouts:
        held: list[int] = []
        for step in rollout.steps:
            assert step.policy_logprobs is not None
            prompt = list(step.policy_logprobs["prompt_ids"])
            assert prompt[: len(held)] == held
            held = prompt + list(step.policy_logprobs["token_ids"])
        assert rollout.usage.sampled_tokens == sum(
            len(s.policy_logprobs["token_ids"]) for s in rollout.steps if s.policy_logprobs
        )
