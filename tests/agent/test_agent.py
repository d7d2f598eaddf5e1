"""The routed agent with the model that ships and real tools."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from toolwise.agent.agent import RoutedAgent
from toolwise.agent.inference import Calibration, store_calibration
from toolwise.agent.time_saved import time_saved
from toolwise.envs.tool_env import MALFORMED_CALL_MESSAGE, ToolEnv
from toolwise.errors import ConfigError, QuestionError, ToolwiseError
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.routing.cost import AnyCost, CallsCost, RouteUsage
from toolwise.routing.cost_cap import BUDGET_SPENT_MESSAGE, CappedEnv
from toolwise.routing.families import Family
from toolwise.routing.threshold import Threshold
from toolwise.tools.catalog import build_tools
from toolwise.types import Rollout, StopReason, Task
from toolwise.types.rollouts import OVER_BUDGET

SUM = "What is 4321 - 1234?"
SHORT = ["rollout.max_new_tokens=48"]


@pytest.fixture(scope="module")
def agent(routed: Path) -> RoutedAgent:
    return RoutedAgent.load(routed, tools=["calculator", "search"], documents=["Alder has 12 mills."], overrides=SHORT)


def test_it_routes_calls_a_real_tool_and_answers(agent: RoutedAgent) -> None:
    answered = agent.ask(SUM)
    assert answered.route == "CALCULATE-FAMILY"
    assert answered.text == "Answer: 3087"
    assert dict(answered.calls) == {"calculator": 1}
    assert (answered.cost, answered.refused) == (1.0, 0)
    assert sum(answered.route_probs.values()) == pytest.approx(1)
    assert max(answered.route_probs, key=answered.route_probs.__getitem__) == "CALCULATE-FAMILY"
    assert answered.seconds > 0


def test_a_given_route_is_used_and_hides_the_other_tools(agent: RoutedAgent) -> None:
    direct = agent.ask(SUM, route="answer")
    assert (direct.route, direct.cost, dict(direct.calls)) == ("ANSWER", 0.0, {})
    assert direct.text != "Answer: 3087"  # it cannot compute this without a tool
    searching = agent.ask(SUM, route="search")
    assert searching.route == "SEARCH-FAMILY"
    assert "calculator" not in searching.rollout.usage.calls
    with pytest.raises(ToolwiseError, match="unknown route"):
        agent.ask(SUM, route="guess")


def test_a_cap_refuses_the_call_with_an_error_for_the_model(agent: RoutedAgent) -> None:
    answered = agent.ask(SUM, cap=0)
    assert answered.refused >= 1
    assert (answered.cost, dict(answered.calls)) == (0.0, {})
    assert BUDGET_SPENT_MESSAGE in [message.content for message in answered.rollout.messages]
    assert agent.ask(SUM, cap=1).text == "Answer: 3087"
    assert agent.ask(SUM, cap=float("inf")).text == "Answer: 3087"  # no cap
    assert answered.problem == ""
    with pytest.raises(ConfigError, match="cap"):
        agent.ask(SUM, cap=-1)


def test_messages_and_tasks_are_questions_too(agent: RoutedAgent) -> None:
    task = Task(task_id="t", prompt=[{"role": "user", "content": SUM}], tools=["calculator"])
    for question in ([{"role": "user", "content": SUM}], task):
        assert agent.ask(question).text == "Answer: 3087"
    with pytest.raises(ConfigError, match="empty"):
        agent.ask([])
    for wrong in (None, 3, {"role": "user", "content": SUM}, [{"role": "user", "content": [1]}], ["hello"]):
        with pytest.raises(QuestionError, match=r"is no question .*: give text, a list of messages"):
            agent.ask(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'oven'"):
        agent.ask(task.model_copy(update={"tools": ["oven"]}))


def test_a_question_that_does_not_fit_is_not_answered_with_the_prompt_s_own_words(routed: Path) -> None:
    no_room = ["rollout.max_new_tokens=4090"]
    agent = RoutedAgent.load(routed, tools=["calculator", "search"], overrides=no_room)
    said = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "How can I help?"},
        {"role": "user", "content": "What is 2 + 2?"},
    ]
    answered = agent.ask(said, route="answer")
    assert answered.text == ""
    assert answered.rollout.stop_reason is StopReason.PROMPT_TOO_LONG
    assert answered.problem


def test_a_question_that_the_router_cannot_read_is_a_typed_outcome(make_routed: Any) -> None:
    agent = RoutedAgent.load(make_routed(bias=[0.0, -1.0, 2.0], conditioning="append"), tools=["calculator"])
    for route in ("auto", "calculate"):
        answered = agent.ask("word " * 5000, route=route)
        assert answered.rollout.stop_reason is StopReason.PROMPT_TOO_LONG
        assert "do not fit the model's" in (answered.rollout.fault or "")
        assert (answered.text, answered.cost, dict(answered.route_probs), answered.with_tools_s) == ("", 0.0, {}, None)
    assert agent.ask(SUM).text == "Answer: 3087"


def test_ask_works_where_a_loop_is_running(agent: RoutedAgent) -> None:
    async def notebook() -> str:
        return agent.ask(SUM).text

    assert asyncio.run(notebook()) == "Answer: 3087"


def test_a_budget_needs_a_calibration(agent: RoutedAgent) -> None:
    with pytest.raises(QuestionError, match="is not calibrated"):
        agent.ask(SUM, budget=0.5)


def test_a_budget_is_kept_by_the_stored_threshold(make_routed: Any) -> None:
    folder = make_routed(bias=[0.0, -1.0, 2.0])
    tight, loose = Threshold(9.0, 9.0, 0.0), Threshold(0.0, 0.0, 0.0)
    store_calibration(folder, Calibration((0.0, 1.0), (tight, loose), (0.0, 1.0, 1.0), direct_s=0.1, with_tools_s=60.0))
    agent = RoutedAgent.load(folder, tools=["calculator"], overrides=SHORT)
    direct = agent.ask(SUM, budget=0.0)
    assert direct.route == "ANSWER"
    assert direct.saved_s is not None
    assert direct.saved_s == pytest.approx(60.0 - direct.seconds)
    spent = agent.ask(SUM, budget=1.0)
    assert (spent.route, spent.saved_s) == ("CALCULATE-FAMILY", None)
    routes = [agent.routing.choose(agent.routing.predict([t])[0], t, budget=0.5, seed=0).value for t in questions(40)]
    assert 8 < routes.count("ANSWER") < 32
    again = [agent.routing.choose(agent.routing.predict([t])[0], t, budget=0.5, seed=0).value for t in questions(40)]
    assert routes == again  # depends on the seed and the prompt, not on the order
    with pytest.raises(ConfigError, match="calibrated for"):
        agent.ask(SUM, budget=2.0)


def questions(count: int) -> list[Task]:
    return [Task(task_id=f"q{i}", prompt=[{"role": "user", "content": f"What is {i} + 1?"}]) for i in range(count)]


@pytest.mark.long
def test_training_modules_are_not_imported(routed: Path) -> None:
    asked = (
        "import sys, toolwise.agent.agent as a\n"
        f"print(a.RoutedAgent.load({str(routed)!r}, tools=['calculator'], overrides={SHORT!r}).ask({SUM!r}).text)\n"
        "print([m for m in sys.modules if m in {'toolwise.learner.' + x for x in ('actor', 'critic', 'reference')}])"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines() == ["Answer: 3087", "[]"]


QUESTIONS = [Task(task_id=f"q{i}", prompt=[{"role": "user", "content": f"What is {i} + 1?"}]) for i in range(3)]


def test_it_is_measured_on_prompts_that_are_answered_directly(make_routed: Any) -> None:
    agent = RoutedAgent.load(make_routed(bias=[3.0, 0.0, 0.0]), tools=["calculator"], overrides=SHORT)
    saved = asyncio.run(time_saved(agent, QUESTIONS, limit=2))
    assert saved is not None
    assert saved.prompts == 2
    assert saved.direct_s > 0
    assert saved.with_tools_s > 0
    assert "saved per prompt (2 prompts" in saved.describe()


def test_where_nothing_is_answered_directly_nothing_is_saved(routed: Path) -> None:
    agent = RoutedAgent.load(routed, tools=["calculator"], overrides=SHORT)
    assert asyncio.run(time_saved(agent, QUESTIONS)) is None


FAMILIES = {"calculator": Family.CALCULATE, "search": Family.SEARCH}
TASK = Task(task_id="t", prompt=[{"role": "user", "content": "?"}])


def each_call(calls: Mapping[str, int]) -> float:
    return CallsCost()(RouteUsage.of(calls, FAMILIES))["cost"]


def call(number: int, expression: str = "1 + 1") -> ToolCall:
    return ToolCall(id=f"c{number}", name="calculator", arguments={"expression": expression})


def run(env_of: Any, steps: list[list[ToolCall]]) -> tuple[list[Any], CappedEnv]:
    async def work() -> tuple[list[Any], CappedEnv]:
        env = env_of(ToolEnv(TASK, build_tools(["calculator", "search"])))
        await env.reset()
        out = [await env.step({"type": "tool_call", "tool_calls": calls}) for calls in steps]
        await env.close()
        return out, env

    return asyncio.run(work())


def test_calls_within_the_cap_are_executed_and_others_refused_in_order() -> None:
    steps = [[call(0)], [call(1, "2 + 3"), call(2), call(3)]]
    (first, second), _ = run(lambda inner: CappedEnv(inner, 2, each_call), steps)
    assert [m.content for m in first[0]] == ["2"]
    assert [m.content for m in second[0]] == ["5", BUDGET_SPENT_MESSAGE, BUDGET_SPENT_MESSAGE]
    assert [m.tool_call_id for m in second[0]] == ["c1", "c2", "c3"]
    assert second[3]["failed_calls"] == {OVER_BUDGET: 2}
    assert second[3]["calls"] == {"calculator": 1}
    assert second[3]["is_action_valid"] is False


def test_a_cap_of_zero_refuses_everything_without_a_step() -> None:
    ((observation, reward, done, info),), _ = run(lambda inner: CappedEnv(inner, 0, each_call), [[call(0)]])
    assert [m.content for m in observation] == [BUDGET_SPENT_MESSAGE]
    assert (reward, done, info.get("cost")) == (None, False, None)


def test_where_any_number_of_calls_costs_the_same_the_second_is_free() -> None:
    steps = [[call(0)], [call(1), call(2)]]
    outs, _ = run(lambda inner: CappedEnv(inner, 1, lambda c: AnyCost()(RouteUsage.of(c, FAMILIES))["cost"]), steps)
    assert [m.content for out in outs for m in out[0]] == ["2", "2", "2"]
    assert all(OVER_BUDGET not in info.get("failed_calls", {}) for _, _, _, info in outs)


def test_calls_that_the_route_rules_out_use_up_nothing() -> None:
    def capped(inner: ToolEnv) -> CappedEnv:
        inner.forbid_tools(["search"])
        return CappedEnv(inner, 1, each_call)

    search = ToolCall(id="s", name="search", arguments={"query": "mills"})
    outs, _ = run(capped, [[search, search], [call(0)]])
    refusal = "error: search is not to be used in this turn; tools: calculator"
    assert [m.content for out in outs for m in out[0]] == [refusal, refusal, "2"]


def test_beyond_the_cap_a_malformed_call_is_said_to_be_malformed() -> None:
    garbled = ToolCall(id="g", name="", arguments="{")
    ((observation, _, _, info),), _ = run(lambda inner: CappedEnv(inner, 0, each_call), [[garbled, call(1)]])
    assert [m.content for m in observation] == [MALFORMED_CALL_MESSAGE, BUDGET_SPENT_MESSAGE]
    assert info["failed_calls"] == {"bad_json": 1, OVER_BUDGET: 1}
    assert "calls" not in info  # refused calls are free


def test_an_answer_is_passed_on_and_ends_the_episode() -> None:
    ((observation, _, done, _),), _ = run(lambda inner: CappedEnv(inner, 0, each_call), [[]])
    assert (list(observation), done) == ([], True)


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "20 + 3"}}\n</tool_call>'


@pytest.mark.parametrize(("cap", "served"), [(0.0, 0), (1.0, 1), (9.0, 2)])
def test_an_episode_can_still_answer_after_a_refusal(cap: float, served: int) -> None:
    async def work() -> Rollout:
        policy = ScriptedPolicy([CALL, CALL, "Answer: 23"], parser="hermes")
        env = CappedEnv(ToolEnv(TASK, build_tools(["calculator"])), cap, each_call)
        request = AsyncRolloutRequest(TASK, policy, env)
        await request.run()
        return request.to_rollout()

    rollout = asyncio.run(work())
    tools = [m for m in rollout.messages if m.role == "tool"]
    assert [m.content for m in tools] == ["23"] * served + [BUDGET_SPENT_MESSAGE] * (2 - served)
    assert rollout.stop_reason is StopReason.ANSWERED
    assert rollout.usage.calls.get("calculator", 0) == served
    assert rollout.usage.failed_calls.get(OVER_BUDGET, 0) == 2 - served
    assert rollout.usage.cost == served
    assert isinstance(rollout.messages[-1], Message)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cap": "a"}, "cap is 'a': give a number of at least 0"),
        ({"cap": True}, "cap is True"),
        ({"cap": float("nan")}, "cap is nan"),
        ({"budget": "0.5"}, "budget is '0.5'"),
        ({"budget": -1}, "budget is -1"),
        ({"route": 3}, "route is 3: give the name of a route"),
        ({"cap": 10**400}, "cap is 1000.*: give a number of at least 0"),
        ({"seed": "x"}, "seed is 'x': give a whole number"),
        ({"do_sample": 1}, "do_sample is 1: give True or False"),
        ({"sampling": 0.5}, "sampling is 0.5: give a dictionary"),
        ({"sampling": {"top_p": 0.5}}, "sampling has no 'top_p'"),
        ({"sampling": {"temperature": "hot"}}, "temperature is 'hot': give a number of at least 0.001"),
        ({"sampling": {"temperature": 0}}, "temperature is 0.*do_sample=False"),
        ({"sampling": {"max_new_tokens": 1.5}}, "max_new_tokens is 1.5: give a whole number"),
        ({"sampling": {"options": {"top_p": 0.5}}}, "options is .*: give ServingOptions"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_option_of_a_wrong_type_is_one_line(agent: RoutedAgent, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(QuestionError, match=problem):
        agent.ask(SUM, **options)
    with pytest.raises(QuestionError, match=problem):
        list(agent.stream(SUM, **options))
