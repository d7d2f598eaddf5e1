"""One episode: every ending is a typed outcome, and the environment is closed exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from toolwise.concurrency import deadlines
from toolwise.envs.base import BaseEnv
from toolwise.errors import ContextFullError
from toolwise.messages import Message, Prefix, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools import BaseTool, build_tools, tool
from toolwise.types import SampledTokens, StopReason, Task

T = TypeVar("T")
Answer = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def a_task(**more: Any) -> Task:
    return Task(task_id="t", prompt=[Message(role="user", content="6 * 7?")], ground_truth="42", **more)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(limited())


def play(worker: RLRolloutWorker) -> RLRolloutWorker:
    steps, messages, truth = run(worker.run_episode())
    assert steps is worker.steps
    assert messages is worker.messages
    assert truth == worker.task.ground_truth
    return worker


def scripted(lines: Sequence[str], steps: int = 10, **more: Any) -> RLRolloutWorker:
    more.setdefault("tools", build_tools(["calculator", add]))
    task = more.pop("task", None) or a_task()
    return play(RLRolloutWorker(task, ScriptedPolicy(lines), steps, **more))


@tool(price=0.5)
def add(a: int, b: int) -> tuple[str, float]:
    """Adds, and rewards whoever asks."""
    return str(a + b), 0.25


class World(BaseEnv):
    """A text environment that records the calls it gets; `behave` overrides its methods."""

    def __init__(self, **behave: Any) -> None:
        self.behave = behave
        self.log: list[Any] = []

    async def _do(self, what: str, otherwise: Any) -> Any:
        given = self.behave.get(what, otherwise)
        if isinstance(given, BaseException):
            raise given
        return await given() if callable(given) else given

    async def reset(self) -> Any:
        self.log.append("reset")
        return await self._do("reset", "You are in a hall.")

    async def step(self, action: Any) -> Any:
        self.log.append(action)
        return await self._do("step", ("You are in a hall still.", None, False, {}))

    async def final_rewards(self) -> dict[str, float]:
        self.log.append("final_rewards")
        rewards: dict[str, float] = await self._do("final_rewards", {})
        return rewards

    async def close(self) -> None:
        self.log.append("close")
        await self._do("close", None)

    @property
    def state_key(self) -> str | None:
        if isinstance(self.behave.get("state_key"), BaseException):
            raise self.behave["state_key"]
        return "hall"

    def tool_specs(self) -> list[dict[str, Any]] | None:
        if isinstance(self.behave.get("tool_specs"), BaseException):
            raise self.behave["tool_specs"]
        return None

    def assert_over(self) -> None:
        assert self.log.count("reset") == 1
        assert self.log[-2:] == ["final_rewards", "close"]
        assert self.log.count("final_rewards") == self.log.count("close") == 1


class StructuredWorld(World):
    structured_actions: ClassVar[bool] = True


class Giving:
    """A policy that raises, awaits or returns the given answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def get_action(self, observation: Sequence[Message], available_tools_specs: Any = None) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return await self.answer() if callable(self.answer) else self.answer


def text(content: Any) -> Answer:
    return {"type": "text", "content": content}, content, None, None


def test_a_plain_answer() -> None:
    worker = scripted(["It is 42."])
    assert worker.stop_reason is StopReason.ANSWERED
    assert worker.fault is None
    assert [(m.role, m.content) for m in worker.messages] == [("user", "6 * 7?"), ("assistant", "It is 42.")]
    (step,) = worker.steps
    assert step.action_taken == {"type": "text", "content": "It is 42."}
    assert step.raw_policy_output == "It is 42."
    assert step.is_done
    assert step.base_reward is None
    assert step.policy_logprobs is None


