"""The decisions of a loaded router, and the costs it computes for rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.agent.inference import TrainedRouter, values_of
from toolwise.agent.loader import load_router
from toolwise.routing.actions import RouteAction
from toolwise.types import Rollout, StopReason, Task, Usage

TASKS = [Task(task_id=str(i), prompt=[{"role": "user", "content": f"What is {i} + {i}?"}]) for i in range(5)]


@pytest.fixture(scope="module")
def routing(routed: Path) -> TrainedRouter:
    return load_router(routed, tools=["calculator", "search"])


def test_predictions_do_not_depend_on_the_batch(make_routed: Any) -> None:
    routing = load_router(make_routed(bias=[0.0, 0.0, 0.0], spread=0.5), tools=["calculator"])
    together = [word.logprobs for word in routing.predict(TASKS)]
    alone = [routing.predict([task])[0].logprobs for task in TASKS]
    assert np.allclose(together, alone, atol=1e-4)
    assert len({tuple(np.round(row, 3)) for row in together}) > 1
    assert routing.features(TASKS).shape == (5, routing.head.settings.width)


def test_a_route_selects_tools_and_none_keeps_the_prompt(routing: TrainedRouter) -> None:
    assert routing.decide(TASKS[0], RouteAction.ANSWER).tools == ()
    assert routing.decide(TASKS[0], RouteAction.SEARCH_FAMILY).tools == ("search",)
    plain = routing.decide(TASKS[0], None, n=3, seed=9)
    assert (plain.tools, plain.route, plain.n, plain.seed) == (None, None, 3, 9)
    assert list(plain.prompt) == list(TASKS[0].prompt)


def test_token_ids_of_the_original_prompt_are_dropped(routing: TrainedRouter) -> None:
    tokenised = TASKS[0].model_copy(update={"prompt_ids": [1, 2, 3]})
    assert routing.decide(tokenised, RouteAction.ANSWER).task.prompt_ids is None
    assert routing.decide(tokenised, None).task.prompt_ids == [1, 2, 3]


def rollout(calls: dict[str, int], route: str | None) -> Rollout:
    return Rollout("r", "g", 0, 0, TASKS[0], route, (), TASKS[0].prompt, StopReason.ANSWERED, Usage(calls=calls))


def test_only_executed_calls_cost(routing: TrainedRouter) -> None:
    assert routing.cost_of(rollout({"calculator": 2, "search": 1}, None)) == 3
    assert routing.cost_of(rollout({"calculator": 2, "search": 1}, "SEARCH-FAMILY")) == 1
    assert routing.cost_of(rollout({"calculator": 2}, "ANSWER")) == 0
    assert routing.cost_of(rollout({"oven": 2}, None)) == 2


def test_a_value_head_gives_rewards_and_costs(make_routed: Any) -> None:
    bias = [0.1, 0.0, 0.9, 1.0, 0.5, 1.0]  # reward and cost of each route
    routing = load_router(make_routed(bias=bias, mode="value"), tools=["calculator"])
    (word,) = routing.predict(TASKS[:1])
    values, costs = values_of(word)
    assert costs is not None
    assert np.allclose(values, [0.1, 0.9, 0.5])
    assert np.allclose(costs, [0, 1, 1])
    assert routing.multipliers == (0.5,)
    assert word.argmax() == 1  # 0.9 − 0.5 · 1 against 0.1


def test_sampled_routes_depend_on_the_prompt_and_the_seed_only(make_routed: Any) -> None:
    routing = load_router(make_routed(bias=[0.0, 0.0, 0.0]), tools=["calculator"])
    word = routing.predict(TASKS[:1])[0]
    drawn = [[routing.choose(word, task, budget=None, seed=seed) for task in TASKS] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert len({route for line in drawn for route in line}) > 1
