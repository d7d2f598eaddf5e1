"""What the route of a turn changes, and what turns cost."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from toolwise.config.router import RouterConfig
from toolwise.config.routes import RouteConfig
from toolwise.messages import Message
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import AnyCost, CallsCost, FamilyCost
from toolwise.routing.prompts import unconditioned
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.turn_choice import (
    TurnChooser,
    refused_turn_calls,
    spending_weights,
    total_costs,
    turn_costs,
    turn_decision,
    turn_route,
    turn_usages,
)
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.types import Rollout, StepData, StopReason, Task, TurnRoute, Usage

TOOLS = {"calculator": CalculatorTool({}), "search": SearchTool({})}
TASK = Task(task_id="t", prompt=[Message(role="user", content="How many?")])
SILENT = Conditioning(RouterConfig(wording="silent"), TOOLS)
ANSWER, SEARCH, CALCULATE = "ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"


def rollout(routes: Sequence[str], calls: Sequence[dict[str, int]], **usage: Any) -> Rollout:
    steps = [
        StepData(
            system_step_index=index,
            observation_data=list(TASK.prompt),
            action_taken={},
            resulting_messages_history=[],
            step_info={"calls": made},
        )
        for index, made in enumerate(calls)
    ]
    total: dict[str, int] = {}
    for made in calls:
        for name, count in made.items():
            total[name] = total.get(name, 0) + count
    return Rollout(
        "r",
        "g",
        0,
        0,
        TASK,
        None,
        tuple(steps),
        list(TASK.prompt),
        StopReason.ANSWERED,
        Usage(calls=total | usage),
        turn_routes=tuple(TurnRoute(index, route) for index, route in enumerate(routes)),
    )


def test_a_route_refuses_the_other_tools_and_says_nothing_if_silent() -> None:
    turn = turn_route(SILENT, TASK, SEARCH, 1, TASK.prompt)
    assert (turn.forbidden, turn.message, turn.bans_calls) == (("calculator",), None, False)
    assert set(turn_route(SILENT, TASK, ANSWER, 0, TASK.prompt).forbidden) == {"calculator", "search"}


def test_a_note_is_appended_to_the_last_message_only() -> None:
    conditioning = Conditioning(RouterConfig(), TOOLS)
    messages = [*TASK.prompt, Message(role="assistant", content=""), Message(role="tool", content="12 mills")]
    turn = turn_route(conditioning, TASK, ANSWER, 1, messages)
    assert turn.message is not None
    assert (turn.message.content or "").startswith("12 mills")
    assert turn.message.content != "12 mills"
    assert unconditioned([turn.message]) == [messages[-1]]
    assert turn_route(conditioning, TASK, ANSWER, 1, messages[:2]).message is None  # what the model itself wrote


def test_decoding_is_masked_only_on_routes_without_tools() -> None:
    config = RouterConfig(wording="silent", every="turn", turn_mask="decode")
    masked = Conditioning(config, TOOLS)
    bans = [turn_route(masked, TASK, name, 0, TASK.prompt).bans_calls for name in (ANSWER, SEARCH, CALCULATE)]
    assert bans == [True, False, False]


def test_a_turn_pays_for_its_own_calls_and_not_for_refused_ones() -> None:
    made = rollout([SEARCH, SEARCH, CALCULATE, ANSWER], [{"search": 2}, {"calculator": 1}, {"calculator": 1}, {}])
    costs = turn_costs(SILENT, CallsCost(), made)
    assert [cost["cost"] for cost in costs] == [2.0, 0.0, 1.0, 0.0]
    assert [cost["search"] for cost in costs] == [2.0, 0.0, 0.0, 0.0]
    assert total_costs(CallsCost(), costs)["cost"] == 3.0


def test_a_flat_price_is_paid_by_the_turn_that_first_uses_a_tool() -> None:
    made = rollout([ANSWER, SEARCH, SEARCH, CALCULATE], [{}, {"search": 1}, {"search": 1}, {"calculator": 1}])
    assert [cost["cost"] for cost in turn_costs(SILENT, AnyCost(), made)] == [0.0, 1.0, 0.0, 0.0]
    assert [cost["cost"] for cost in turn_costs(SILENT, FamilyCost(), made)] == [0.0, 1.0, 0.0, 1.0]


def test_unread_calls_of_a_reply_that_was_cut_off_belong_to_the_last_turn() -> None:
    made = rollout([SEARCH, ANSWER], [{"search": 1}, {}], unreadable=1)
    assert [usage.calls_by_tool for usage in turn_usages(SILENT, made)] == [{"search": 1}, {"unreadable": 1}]
    assert [cost["cost"] for cost in turn_costs(SILENT, CallsCost(), made)] == [1.0, 1.0]


def test_a_turn_that_failed_costs_nothing() -> None:
    made = rollout([SEARCH, CALCULATE], [{"search": 1}])
    assert [cost["cost"] for cost in turn_costs(SILENT, CallsCost(), made)] == [1.0]
    assert total_costs(CallsCost(), turn_costs(SILENT, CallsCost(), rollout([], []))) == dict.fromkeys(
        CallsCost().units, 0.0
    )


def test_calls_that_the_route_of_their_turn_refused_are_told_apart() -> None:
    made = rollout([SEARCH, ANSWER], [{"search": 1, "calculator": 1}, {"search": 2}])
    assert refused_turn_calls(SILENT, made) == {"calculator": 1, "search": 2}


def test_the_price_of_a_route_is_paid_at_every_turn() -> None:
    routes = [RouteConfig(name="quick"), RouteConfig(name="careful", note="Think.", price=0.5)]
    conditioning = Conditioning(RouterConfig(routes=routes, cost="calls"), {})
    made = rollout(["careful", "quick", "careful"], [{}, {}, {}])
    assert [cost["cost"] for cost in turn_costs(conditioning, CallsCost(), made)] == [0.5, 0.0, 0.5]
    assert spending_weights(conditioning, CallsCost(), TASK, "cost") == (0.0, 1.0)


def test_routes_weigh_what_they_can_spend() -> None:
    assert spending_weights(SILENT, CallsCost(), TASK, "cost") == (0.0, 1.0, 1.0)
    assert spending_weights(SILENT, FamilyCost(c_search=4.0), TASK, "cost") == (0.0, 1.0, 0.25)
    assert spending_weights(SILENT, CallsCost(price=0.0), TASK, "cost") == (0.0, 0.0, 0.0)


def test_a_chooser_predicts_from_the_tokens_and_records_its_choice() -> None:
    read: list[Sequence[int]] = []

    async def predict(prompt_ids: Sequence[int]) -> RoutePrediction:
        read.append(prompt_ids)
        return RoutePrediction((math.log(0.5), math.log(0.3), math.log(0.2)), logits=(3.0, 2.0, 1.0))

    chooser = TurnChooser(TASK, SILENT, predict, lambda prediction, turn, offset: turn + offset)
    turn = asyncio.run(chooser.route(1, TASK.prompt, [5, 6], 1))
    assert (turn.route, turn.turn, turn.logits, read) == (CALCULATE, 1, (3.0, 2.0, 1.0), [[5, 6]])
    assert turn.log_prob == pytest.approx(math.log(0.2))


def test_the_rollouts_of_a_prompt_are_one_group_with_its_own_prompt() -> None:
    async def predict(prompt_ids: Sequence[int]) -> RoutePrediction:
        raise NotImplementedError

    tokens = TASK.model_copy(update={"prompt_ids": [1, 2]})
    for conditioning, kept in ((SILENT, [1, 2]), (Conditioning(RouterConfig(), TOOLS), None)):
        chooser = TurnChooser(tokens, conditioning, predict, lambda prediction, turn, offset: 0)
        decision = turn_decision(chooser, group_id="g", n=4, seed=1, prompt_id="p")
        assert (decision.n, decision.tools, decision.route) == (4, None, None)
        assert list(decision.prompt) == list(TASK.prompt)
        assert decision.task.prompt_ids == kept