def test_calls_are_carried_out_and_their_results_read() -> None:
    worker = scripted([f"Let me see. {call('calculator', expression='6 * 7')}", "It is 42."])
    assert worker.stop_reason is StopReason.ANSWERED
    assert [(m.role, m.content) for m in worker.messages] == [
        ("user", "6 * 7?"),
        ("assistant", "Let me see."),
        ("tool", "42"),
        ("assistant", "It is 42."),
    ]
    assert [s.is_done for s in worker.steps] == [False, True]
    assert [s.system_step_index for s in worker.steps] == [0, 1]
    assert [s.step_info["assistant_turn_index"] for s in worker.steps] == [0, 1]
    assert worker.usage.calls == {"calculator": 1}


def test_each_step_saw_what_came_before_it_and_no_more() -> None:
    worker = scripted([call("add", a=1, b=2), call("add", a=3, b=4), "done"])
    assert [len(s.observation_data) for s in worker.steps] == [1, 3, 5]
    assert [len(s.resulting_messages_history) for s in worker.steps] == [3, 5, 6]
    for step in worker.steps:
        for history in (step.observation_data, step.resulting_messages_history):
            assert isinstance(history, Prefix)
            assert history._items is worker.messages


def test_what_a_tool_rewards_is_the_steps_reward() -> None:
    worker = scripted([call("add", a=1, b=2) * 2, call("calculator", expression="1"), "3"])
    assert [s.base_reward for s in worker.steps] == [0.5, None, None]
    assert worker.usage.cost == 1.0 + build_tools(["calculator"])["calculator"].price


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (call("abacus", beads=3), "unknown_tool", "no tool 'abacus'; tools: calculator, add"),
        ("<tool_call>{oops}</tool_call>", "bad_json", "not a JSON object"),
        (call("add", a=1), "bad_arguments", "b"),
        (call("add", a="one", b=2), "bad_arguments", "must be an integer"),
    ],
)
def test_a_bad_call_is_told_to_the_model_counted_and_survived(line: str, kind: str, words: str) -> None:
    worker = scripted([line, "Sorry: 42."])
    assert worker.stop_reason is StopReason.ANSWERED
    error = worker.messages[2]
    assert error.role == "tool"
    assert (error.content or "").startswith("error: ")
    assert words in (error.content or "")
    assert worker.usage.failed_calls == {kind: 1}
    assert sum(worker.usage.calls.values()) == 1
    assert worker.steps[0].step_info["is_action_valid"] is False


def test_a_tool_that_raises_is_told_to_the_model() -> None:
    @tool
    def broken(x: int) -> str:
        """Breaks."""
        raise OSError("disk full")

    worker = scripted([call("broken", x=1), "Sorry."], tools={"broken": broken})
    assert worker.messages[2].content == "error: broken failed: OSError: disk full"
    assert worker.usage.failed_calls == {"exception": 1}
    assert worker.stop_reason is StopReason.ANSWERED


def test_an_episode_has_at_most_so_many_steps() -> None:
    worker = scripted([call("add", a=1, b=2)] * 9, steps=3)
    assert worker.stop_reason is StopReason.MAX_STEPS
    assert len(worker.steps) == 3
    assert worker.messages[-1].role == "tool"
    assert [s.is_done for s in worker.steps] == [False, False, True]


def test_an_answer_in_the_last_step_is_an_answer() -> None:
    assert scripted([call("add", a=1, b=2), "3"], steps=2).stop_reason is StopReason.ANSWERED


def test_a_policy_may_terminate() -> None:
    world = World()
    worker = play(RLRolloutWorker(a_task(), Giving(({"type": "terminate"}, None, None, None)), env=world))
    assert worker.stop_reason is StopReason.TERMINATED
    assert world.log == ["reset", "final_rewards", "close"]
    assert len(worker.steps) == 1


def test_an_episode_ends_where_the_text_matches_before_anything_is_carried_out() -> None:
    task = a_task(termination_regex=r"FINAL:\s*\d+")
    worker = scripted(["so far FINAL", f"FINAL: 42 {call('add', a=1, b=2)}"], task=task, env=(world := World()))
    assert worker.stop_reason is StopReason.REGEX
    assert len(worker.steps) == 2
    assert world.log == ["reset", "so far FINAL", "final_rewards", "close"]


