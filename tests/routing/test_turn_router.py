"""The router of turns: what it learns from, its budget, its state, and what it refuses."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from toolwise.config.router import BudgetConfig, RouterConfig
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.routing.budget import Budgets
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import CallsCost
from toolwise.routing.delivered_budget import uncalibrated
from toolwise.routing.head.builder import turn_engine
from toolwise.routing.prompts import RoutedMessage
from toolwise.routing.samples import RoutePrediction, RouterExample
from toolwise.routing.turn_calibration import TurnCalibration
from toolwise.routing.turn_router import LearnedTurnRouter
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, TurnRoute, Usage

TOOLS = {"calculator": CalculatorTool({}), "search": SearchTool({})}
TASK = Task(task_id="t", prompt=[Message(role="user", content="How many?")])
ANSWER, SEARCH, CALCULATE = "ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"
ODDS = RoutePrediction((math.log(0.5), math.log(0.3), math.log(0.2)))


class Head:
    """A head with fixed odds that remembers what it was taught."""

    def __init__(self) -> None:
        self.taught: Sequence[RouterExample] = []

    def predict_encoded(self, prompt: Any, features: Any, multipliers: Any, *, averaged: bool = False) -> Any:
        return ODDS

    def learn(self, examples: Sequence[RouterExample], multipliers: Sequence[float]) -> dict[str, float]:
        self.taught = examples
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"head": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"head": 1}


class Engine:
    async def encode(self, prompt_ids: Sequence[int], *, pool: str = "last") -> str:
        return "features"


def router(limit: float = 0.5, initial: float = 1.0, **config: Any) -> Any:
    settings = RouterConfig(enable=True, every="turn", wording="silent", cost="calls", **config)
    return LearnedTurnRouter(
        Head(),  # type: ignore[arg-type]
        prompt_of=lambda task: [],
        budgets=Budgets([BudgetConfig(limit=limit, initial=initial)]),
        cost=CallsCost(),
        conditioning=Conditioning(settings, TOOLS),
        engine=Engine(),  # type: ignore[arg-type]
    )


def scored(group: str, offset: int, score: float, turns: Sequence[tuple[str, str, dict[str, int]]]) -> ScoredRollout:
    """`turns` are (route, last observation, calls)."""
    steps = tuple(
        StepData(
            system_step_index=index,
            observation_data=[RoutedMessage.replacing(Message(role="tool", content=seen), f"{seen} Note: {route}")],
            action_taken={},
            resulting_messages_history=[],
            step_info={"calls": calls},
        )
        for index, (route, seen, calls) in enumerate(turns)
    )
    chosen = tuple(TurnRoute(i, route, -1.0, prediction=ODDS) for i, (route, _, _) in enumerate(turns))
    total = {name: count for _, _, calls in turns for name, count in calls.items()}
    rollout = Rollout(
        f"{group}/{offset}",
        group,
        0,
        offset,
        TASK,
        None,
        steps,
        [],
        StopReason.ANSWERED,
        Usage(calls=total),
        turn_routes=chosen,
    )
    return ScoredRollout(rollout, EvaluateResult(score=score), steps)


def test_each_turn_is_taught_with_its_own_return() -> None:
    routing = router()
    (decision,) = routing.decide([TASK], 2, 0)
    batch = [
        scored(decision.group_id, 0, 1.0, [(SEARCH, "q", {"search": 1}), (ANSWER, "12", {})]),
        scored(decision.group_id, 1, 1.0, [(SEARCH, "q", {"search": 1}), (CALCULATE, "12", {"calculator": 1})]),
        scored("validation", 0, 0.0, [(ANSWER, "q", {})]),
    ]
    annotated = routing.annotate(batch)
    # λ = 1: from the first turn on 1 − 1 and 1 − 2; from the second on 1 and 1 − 1. Notes do not tell states apart.
    assert [s.router.turn_advantages for s in annotated] == [(1.0, 1.0), (-1.0, -1.0), ()]
    assert [s.router.turn_returns for s in annotated] == [(0.0, 1.0), (-1.0, 0.0), ()]
    assert [s.router.reward for s in annotated] == [0.0, -1.0, None]
    metrics = routing.learn(batch)
    taught = [(e.samples[0].route, e.samples[0].advantage) for e in routing.model.taught]
    assert taught == [(1, 1.0), (0, 1.0), (1, -1.0), (2, -1.0)]
    assert metrics["router/cost/mean"] == 1.5
    assert metrics["router/rollouts_lost"] == 1.0
    assert metrics["router/frac_state_alone"] == 0.0
    assert metrics["router/turns/SEARCH-FAMILY"] == 2.0
    assert routing.budgets.lambdas["cost"] > 1.0  # 1.5 calls were spent, 0.5 are allowed


def test_exploring_samples_and_repeats_itself() -> None:
    first, second = (router().decide([TASK], 4, 0)[0].turns for _ in range(2))

    def routes(turns: Any) -> list[str]:
        async def sample() -> list[str]:
            return [(await turns.route(t, TASK.prompt, [1], offset)).route for t in range(5) for offset in range(8)]

        return asyncio.run(sample())

    assert routes(first) == routes(second)
    assert set(routes(first)) == {ANSWER, SEARCH, CALCULATE}


def test_delivery_follows_the_shift_or_the_mode() -> None:
    async def chosen(routing: Any) -> str:
        (decision,) = routing.decide([TASK], 1, 0, label="eval", explore=False)
        return str((await decision.turns.route(0, TASK.prompt, [1], 0)).route)

    calibrated = router()
    calibrated.calibration = TurnCalibration(
        units=("cost",),
        limits=(0.5,),
        rows=1,
        rolled_out=1,
        costs=(0.5,),
        standard_errors=(0.0,),
        score=1.0,
        shifts=(-9.0, -9.0),
        share=0.5,
    )
    assert asyncio.run(chosen(calibrated)) == SEARCH
    assert asyncio.run(chosen(router(eval_mode="argmax"))) == ANSWER
    (shifted,) = calibrated.decide_shifted([TASK], 9.0, 0)
    assert asyncio.run(shifted.turns.route(0, TASK.prompt, [1], 0)).route == ANSWER
    assert calibrated.delivers_budgets
    restored = router()
    restored.load_state_dict(calibrated.state_dict())
    assert restored.calibration == calibrated.calibration


@pytest.mark.parametrize(
    "settings",
    [
        {"sampling": "stratified"},
        {"sampling": "one"},
        {"mode": "value"},
        {"layers": [0, -1]},
        {"label_coef": 1.0},
        {"warm_start_epochs": 1},
        {"divide_by_std": True},
        {"standardize_by_kind": True},
        {"prices": {"usd": {"*": 1.0, "tokens_1k": 1.0}}},
        {"prices": {"usd": {"*": 1.0}, "wait": {"seconds": 1.0}}},
        {"cost": "prices", "cost_kwargs": {"prices": {"usd": {"*": 1.0, "tokens_1k": 1.0}}}},
        {"budgets": [{"limit": 1.0}, {"limit": 1.0, "unit": "search"}]},
        {
            "routes": [{"name": "a"}, {"name": "b", "policy": "expert", "price": 1.0}],
            "policies": {"expert": {"base_url": "http://x", "model": "m"}},
        },
    ],
    ids=str,
)
def test_what_does_not_work_at_every_turn_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r'every = "turn" does not work with'):
        RouterConfig.model_validate({"enable": True, "every": "turn", **settings})
    RouterConfig.model_validate({"enable": True, **settings})


def test_without_a_calibration_a_turn_router_does_not_send_one_to_what_refuses_it() -> None:
    assert "eval --budgets" in uncalibrated(False)
    assert uncalibrated(False, by_turn=True).endswith("train with router.calibration and at least 256 tasks")


def test_a_mask_needs_turns_and_a_frozen_actor() -> None:
    with pytest.raises(ValidationError, match="train_actor = false"):
        RouterConfig(enable=True, every="turn", turn_mask="decode")
    with pytest.raises(ValidationError, match=r'set every = "turn"'):
        RouterConfig(turn_mask="decode")


def test_an_engine_that_cannot_read_conversations_is_refused() -> None:
    config = RunConfig.model_validate({"router": {"enable": True, "every": "turn"}})
    with pytest.raises(ConfigError, match="does not read conversations"):
        turn_engine(config, SimpleNamespace(engine=object()))  # type: ignore[arg-type]
