"""A trained router that chooses at every turn of an answer, by the shift that delivers its budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from toolwise.agent.inference import RouteChoice, TrainedRouter, warn_sampled
from toolwise.errors import QuestionError
from toolwise.messages import Message
from toolwise.protocols import PrefixEngine
from toolwise.routing.calibration import prompt_uniform
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.turn_calibration import TurnCalibration
from toolwise.routing.turn_choice import (
    TurnChooser,
    refused_turn_calls,
    spending_weights,
    total_costs,
    turn_costs,
    turn_decision,
    turn_route,
)
from toolwise.types import Rollout, Task, TurnRoute

ROUTE_SEPARATOR = " > "
"""Between the routes of turns, where they are shown as one text."""


@dataclass(frozen=True, kw_only=True)
class TrainedTurnRouter(TrainedRouter):
    engine: PrefixEngine
    shift: TurnCalibration | None = None
    """Fitted in training, for the trained budget."""

    async def route_question(
        self, task: Task, *, budget: float | None, route: str | None, cap: float | None, seed: int
    ) -> RouteChoice:
        self._check_budget(budget)
        self._check_cap(cap)
        chooser = TurnChooser(task, self.conditioning, self._predict, self._chooser(task, seed))
        turns = chooser if route is None else FixedRoute(chooser, route)
        decision = turn_decision(chooser, group_id=f"{task.task_id}/TURNS", n=1, seed=seed, prompt_id=task.task_id)
        return RouteChoice(replace(decision, turns=turns))

    def _check_budget(self, budget: float | None) -> None:
        trained = [each.limit for each in self.config.router.budgets]
        if budget is not None and [budget] != trained:
            known = f" ({trained[0]:g})" if trained else ""
            raise QuestionError(
                f"a router that chooses at every turn is calibrated for its trained budget{known} alone: leave the "
                "budget out, or train with another one",
                "budget",
            )

    async def _predict(self, prompt_ids: Sequence[int]) -> RoutePrediction:
        features = await self.engine.encode(prompt_ids, pool=self.predictor.head.settings.pool)
        return self.predictor.predict_encoded(prompt_ids, features, self.multipliers)

    def refused_calls(self, rollout: Rollout) -> Counter[str]:
        return refused_turn_calls(self.conditioning, rollout) if self.tools else Counter()

    def _check_cap(self, cap: float | None) -> None:
        super()._check_cap(cap)
        priced = next((route.name for route in self.routes if self.route_price(route.name)), None)
        if cap is not None and priced is not None:
            raise QuestionError(
                f"the route {priced!r} has a price at every turn, which a cap cannot hold: leave the cap out",
                "max_cost",
            )

    def _chooser(self, task: Task, seed: int) -> _Choose:
        return _Choose(self, task, spending_weights(self.conditioning, self.cost, task, self.unit), seed)

    def cost_of(self, rollout: Rollout) -> float:
        turns = turn_costs(self.conditioning, self.cost, rollout, "executed" if self.tools else None)
        return total_costs(self.cost, turns)[self.unit]


@dataclass(frozen=True)
class _Choose:
    """Chooses the routes of one question."""

    router: TrainedTurnRouter
    task: Task
    weights: tuple[float, ...]
    seed: int

    def __call__(self, prediction: RoutePrediction, turn: int, offset: int) -> int:
        router, config = self.router, self.router.config.router
        if config.eval_mode == "budget" and router.shift is not None:
            return router.shift.route(prediction, self.weights, self.task.prompt, turn)
        if config.eval_mode == "argmax":
            return prediction.argmax()
        if config.eval_mode == "budget" and config.budgets:
            warn_sampled(by_turn=True)
        return prediction.sample(Random(f"{self.seed}/{turn}/{prompt_uniform(self.task.prompt)}"))


@dataclass(frozen=True)
class FixedRoute:
    """Gives every turn the same route."""

    chooser: TurnChooser
    name: str

    async def route(
        self, turn: int, messages: Sequence[Message], prompt_ids: Sequence[int], rollout_offset: int
    ) -> TurnRoute:
        return turn_route(self.chooser.conditioning, self.chooser.task, self.name, turn, messages)


def turn_probs(turn: TurnRoute, names: Sequence[str]) -> Mapping[str, float]:
    """route -> probability; empty if the route was given"""
    if turn.prediction is None:
        return {}
    return {str(name): prob for name, prob in zip(names, turn.prediction.probs, strict=True)}