def test_invalid_actions_in_a_row_end_the_episode() -> None:
    worker = scripted([call("abacus")] * 9, max_invalid_in_a_row=3)
    assert worker.stop_reason is StopReason.REPEATED_INVALID
    assert len(worker.steps) == 3
    assert worker.usage.failed_calls == {"unknown_tool": 3}


def test_a_valid_action_in_between_begins_the_count_anew() -> None:
    bad, good = call("abacus"), call("add", a=1, b=2)
    worker = scripted([bad, bad, good, bad, bad, "done"], max_invalid_in_a_row=3)
    assert worker.stop_reason is StopReason.ANSWERED


def test_a_reply_cut_by_length_ends_the_episode_and_is_not_carried_out() -> None:
    logprobs = {"token_ids": [1, 2], "logprobs": [-1.0, -1.0], "prompt_ids": [3], "finish_reason": "length"}
    world = World()
    worker = play(RLRolloutWorker(a_task(), Giving((*text("so")[:2], logprobs, 0.5)), env=world))
    assert worker.stop_reason is StopReason.MAX_TOKENS
    assert world.log == ["reset", "final_rewards", "close"]
    assert worker.steps[0].policy_logprobs == SampledTokens.from_dict(logprobs)
    assert worker.steps[0].policy_value_estimate == 0.5
    assert (worker.usage.prompt_tokens, worker.usage.sampled_tokens) == (1, 2)


def test_a_call_cut_by_length_is_counted_and_paid_for() -> None:
    cut = ToolCall(id="call_0", name="", arguments='{"name": "add", "argu')
    logprobs = {"token_ids": [1], "logprobs": [-1.0], "prompt_ids": [3], "finish_reason": "length"}
    decided = ({"type": "tool_call", "name": "", "arguments": "", "tool_calls": [cut]}, "…", logprobs, None)
    worker = play(RLRolloutWorker(a_task(), Giving(decided), tools=build_tools(["calculator"])))
    assert worker.stop_reason is StopReason.MAX_TOKENS
    assert worker.usage.calls == {"unreadable": 1}
    assert worker.usage.failed_calls == {"bad_json": 1}
    assert worker.usage.cost == 1.0


@pytest.mark.parametrize("raw", ['so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> and', None])
def test_a_complete_call_in_a_reply_cut_by_length_stays_text(raw: str | None) -> None:
    made = ToolCall(id="call_0", name="add", arguments={"a": 1})
    logprobs = {"token_ids": [1], "logprobs": [-1.0], "prompt_ids": [3], "finish_reason": "length"}
    decided = ({"type": "tool_call", "content": "so and", "name": "add", "tool_calls": [made]}, raw, logprobs, None)
    worker = play(RLRolloutWorker(a_task(), Giving(decided), tools=build_tools(["calculator"])))
    assert worker.stop_reason is StopReason.MAX_TOKENS
    assert not worker.usage.calls
    assert worker.messages[-1].tool_calls is None
    assert "<tool_call>" in worker.messages[-1].content
    assert '"name": "add"' in worker.messages[-1].content
    assert worker.steps[-1].action_taken["tool_calls"] == [made]  # what the policy wrote


def test_a_prompt_that_does_not_fit_the_context_ends_the_episode_and_not_the_run() -> None:
    worker = play(RLRolloutWorker(a_task(), Giving(ContextFullError("too long")), env=(world := World())))
    assert worker.stop_reason is StopReason.PROMPT_TOO_LONG
    assert not worker.stop_reason.trainable
    assert worker.fault == "too long"
    world.assert_over()


