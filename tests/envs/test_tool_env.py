"""The tool environment: every call gets a readable result, and every tool is created and released exactly once."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from toolwise.concurrency.limits import Gate
from toolwise.envs.tool_env import ToolEnv, validate_reward
from toolwise.messages import Message, ToolCall
from toolwise.testing.virtual_time import simulate
from toolwise.tools import BaseTool, build_tools, tool
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.types import Task

T = TypeVar("T")


class Witness(BaseTool):
    """Records the calls to it. `behave` is what each verb does in addition."""

    def __init__(self, name: str = "witness", price: float = 2.0, **behave: Any) -> None:
        properties = {"x": {"type": "integer"}}
        schema = FunctionSchema(name=name, parameters={"type": "object", "properties": properties, "required": ["x"]})
        super().__init__({"price": price}, OpenAIFunctionToolSchema(function=schema))
        self.log: list[tuple[str, str, dict[str, Any]]] = []
        self.behave = behave
        self._made = 0

    async def _do(self, verb: str, instance: str, kwargs: dict[str, Any]) -> Any:
        self.log.append((verb, instance, kwargs))
        result = self.behave.get(verb)
        if isinstance(result, BaseException):
            raise result
        return await result() if callable(result) else result

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self._made += 1
        await self._do("create", f"{self.name}-{self._made}", kwargs)
        return f"{self.name}-{self._made}"

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        given = await self._do("execute", instance_id, {"parameters": parameters, **kwargs})
        return ("seen", 0.5, {"of": instance_id}) if given is None else given

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        given: float | None = await self._do("calc_reward", instance_id, kwargs)
        return given

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("release", instance_id, kwargs)

    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.log]


def a_task(**more: Any) -> Task:
    return Task(task_id="t", prompt=[Message(role="user", content="?")], **more)


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 20)

    return asyncio.run(limited())


async def live(env: ToolEnv, *calls: ToolCall) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
    await env.reset()
    try:
        return await env.step({"type": "tool_call", "tool_calls": list(calls)})
    finally:
        await env.close()


def call_witness(witness: Witness, **more: Any) -> tuple[str, float | None, dict[str, Any]]:
    env = ToolEnv(a_task(), {"witness": witness}, **more)
    messages, reward, _, info = simulate(live(env, ToolCall(id="call_0", name="witness", arguments={"x": 1})))
    return messages[0].content or "", reward, info


def test_a_plain_answer_ends_the_episode() -> None:
    env = ToolEnv(a_task(), {})
    assert run(env.step({"type": "text", "content": "42"})) == ([], None, True, {"is_action_valid": True})


def test_calls_are_answered_in_their_order() -> None:
    async def slow() -> tuple[str, float | None, dict[str, Any]]:
        await asyncio.sleep(0.05)
        return "slow", 1.0, {"n": 1}

    tools = build_tools(["calculator"]) | {"slow": Witness("slow", execute=slow)}
    calls = [
        ToolCall(id="a", name="slow", arguments={"x": 1}),
        ToolCall(id="b", name="calculator", arguments={"expression": "6 * 7"}),
    ]
    messages, reward, done, info = simulate(live(ToolEnv(a_task(), tools), *calls))
    assert [(m.role, m.tool_call_id, m.name, m.content) for m in messages] == [
        ("tool", "a", "slow", "slow"),
        ("tool", "b", "calculator", "42"),
    ]
    assert (reward, done) == (1.0, False)
    assert info["is_action_valid"] is True
    assert info["calls"] == {"slow": 1, "calculator": 1}
    assert info["failed_calls"] == {}
    assert info["cost"] == 2.0 + tools["calculator"].price
    assert info["tool_info"][0] == {"n": 1}


def test_calls_of_one_turn_run_at_the_same_time() -> None:
    async def slow() -> None:
        await asyncio.sleep(1.0)

    calls = [ToolCall(name="witness", arguments={"x": i}) for i in range(10)]

    async def episode() -> float:
        await live(ToolEnv(a_task(), {"witness": Witness(execute=slow)}), *calls)
        return asyncio.get_running_loop().time()

    assert simulate(episode()) == 1.0


def test_the_rewards_of_a_turn_are_summed() -> None:
    calls = [ToolCall(name="witness", arguments={"x": i}) for i in range(3)]
    assert run(live(ToolEnv(a_task(), {"witness": Witness()}), *calls))[1] == 1.5


def test_a_reward_of_zero_is_a_reward() -> None:
    assert call_witness(Witness(execute=lambda: _give(("ok", 0.0, {}))))[1] == 0.0
    assert call_witness(Witness(execute=lambda: _give(("ok", None, {}))))[1] is None


async def _give(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (ToolCall(name="nonesuch", arguments={}), "unknown_tool", "no tool 'nonesuch'; tools: witness"),
        (ToolCall(name="", arguments="{oops"), "bad_json", "not a JSON object with name and arguments"),
        (ToolCall(name="witness", arguments="[1]"), "bad_json", "not a JSON object"),
        (ToolCall(name="witness", arguments={}), "bad_arguments", "x"),
        (ToolCall(name="witness", arguments={"x": "one"}), "bad_arguments", "must be an integer"),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model_and_counted(call: ToolCall, kind: str, words: str) -> None:
    witness = Witness()
    messages, reward, done, info = run(live(ToolEnv(a_task(), {"witness": witness}), call))
    assert (messages[0].content or "").startswith("error: ")
    assert words in (messages[0].content or "")
    assert (reward, done) == (None, False)
    assert info["is_action_valid"] is False
    assert info["failed_calls"] == {kind: 1}
    assert info["calls"] == {call.name or "unreadable": 1}
    assert "execute" not in witness.verbs()


def test_one_bad_call_makes_the_turn_invalid_and_leaves_the_others_standing() -> None:
    calls = [ToolCall(name="witness", arguments={"x": 1}), ToolCall(name="nonesuch")]
    messages, reward, _, info = run(live(ToolEnv(a_task(), {"witness": Witness()}), *calls))
    assert messages[0].content == "seen"
    assert reward == 0.5
    assert info["is_action_valid"] is False
    assert info["cost"] == 4.0  # a call to an unknown tool costs as much as the most expensive one


@pytest.mark.parametrize(
    "given",
    [
        ValueError("no luck"),
        TimeoutError("the far end was slow"),
        asyncio.CancelledError(),
        lambda: _give("not a tuple"),
        lambda: _give((None, 1.0, {})),
        lambda: _give(("ok", "much", {})),
        lambda: _give(("ok", math.nan, {})),
    ],
    ids=["raises", "its own TimeoutError", "cancels itself", "no tuple", "no text", "no reward", "nan"],
)
def test_a_tool_that_fails_is_told_to_the_model_and_counted(given: Any) -> None:
    text, reward, info = call_witness(Witness(execute=given))
    assert text.startswith("error: witness failed: ")
    assert reward is None
    assert info["failed_calls"] == {"exception": 1}
    assert info["cost"] == 2.0


def test_a_tool_that_is_too_slow_is_ended_and_told() -> None:
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    text, _, info = call_witness(Witness(execute=slow), tool_timeout_s=0.05)
    assert text == "error: witness took longer than 0.05 s"
    assert info["failed_calls"] == {"timeout": 1}
    assert ended == [True]


@pytest.mark.parametrize(("works_s", "ends_s", "answer"), [(60, 30, "took longer than 30 s"), (29, 29, "seen")])
def test_a_tool_has_exactly_its_timeout(works_s: float, ends_s: float, answer: str) -> None:
    async def episode() -> tuple[str, float]:
        env = ToolEnv(a_task(), {"witness": Witness(execute=lambda: asyncio.sleep(works_s))}, tool_timeout_s=30)
        messages, *_ = await live(env, ToolCall(name="witness", arguments={"x": 1}))
        return messages[0].content or "", asyncio.get_running_loop().time()

    text, ended_s = simulate(episode())
    assert answer in text
    assert ended_s == pytest.approx(ends_s)


def test_a_tool_that_does_not_heed_its_cancellation_is_left_behind() -> None:
    free: list[asyncio.Event] = []

    async def stubborn() -> None:
        free.append(asyncio.Event())
        while not free[0].is_set():
            try:
                await free[0].wait()
            except asyncio.CancelledError:
                continue

    async def episode() -> str:
        env = ToolEnv(a_task(), {"witness": Witness(execute=stubborn)}, tool_timeout_s=0.05)
        messages, *_ = await live(env, ToolCall(name="witness", arguments={"x": 1}))
        free[0].set()
        return messages[0].content or ""

    assert simulate(episode()) == "error: witness took longer than 0.05 s"


def test_a_synchronous_function_too_is_not_waited_for() -> None:
    @tool
    def nap(seconds: float) -> str:
        """Sleeps."""
        time.sleep(seconds)
        return "rested"

    env = ToolEnv(a_task(), {"nap": nap}, tool_timeout_s=0.05)
    messages, _, _, info = run(live(env, ToolCall(name="nap", arguments={"seconds": 0.5})))
    assert messages[0].content == "error: nap took longer than 0.05 s"
    assert info["failed_calls"] == {"timeout": 1}


def test_many_blocking_calls_do_not_wait_for_each_other() -> None:
    @tool
    def nap(seconds: float) -> str:
        """Sleeps."""
        time.sleep(seconds)
        return "rested"

    env = ToolEnv(a_task(), {"nap": nap}, tool_timeout_s=3)
    calls = [ToolCall(name="nap", arguments={"seconds": 0.3})] * 100
    messages, _, _, info = run(live(env, *calls))
    assert info["failed_calls"] == {}
    assert {m.content for m in messages} == {"rested"}


def test_blocking_calls_that_hang_keep_no_one_else_out() -> None:
    free = threading.Event()

    @tool
    def hang(seconds: float) -> str:
        """Hangs."""
        free.wait(seconds)
        return "at last"

    async def episode() -> list[Any]:
        env = ToolEnv(a_task(), {"hang": hang}, tool_timeout_s=0.1)
        await env.reset()
        await env.step({"tool_calls": [ToolCall(name="hang", arguments={"seconds": 20})] * 50})
        messages, *_ = await env.step({"tool_calls": [ToolCall(name="hang", arguments={"seconds": 0})]})
        return [m.content for m in messages]

    began = time.monotonic()
    assert run(episode()) == ["at last"]
    assert time.monotonic() - began < 10
    free.set()


def test_long_results_are_cut_and_say_so() -> None:
    text, _, _ = call_witness(Witness(execute=lambda: _give(("x" * 50, None, {}))), max_result_chars=10)
    assert text == "xxxxxxxxxx… (40 more characters)"
    text, _, _ = call_witness(Witness(execute=ValueError("y" * 500)), max_result_chars=60)
    assert len(text) < 120


def test_a_lone_surrogate_from_a_tool_does_not_end_the_episode() -> None:
    text, _, info = call_witness(Witness(execute=lambda: _give(("a\ud800b", None, {}))))
    assert text == "a?b"
    assert info["failed_calls"] == {}


@pytest.mark.parametrize(
    ("tools", "offered", "expected"),
    [
        (None, None, ["a", "b", "c"]),
        (["b"], None, ["b"]),
        ([], None, []),
        (["b"], ("a", "c"), ["a", "c"]),
        (["b"], (), []),
        (["b", "elsewhere"], None, ["b"]),
    ],
)
def test_which_tools_are_on_offer(tools: Any, offered: Any, expected: list[str]) -> None:
    every = {name: Witness(name) for name in "abc"}
    env = ToolEnv(a_task(tools=tools), every, offered=offered)
    assert [spec["function"]["name"] for spec in env.tool_specs()] == expected
    run(env.reset())
    assert [name for name, witness in every.items() if witness.log] == expected


def test_a_tool_that_is_not_on_offer_cannot_be_called() -> None:
    every = {name: Witness(name) for name in "ab"}
    _, _, _, info = run(live(ToolEnv(a_task(tools=["a"]), every), ToolCall(name="b", arguments={"x": 1})))
    assert info["failed_calls"] == {"unknown_tool": 1}
    assert every["b"].log == []
    assert info["cost"] == 2.0


def test_the_tasks_arguments_reach_every_verb_and_never_mix_with_the_models() -> None:
    kwargs = {f"{verb}_kwargs": {"for": verb, "x": 99} for verb in ("create", "execute", "calc_reward", "release")}
    witness = Witness()
    env = ToolEnv(a_task(tools_kwargs={"witness": kwargs}), {"witness": witness})

    async def episode() -> None:
        await env.reset()
        await env.step({"tool_calls": [ToolCall(name="witness", arguments={"x": 1})]})
        await env.final_rewards()
        await env.close()

    run(episode())
    assert witness.log == [
        ("create", "witness-1", {"for": "create", "x": 99}),
        ("execute", "witness-1", {"parameters": {"x": 1}, "for": "execute", "x": 99}),
        ("calc_reward", "witness-1", {"for": "calc_reward", "x": 99}),
        ("release", "witness-1", {"for": "release", "x": 99}),
    ]


def test_last_rewards_are_named_and_none_is_left_out() -> None:
    tools = {"a": Witness("a", calc_reward=1), "b": Witness("b"), "c": Witness("c", calc_reward=0.0)}
    env = ToolEnv(a_task(), tools)

    async def episode() -> dict[str, float]:
        await env.reset()
        return await env.final_rewards()

    assert run(episode()) == {"a": 1.0, "c": 0.0}


@pytest.mark.parametrize("bad", [ValueError("broken"), math.nan, asyncio.CancelledError()])
def test_every_tool_is_asked_for_its_reward_even_if_one_fails(bad: Any) -> None:
    tools = {"a": Witness("a", calc_reward=bad), "b": Witness("b", calc_reward=1.0)}
    env = ToolEnv(a_task(), tools)

    async def episode() -> None:
        await env.reset()
        with pytest.raises((ValueError, RuntimeError)):
            await env.final_rewards()

    run(episode())
    assert [w.verbs() for w in tools.values()] == [["create", "calc_reward"]] * 2


@pytest.mark.parametrize("bad", [ValueError("broken"), asyncio.CancelledError()])
def test_every_tool_is_released_even_if_one_fails(bad: BaseException) -> None:
    tools = {"a": Witness("a", release=bad), "b": Witness("b")}
    env = ToolEnv(a_task(), tools)

    async def episode() -> None:
        await env.reset()
        with pytest.raises((ValueError, RuntimeError)):
            await env.close()
        await env.close()

    run(episode())
    assert [w.verbs() for w in tools.values()] == [["create", "release"]] * 2


def test_only_what_was_created_is_released() -> None:
    tools = {"a": Witness("a"), "b": Witness("b", create=ValueError("no room")), "c": Witness("c")}
    env = ToolEnv(a_task(), tools)

    async def episode() -> None:
        with pytest.raises(ValueError, match="no room"):
            await env.reset()
        await env.close()

    run(episode())
    assert {name: w.verbs() for name, w in tools.items()} == {"a": ["create", "release"], "b": ["create"], "c": []}


def test_a_tool_that_takes_too_long_to_make_is_not_waited_for() -> None:
    async def slow() -> None:
        await asyncio.sleep(60)

    env = ToolEnv(a_task(), {"witness": Witness(create=slow)}, tool_timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"took longer than 0.05 s"):
        simulate(env.reset())


def test_a_turn_that_is_cancelled_ends_its_calls_first() -> None:
    ended = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    env = ToolEnv(a_task(), {"witness": Witness(execute=slow)})
    calls = [ToolCall(name="witness", arguments={"x": i}) for i in range(3)]

    async def episode() -> None:
        await env.reset()
        turn = asyncio.create_task(env.step({"tool_calls": calls}))
        await asyncio.sleep(0.02)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

    simulate(episode())
    assert ended == [True] * 3


@pytest.mark.parametrize(("given", "expected"), [(None, None), (0, 0.0), (True, 1.0), (-2.5, -2.5)])
def test_rewards_are_numbers(given: Any, expected: Any) -> None:
    assert validate_reward(given) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, "much", [1]])
def test_what_is_no_number_is_no_reward(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        validate_reward(bad)


@pytest.mark.parametrize("call", [ToolCall(name="", arguments="{oops"), ToolCall(name="nonesuch", arguments={"x": 1})])
def test_a_call_of_no_tool_is_never_free(call: ToolCall) -> None:
    tools = {"cheap": Witness("cheap", 0.5), "dear": Witness("dear", 3.0)}
    assert run(live(ToolEnv(a_task(), tools), call))[3]["cost"] == 3.0
    assert run(live(ToolEnv(a_task(), {}), call))[3]["cost"] == 1.0  # the default price of a tool


def test_a_call_that_the_route_refuses_costs_nothing() -> None:
    call = ToolCall(name="witness", arguments={"x": 1})
    hidden = ToolEnv(a_task(), {"witness": Witness()}, offered=())
    assert run(live(hidden, call))[3]["cost"] == 0
    forbidden = ToolEnv(a_task(), {"witness": Witness()}, forbidden=("witness",))
    assert run(live(forbidden, call))[3]["cost"] == 0


def test_queue_time_is_reported_and_not_counted_as_tool_time() -> None:
    async def short() -> None:
        await asyncio.sleep(0.15)

    calls = [ToolCall(name="witness", arguments={"x": i}) for i in range(3)]
    gates = {"witness": Gate(1)}
    env = ToolEnv(a_task(), {"witness": Witness(execute=short)}, tool_timeout_s=0.25, gates=gates)
    info = simulate(live(env, *calls))[3]
    assert info["failed_calls"] == {}
    assert info["queue_s"] == pytest.approx([0.0, 0.15, 0.3])
    assert [name for name, _ in info["call_s"]] == ["witness"] * 3
    assert [seconds for _, seconds in info["call_s"]] == pytest.approx([0.15] * 3)


def test_a_call_that_reaches_no_tool_takes_no_time() -> None:
    call = ToolCall(name="nonesuch", arguments={"x": 1})
    assert "call_s" not in run(live(ToolEnv(a_task(), {"witness": Witness()}), call))[3]
