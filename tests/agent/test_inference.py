"""The decisions of a loaded router, and the costs it computes for rollouts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.agent.agent import Agent
from toolwise.agent.inference import (
    Calibration,
    RouteChoice,
    TrainedRouter,
    calibration_of,
    store_calibration,
    values_of,
)
from toolwise.agent.loader import load_router
from toolwise.config.router import RouterConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.frontier.evaluation import route_values
from toolwise.routing.calibration import BudgetCalibration
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import CallsCost
from toolwise.routing.families import RouteAction
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.joint_threshold import JointThreshold
from toolwise.routing.routes import check_prices
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Threshold, find_threshold
from toolwise.tools.catalog import build_tools
from toolwise.training import checkpoint
from toolwise.types import Rollout, StopReason, Task, Usage

TASKS = [Task(task_id=str(i), prompt=[{"role": "user", "content": f"What is {i} + {i}?"}]) for i in range(5)]

TOOLS = build_tools(["calculator", "search"])


@pytest.fixture(scope="module")
def routing(routed: Path) -> TrainedRouter:
    return load_router(routed, tools=["calculator", "search"])


def test_predictions_do_not_depend_on_the_batch(make_routed: Any) -> None:
    routing = load_router(make_routed(bias=[0.0, 0.0, 0.0], spread=0.5), tools=["calculator"])
    together = [word.logprobs for word in routing.predict(TASKS)]
    alone = [routing.predict([task])[0].logprobs for task in TASKS]
    assert np.allclose(together, alone, atol=1e-4)
    assert len({tuple(np.round(row, 3)) for row in together}) > 1
    assert routing.features(TASKS).shape == (5, routing.predictor.head.settings.width)


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


RANDOM: dict[str, Any] = {
    "bias": [9.0, 0.0, 0.0, 0.0, 0.0, 9.0],  # the low budget answers directly, the high one calculates
    "bins": 2,
    "budgets": [{"limit": 0.9}],
    "random_budgets": {"low": 0.1, "high": 0.9, "bins": 2},
    "eval_mode": "argmax",
}


def choose(routing: TrainedRouter, budget: float | None = None, cap: float | None = None) -> RouteChoice:
    return asyncio.run(routing.route_question(TASKS[0], budget=budget, route=None, cap=cap, seed=0))


def test_the_odds_shown_are_those_of_the_budget_in_use(make_routed: Any) -> None:
    routing = load_router(make_routed(**RANDOM), tools=["calculator", "search"])
    chosen = choose(routing)
    assert chosen.route == "CALCULATE-FAMILY"
    assert (chosen.route_probs or {})["CALCULATE-FAMILY"] > 0.99
    assert route_values(routing, TASKS).values.argmax(axis=1).tolist() == [2] * len(TASKS)
    with pytest.raises(ConfigError, match=r"budget 9 is outside 0.1 to 0.9"):
        choose(routing, budget=9.0)


def test_the_cap_of_training_holds_for_the_prices_of_routes(make_routed: Any) -> None:
    routes = [
        {"name": "FREE"},
        {"name": "DEAR", "tools": ["search"], "price": 3.0},
        {"name": "FAIR", "tools": ["calculator"], "price": 1.0},
    ]
    config = RouterConfig.model_validate({"routes": routes, "max_cost": 1.0, "cost": "calls"})
    conditioning = Conditioning(config, TOOLS)
    base = load_router(make_routed(bias=[0.0, 9.0, 1.0]), tools=["calculator", "search"])
    run = base.config.model_copy(update={"router": config})
    routing = replace(base, config=run, conditioning=conditioning, cost=CallsCost())
    prediction = RoutePrediction((-9.0, -0.1, -3.0))
    assert routing.within_cap("DEAR", prediction, None, given=False) == "FAIR"
    assert routing.within_cap("DEAR", prediction, 5.0, given=False) == "FAIR"
    with pytest.raises(ConfigError, match=r"'DEAR' costs 3, more than router.max_cost \(1\)"):
        check_prices(conditioning.routes, ["cost"], max_cost=1.0)


def test_where_tokens_have_a_price_a_cap_is_refused(make_routed: Any) -> None:
    prices = {"usd": {"calculator": 0.25, "*": 2.0, "tokens_1k": 0.5}}
    routing = load_router(make_routed(bias=[0.0, 0.0, 9.0], prices=prices), tools=["calculator", "search"])
    with pytest.raises(ConfigError, match=r"tokens or seconds have a price in 'usd'"):
        choose(routing, cap=2.0)
    assert choose(routing).route
    assert Agent(routing).call_prices == {"calculator": 0.25, "search": 2.0}


def test_calls_that_the_route_refused_are_told_apart(routing: TrainedRouter) -> None:
    made = rollout({"calculator": 2, "search": 1, "oven": 1}, "SEARCH-FAMILY")
    assert routing.refused_calls(made) == {"calculator": 2}
    assert not routing.refused_calls(rollout({"calculator": 2}, None))


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


RNG = np.random.default_rng(0)
VALUES = np.log(RNG.dirichlet([1, 1, 1], 500))
COSTS = np.tile([0.0, 1.0, 1.0], (500, 1))
BUDGETS = (0.2, 0.6)
KNOWN = Calibration(
    BUDGETS,
    tuple(find_threshold(VALUES, COSTS, COSTS, budget) for budget in BUDGETS),
    (0.0, 1.0, 1.0),
    rows=500,
    direct_s=0.1,
    with_tools_s=0.4,
)


def spent(budget: float) -> float:
    rng = np.random.default_rng(1)
    routes = [KNOWN.route(row, None, budget, (rng.random(), rng.random())) for row in VALUES]
    return float(np.mean([COSTS[0, route] for route in routes]))


@pytest.mark.parametrize("budget", [0.2, 0.3, 0.4, 0.5, 0.6])
def test_budgets_in_between_mix_both_neighbours(budget: float) -> None:
    assert abs(spent(budget) - budget) < 0.05


@pytest.mark.parametrize("budget", [0.1, 0.7])
def test_budgets_outside_are_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match="calibrated for"):
        KNOWN.threshold_for(budget, 0.5)


def test_round_trip(tmp_path: Path) -> None:
    (tmp_path / ROUTER_METADATA_FILE).write_text(json.dumps({"format": 1, "head": {"width": 3}}))
    assert calibration_of(json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())) is None
    store_calibration(tmp_path, KNOWN)
    metadata = json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())
    assert calibration_of(metadata) == KNOWN
    assert metadata["head"] == {"width": 3}
    store_calibration(tmp_path, Calibration((0.5,), (Threshold(1.0, 1.0, 0.0),), (0.0, 1.0, 1.0)))
    assert calibration_of(json.loads((tmp_path / ROUTER_METADATA_FILE).read_text())).budgets == (0.5,)  # type: ignore[union-attr]


def test_in_a_checkpoint_the_manifest_is_updated(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / ROUTER_METADATA_FILE).write_text("{}")
        (folder / "config.json").write_text("{}")

    saved = checkpoint.save(tmp_path / "checkpoints", 3, {"progress": {"step": 3}}, extra_files={"model": fill})
    store_calibration(saved.path / "model", KNOWN)
    again = checkpoint.load(saved.path)
    assert again.step == 3
    assert calibration_of(json.loads((again.path / "model" / ROUTER_METADATA_FILE).read_text())) == KNOWN
    assert (again.path / "model" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("told", [{"calibration": {}}, {"calibration": {"thresholds": [1]}}, {"calibration": 3}])
def test_a_damaged_calibration_is_reported(told: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="calibrate again"):
        calibration_of(told)


@pytest.mark.parametrize(
    "damage",
    [
        {"budgets": [], "thresholds": []},
        {"thresholds": []},
        {"budgets": [0.5] * len(KNOWN.budgets)},
        {"route_costs": [0.0, float("nan"), 1.0]},
        {"thresholds": [{"offset": float("nan"), "looser": 0.0, "share": 0.0}] * len(KNOWN.budgets)},
        {"thresholds": [{"offset": 1.0, "looser": 0.0, "share": 7.0}] * len(KNOWN.budgets)},
    ],
)
def test_thresholds_that_cannot_route_are_reported(damage: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="calibrate again"):
        calibration_of({"calibration": asdict(KNOWN) | damage})


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"router\.json"):
        store_calibration(tmp_path, KNOWN)


def test_the_trained_budget_means_the_default_routes_whatever_was_evaluated_later(make_routed: Any) -> None:
    routing = load_router(make_routed(bias=[0.0, 0.0, 9.0]), tools=["calculator", "search"])
    trained = BudgetCalibration(
        units=("cost",),
        limits=(0.4,),
        threshold=JointThreshold(((99.0,),), ((0.0,),), (1.0,)),
        route_costs=((0.0,), (1.0,), (1.0,)),
        rows=10,
        rolled_out=10,
        costs=(0.0,),
        standard_errors=(0.01,),
        score=0.5,
    )
    assert choose(replace(routing, calibration=KNOWN), 0.4).route == "CALCULATE-FAMILY"
    both = replace(routing, trained=trained, calibration=KNOWN)
    assert choose(both, 0.4).route == choose(both).route == "ANSWER"


def test_the_trained_budget_keeps_those_in_other_units_too(make_routed: Any) -> None:
    """Thresholds of `toolwise eval --budgets` know the first one only."""
    routing = load_router(make_routed(bias=[0.0, 0.0, 9.0]), tools=["calculator", "search"])
    joint = BudgetCalibration(
        units=("cost", "calculate"),
        limits=(0.4, 0.1),
        threshold=JointThreshold(((0.0, 99.0),), ((0.0, 0.0),), (1.0,)),
        route_costs=((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)),
        rows=10,
        rolled_out=10,
        costs=(0.4, 0.1),
        standard_errors=(0.01, 0.01),
        score=0.5,
    )
    assert choose(replace(routing, calibration=KNOWN), 0.4).route == "CALCULATE-FAMILY"
    for known in (None, KNOWN):
        both = replace(routing, trained=joint, calibration=known)
        assert choose(both, 0.4).route == choose(both).route != "CALCULATE-FAMILY"
    with pytest.raises(ConfigError, match=r"other than the trained one \(0\.4\)"):
        choose(replace(routing, trained=joint), 0.3)