def test_a_conversation_that_outgrows_the_context_ends_by_its_tokens_and_is_learned_from() -> None:
    answers = iter([text("look")])

    async def then_full() -> Answer:
        for answer in answers:
            return answer
        raise ContextFullError("full")

    worker = play(RLRolloutWorker(a_task(), Giving(then_full), env=World()))
    assert len(worker.steps) == 1
    assert worker.stop_reason is StopReason.MAX_TOKENS
    assert worker.stop_reason.trainable


def test_a_text_world_gets_the_text_and_answers_with_a_user_message() -> None:
    worker = scripted(["look", "go north"], steps=2, env=(world := World()))
    assert world.log == ["reset", "look", "go north", "final_rewards", "close"]
    assert [(m.role, m.content) for m in worker.messages[1:4]] == [
        ("user", "You are in a hall."),
        ("assistant", "look"),
        ("user", "You are in a hall still."),
    ]
    assert [s.step_info["state_key"] for s in worker.steps] == ["hall", "hall"]


def test_a_structured_world_gets_the_whole_action() -> None:
    world = StructuredWorld(step=("", 1, True, {}))
    worker = scripted([call("go", to="north")], env=world)
    assert world.log[1]["name"] == "go"
    assert worker.stop_reason is StopReason.ENV_DONE
    assert worker.steps[0].base_reward == 1.0


def test_a_world_may_answer_with_messages_of_its_own() -> None:
    said = [Message(role="tool", content="a"), {"role": "user", "content": "b"}]
    worker = scripted(["look"], env=World(step=(said, 0.0, True, {})))
    assert [m.content for m in worker.messages[-2:]] == ["a", "b"]
    assert all(isinstance(m, Message) for m in worker.messages)


def test_an_empty_observation_is_no_message() -> None:
    worker = scripted(["look"], env=World(reset="", step=("", 0.0, True, {})))
    assert [m.role for m in worker.messages] == ["user", "assistant"]
    assert worker.stop_reason is StopReason.ENV_DONE
    assert worker.steps[0].base_reward == 0.0


def test_a_world_that_cuts_short_is_told_apart_from_one_that_is_done() -> None:
    worker = scripted(["look"], env=World(step=("", None, True, {"truncated": True})))
    assert worker.stop_reason is StopReason.ENV_TRUNCATED


def test_what_a_world_says_cannot_displace_the_turns_number() -> None:
    info = {"assistant_turn_index": 99, "state_key": "lies", "more": 1}
    worker = scripted(["look"], env=World(step=("", None, True, info)))
    assert worker.steps[0].step_info == {"assistant_turn_index": 0, "state_key": "hall", "more": 1}


def test_last_rewards_are_kept() -> None:
    assert scripted(["look"], steps=1, env=World(final_rewards={"quest": 2.0})).tool_rewards == {"quest": 2.0}


BAD_WORLDS = {
    "reset raises": ({"reset": ValueError("no map")}, "reset: ValueError: no map", 0),
    "reset cancels itself": ({"reset": asyncio.CancelledError()}, "reset: RuntimeError: it cancelled itself", 0),
    "reset times out by itself": ({"reset": TimeoutError("far")}, "reset: TimeoutError: far", 0),
    "reset gives no messages": ({"reset": 7}, "reset: ValueError: expected a list of messages", 0),
    "tool_specs raises": ({"tool_specs": ValueError("no")}, "tool_specs, state_key: ValueError: no", 0),
    "state_key raises": ({"state_key": ValueError("no")}, "tool_specs, state_key: ValueError: no", 0),
    "step raises": ({"step": ValueError("fell off")}, "step: ValueError: fell off", 1),
    "step cancels itself": ({"step": asyncio.CancelledError()}, "step: RuntimeError: it cancelled itself", 1),
    "step gives no tuple": ({"step": "hm"}, "step: ValueError", 1),
    "step gives a nan": ({"step": ("", math.nan, False, {})}, "step: ValueError: the reward nan", 1),
    "final_rewards raises": ({"final_rewards": ValueError("lost")}, "calc_reward: ValueError: lost", 1),
    "final_rewards cancels itself": ({"final_rewards": asyncio.CancelledError()}, "calc_reward: RuntimeError", 1),
}


