"""The routed agent with the model that ships and real tools."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolwise.agent.agent import RoutedAgent
from toolwise.agent.calibration import Calibration, store_calibration
from toolwise.agent.spending_cap import BUDGET_SPENT_MESSAGE
from toolwise.errors import CheckpointError, ConfigError, ToolwiseError
from toolwise.routing.threshold import Threshold
from toolwise.types import StopReason, Task

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
    with pytest.raises(ConfigError, match="cap"):
        agent.ask(SUM, cap=-1)


def test_messages_and_tasks_are_questions_too(agent: RoutedAgent) -> None:
    task = Task(task_id="t", prompt=[{"role": "user", "content": SUM}], tools=["calculator"])
    for question in ([{"role": "user", "content": SUM}], task):
        assert agent.ask(question).text == "Answer: 3087"
    with pytest.raises(ConfigError, match="empty"):
        agent.ask([])
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
    with pytest.raises(CheckpointError, match="is not calibrated"):
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