@pytest.mark.parametrize("which", BAD_WORLDS)
def test_a_broken_world_is_a_typed_outcome(which: str) -> None:
    behave, fault, steps = BAD_WORLDS[which]
    world = World(**behave)
    worker = scripted(["look"] * 2, steps=1, env=world)
    assert worker.stop_reason is StopReason.ENV_FAULT
    assert (worker.fault or "").startswith(fault)
    assert len(worker.steps) == steps
    assert all(s.is_done for s in worker.steps)
    world.assert_over()


@pytest.mark.parametrize("bad", [ValueError("stuck"), asyncio.CancelledError()])
def test_a_world_that_will_not_close_leaves_the_episode_whole(bad: BaseException) -> None:
    worker = scripted(["look"], steps=1, env=World(close=bad, final_rewards={"quest": 1.0}))
    assert worker.stop_reason is StopReason.MAX_STEPS
    assert worker.tool_rewards == {"quest": 1.0}
    assert (worker.fault or "").startswith("close: ")


def test_the_first_fault_is_the_one_that_is_told() -> None:
    world = World(reset=ValueError("no map"), final_rewards=ValueError("later"), close=ValueError("last"))
    assert scripted(["look"], env=world).fault == "reset: ValueError: no map"


BAD_ANSWERS = {
    "raises": (ValueError("no idea"), "ValueError: no idea"),
    "cancels itself": (asyncio.CancelledError(), "RuntimeError: it cancelled itself"),
    "times out by itself": (TimeoutError("server"), "TimeoutError: server"),
    "nothing": (None, "TypeError"),
    "three things": (text("x")[:3], "ValueError"),
    "no type": (({"content": "x"}, "x", None, None), "KeyError: 'type'"),
    "another type": (({"type": "dance"}, "x", None, None), "ValueError: unknown action type 'dance'"),
    "a call without a name": (({"type": "tool_call"}, "x", None, None), "KeyError: 'name'"),
    "content that is no text": (text(["x"]), "ValueError"),
    "log-probs of other tokens": (
        ({"type": "text"}, "x", {"token_ids": [1, 2], "logprobs": [-1.0], "prompt_ids": [3]}, None),
        "ValueError: got 2 token_ids but 1 logprobs: every sampled token needs one",
    ),
    "tokens without log-probs": (
        ({"type": "text"}, "x", {"token_ids": [1, 2], "prompt_ids": [3]}, None),
        "ValueError: got token_ids without logprobs: return token_ids, logprobs and prompt_ids, or no token_ids",
    ),
    "log-probs that are not finite": (
        ({"type": "text"}, "x", {"token_ids": [1], "logprobs": [math.nan], "prompt_ids": [3]}, None),
        "ValueError: logprobs contain NaN or infinity: are the model's weights broken?",
    ),
    "raw that is no text": (
        ({"type": "text", "content": "x"}, 7, None, None),
        "ValueError: raw output must be a string or None, not int",
    ),
}


@pytest.mark.parametrize("which", BAD_ANSWERS)
def test_a_broken_policy_is_a_typed_outcome(which: str) -> None:
    answer, fault = BAD_ANSWERS[which]
    world = World()
    worker = play(RLRolloutWorker(a_task(), Giving(answer), env=world))
    assert worker.stop_reason is StopReason.POLICY_FAULT
    assert fault in (worker.fault or "") or (worker.fault or "").startswith("ValidationError")
    assert worker.steps == []
    assert [m.role for m in worker.messages] == ["user", "user"]
    world.assert_over()


@pytest.mark.parametrize(
    "action",
    [
        {"type": "tool_call", "name": "add", "arguments": {"a": 1, "b": 2}},
        {"type": "tool_call", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]},
        {"type": "tool_call", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
    ],
    ids=["name and arguments", "plain dictionaries", "OpenAI's form"],
)
def test_a_call_may_be_told_in_any_of_the_documents_forms(action: dict[str, Any]) -> None:
    worker = play(RLRolloutWorker(a_task(), Giving((action, None, None, None)), 1, tools={"add": add}))
    assert worker.messages[-1].content == "3"
    assert worker.usage.calls == {"add": 1}
    assert worker.steps[0].base_reward == 0.25
    calls = worker.messages[-2].tool_calls
    assert calls is not None
    assert (calls[0].name, calls[0].arguments) == ("add", {"a": 1, "b": 2})


def test_log_probs_of_another_form_do_not_end_the_run() -> None:
    worker = play(RLRolloutWorker(a_task(), Giving((*text("42")[:2], {"logprob": -1.0}, None)), tools={}))
    assert worker.stop_reason is StopReason.ANSWERED
    assert worker.usage.sampled_tokens == 0


async def never() -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_the_deadline_ends_an_episode_in_its_world(where: str) -> None:
    ended = []

    async def long() -> None:
        try:
            await never()
        finally:
            ended.append(True)

    world = World(**{where: long}, final_rewards={"quest": 1.0})
    began = time.monotonic()
    worker = scripted(["look"] * 3, env=world, deadline_s=0.1)
    assert time.monotonic() - began < 10
    assert worker.stop_reason is StopReason.DEADLINE
    assert worker.fault == "the episode took longer than 0.1 s"
    assert ended == [True]
    assert worker.tool_rewards == {"quest": 1.0}
    world.assert_over()


def test_the_deadline_ends_an_episode_in_its_policy() -> None:
    world = World()
    worker = play(RLRolloutWorker(a_task(), Giving(never), env=world, deadline_s=0.1))
    assert worker.stop_reason is StopReason.DEADLINE
    assert worker.steps == []
    world.assert_over()


def test_a_step_cut_by_the_deadline_is_noted_as_far_as_it_went() -> None:
    worker = scripted(["look"], env=World(step=never), deadline_s=0.1)
    (step,) = worker.steps
    assert step.is_done
    assert step.raw_policy_output == "look"
    assert sum(m.role == "assistant" for m in worker.messages) == len(worker.steps)


def test_the_deadline_holds_for_an_episode_of_many_short_steps() -> None:
    async def short() -> Any:
        time.sleep(0.02)  # noqa: ASYNC251  the world that never lets go of the loop is the point
        return "", None, False, {}

    worker = scripted(["look"] * 1000, steps=1000, env=World(step=short), deadline_s=0.2)
    assert worker.stop_reason is StopReason.DEADLINE
    assert 1 < len(worker.steps) < 20


@pytest.mark.parametrize("where", ["final_rewards", "close"])
def test_a_world_that_never_ends_is_not_waited_for(where: str) -> None:
    world = World(**{where: never})
    began = time.monotonic()
    scripted(["look"], steps=1, env=world, deadline_s=0.2)
    assert time.monotonic() - began < 10
    world.assert_over()


def test_a_policy_that_does_not_heed_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deadlines, "GRACE_S", 0.05)
    free: list[asyncio.Event] = []

    async def stubborn() -> None:
        free.append(asyncio.Event())
        while not free[0].is_set():
            try:
                await free[0].wait()
            except asyncio.CancelledError:
                continue

    async def episode() -> RLRolloutWorker:
        worker = RLRolloutWorker(a_task(), Giving(stubborn), env=World(), deadline_s=0.1)
        await worker.run_episode()
        free[0].set()
        return worker

    with caplog.at_level(logging.WARNING):
        assert run(episode()).stop_reason is StopReason.DEADLINE
    assert "is abandoned" in caplog.text


class Waiting(World):
    """An environment that waits in one of its methods until it is cancelled or released."""

    def __init__(self, where: str) -> None:
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()
        super().__init__(**{where: self.wait})

    async def wait(self) -> Any:
        self.reached.set()
        await self.let_go.wait()
        return {}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("where", ["reset", "policy", "step", "final_rewards", "close"])
def test_a_cancelled_episode_still_closes_its_world(where: str, times: int) -> None:
    async def cancel() -> World:
        world = Waiting(where)
        policy = Giving(world.wait) if where == "policy" else ScriptedPolicy(["look"])
        episode = asyncio.create_task(RLRolloutWorker(a_task(), policy, 1, env=world).run_episode())
        await world.reached.wait()
        for _ in range(times):
            episode.cancel()
            await asyncio.sleep(0.01)
        if where in ("final_rewards", "close"):  # finishing is not interrupted
            assert not episode.done()
            world.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return world

    run(cancel()).assert_over()


def test_an_episode_cancelled_again_while_it_closes_still_closes() -> None:
    async def cancel() -> World:
        world = Waiting("close")
        world.behave["step"] = never
        episode = asyncio.create_task(RLRolloutWorker(a_task(), ScriptedPolicy(["look"]), env=world).run_episode())
        await asyncio.sleep(0.02)
        episode.cancel()
        await world.reached.wait()
        for _ in range(3):
            episode.cancel()
            await asyncio.sleep(0.01)
        assert not episode.done()
        world.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return world

    run(cancel()).assert_over()


def test_finishing_twice_closes_once() -> None:
    async def twice() -> World:
        world = World()
        worker = RLRolloutWorker(a_task(), ScriptedPolicy(["look"]), 1, env=world)
        await worker.run_episode()
        await worker.finish()
        return world

    run(twice()).assert_over()


class Sessions(ScriptedPolicy):
    """Records how its sessions are opened."""

    def __init__(self) -> None:
        super().__init__(["look", "look"])
        self.opened: list[dict[str, Any]] = []

    def session(self, **given: Any) -> ScriptedPolicy:
        self.opened.append(given)
        return ScriptedPolicy(self.script)


def test_an_episode_opens_one_session_with_its_seed() -> None:
    policy = Sessions()
    play(RLRolloutWorker(a_task(), policy, 2, env=World(), seed=5, do_sample=False))
    assert policy.opened == [{"seed": 5, "do_sample": False, "prompt_ids": None}]


@pytest.mark.parametrize(
    ("reset", "prompt", "expected"),
    [("", None, [1, 2]), ("more to see", None, None), ("", [Message(role="user", content="routed")], None)],
    ids=["the task's own prompt", "the world adds to it", "a routed prompt"],
)
def test_ids_that_came_with_a_task_stand_for_its_own_prompt_alone(reset: str, prompt: Any, expected: Any) -> None:
    policy = Sessions()
    play(RLRolloutWorker(a_task(prompt_ids=[1, 2]), policy, 1, env=World(reset=reset), prompt=prompt))
    assert policy.opened[0]["prompt_ids"] == expected


def test_the_tasks_own_prompt_is_never_changed() -> None:
    task = a_task()
    worker = scripted([call("add", a=1, b=2), "3"], task=task)
    assert len(task.prompt) == 1
    assert len(worker.messages) == 4


def test_seconds_are_those_of_the_episode() -> None:
    async def late() -> RLRolloutWorker:
        worker = RLRolloutWorker(a_task(), ScriptedPolicy(["42"]), tools={})
        await asyncio.sleep(0.5)
        await worker.run_episode()
        await asyncio.sleep(0.5)
        return worker

    assert run(late()).usage.seconds < 0.4


def test_tools_not_asked_for_by_the_task_are_not_there() -> None:
    tools: dict[str, BaseTool] = build_tools(["calculator", add])
    worker = scripted([call("add", a=1, b=2), "?"], task=a_task(tools=["calculator"]), tools=tools)
    assert worker.usage.failed_calls == {"unknown_tool": 1}
