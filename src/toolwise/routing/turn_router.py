"""The router that chooses at every turn: the head reads the conversation so far, and the turn gets the route's tools.

decide   one group of rollouts per prompt, whose turns ask `TurnChooser` for their routes
learn    scored rollouts ─► rewards and costs from each turn on ─► advantages (turn_credit.py) ─► the head; then λ
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from random import Random
from typing import Any, ClassVar

from toolwise.advantages.anchors import StateAnchor
from toolwise.advantages.step_rewards import episodes_of
from toolwise.protocols import Metrics, PrefixEngine
from toolwise.routing.current_spending import current_prediction, weighted_costs
from toolwise.routing.delivered_budget import DeliveredBudget
from toolwise.routing.families import Family
from toolwise.routing.inference_router import InferenceRouter, Spent
from toolwise.routing.pending import RemembersPrompts
from toolwise.routing.prompts import unconditioned
from toolwise.routing.samples import RoutePrediction, RouterExample, RouterModel, RouteSample
from toolwise.routing.turn_calibration import KEY, TurnCalibration, read_turn_calibration, shifted_route
from toolwise.routing.turn_choice import (
    TurnChooser,
    spending_weights,
    total_costs,
    turn_costs,
    turn_decision,
    turn_usages,
)
from toolwise.routing.turn_credit import TurnAdvantages, TurnOutcome, credit_turns, sums_to_go
from toolwise.types import Rollout, RouteDecision, ScoredRollout, StepData, Task


@dataclass(eq=False)
class TurnRouter(InferenceRouter):
    """Routes at every turn, without learning."""

    _: KW_ONLY
    engine: PrefixEngine
    """Reads the conversation; the turn is generated from the same prefix."""
    calibration_key: ClassVar[str] = KEY

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = False
    ) -> list[RouteDecision]:
        return [
            self.decision_for(f"{label}-{step}/{index}/{task.task_id}", task, n) for index, task in enumerate(tasks)
        ]

    def decide_shifted(self, tasks: Sequence[Task], shift: float, step: int) -> list[RouteDecision]:
        """Every task once, with the best routes after a shift; nothing is learned from it."""
        return [
            self.decision_for(f"calibration-{step}/{index}/{task.task_id}", task, 1, shift=shift)
            for index, task in enumerate(tasks)
        ]

    def turn_state(self) -> dict[str, Any]:
        """What decides the routes of turns at the moment, as plain values and tensors: see `at_state`."""
        calibration = None if self.calibration is None else self.calibration.to_json()
        return {"model": self.model.prediction_state(), "lambdas": self.budgets.lambdas, KEY: calibration}

    def at_state(self, state: Mapping[str, Any]) -> TurnRouter:
        """A router that routes as the one whose `turn_state` this is, over the engine and the prompts of this one."""
        other = copy.copy(self)
        other.model, other.budgets = self.model.at_state(state["model"]), copy.deepcopy(self.budgets)
        other.budgets.set_lambdas(state["lambdas"])
        other.calibration = self._read_calibration(state)
        return other

    def decision_for(
        self, prompt_id: str, task: Task, n: int, *, explore: bool = False, shift: float | None = None
    ) -> RouteDecision:
        """`explore`: sample routes from the head that learns. `shift`: take the best ones after this shift."""

        def choose(prediction: RoutePrediction, turn: int, offset: int) -> int:
            if shift is not None:
                return shifted_route(prediction, self._weights(task), shift, task.prompt, turn)
            if explore:
                return self._sampled(prediction, prompt_id, turn, offset)
            return self._delivered_route(prediction, task, prompt_id, turn, offset)

        async def predict(prompt_ids: Sequence[int]) -> RoutePrediction:
            features = await self.engine.encode(prompt_ids, pool=self.config.pool)
            return self.model.predict_encoded(prompt_ids, features, self.multipliers, averaged=not explore)

        decision = turn_decision(
            TurnChooser(task, self.conditioning, predict, choose, explore, shift),
            group_id=prompt_id,
            n=n,
            seed=Random(f"route/{self.seed}/{prompt_id}").getrandbits(48),
            prompt_id=prompt_id,
        )
        return replace(decision, count_usage=self._usage_counter(task))

    def _sampled(self, prediction: RoutePrediction, prompt_id: str, turn: int, offset: int) -> int:
        return prediction.sample(Random(f"turn/{self.seed}/{prompt_id}/{offset}/{turn}"))

    def _delivered_route(self, prediction: RoutePrediction, task: Task, prompt_id: str, turn: int, offset: int) -> int:
        if self.config.eval_mode == "budget" and isinstance(self.calibration, TurnCalibration):
            return self.calibration.route(prediction, self._weights(task), task.prompt, turn)
        if self.config.eval_mode == "argmax":
            return prediction.argmax()
        return self._sampled(prediction, prompt_id, turn, offset)

    def _weights(self, task: Task) -> tuple[float, ...]:
        return spending_weights(self.conditioning, self.cost, task, self.unit)

    def costs_of(self, rollout: Rollout) -> dict[str, float]:
        return total_costs(self.cost, self.costs_by_turn(rollout))

    def costs_by_turn(self, rollout: Rollout) -> list[dict[str, float]]:
        return turn_costs(self.conditioning, self.cost, rollout)

    def _spent(self, scored: Sequence[ScoredRollout]) -> list[Spent]:
        return [self._spent_by(s.rollout, self.unit) for s in scored]  # the same calls may be of other turns

    def _spent_by(self, rollout: Rollout, unit: str) -> Spent:
        usages, costs = turn_usages(self.conditioning, rollout), self.costs_of(rollout)
        search, calculate = (any(u.calls[f] for u in usages) for f in (Family.SEARCH, Family.CALCULATE))
        return Spent(costs, costs[unit], (any(usage.used_any_tool for usage in usages), search, calculate))

    def _delivered(self, scored: Sequence[ScoredRollout]) -> list[dict[str, float]]:
        return [self.costs_of(s.rollout) for s in scored if s.rollout.turn_routes and not s.rollout.unanswered]

    def _read_calibration(self, state: Mapping[str, Any]) -> DeliveredBudget | None:
        return read_turn_calibration(state, self.budgets.limits)


@dataclass(frozen=True, slots=True)
class _StepCredit:
    """What the turns of a step's rollouts teach."""

    given: list[str]
    """Ids of all rollouts of the step."""
    rollouts: list[ScoredRollout]
    """Those that are learned from."""
    outcomes: list[TurnOutcome]
    predictions: list[RoutePrediction]
    routes: list[int]
    credit: TurnAdvantages
    spent: Mapping[str, list[float]]
    """unit -> the cost of each rollout"""


@dataclass(eq=False)
class LearnedTurnRouter(TurnRouter, RemembersPrompts):
    """Learns from the rollouts whose turns it routed by sampling."""

    model: RouterModel
    _: KW_ONLY
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Saved with the head."""
    stale: bool = False
    """As in `LearnedRouter`."""
    _pending: set[str] = field(default_factory=set, init=False)
    """Ids of the groups whose rollouts are in progress."""
    _step: _StepCredit | None = field(default=None, init=False)
    """The credit of the step that `annotate` saw, until `learn` uses it."""

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        if not explore:
            return super().decide(tasks, n, step, label=label)
        decisions = [
            self.decision_for(f"{label}-{step}/{index}/{task.task_id}", task, n, explore=True)
            for index, task in enumerate(tasks)
        ]
        self._pending |= {decision.group_id for decision in decisions}
        return decisions

    def pending_of(self, groups: Sequence[str]) -> dict[str, Any]:
        return {group: True for group in groups if group in self._pending}

    def add_pending(self, pending: Mapping[str, Any]) -> None:
        self._pending |= set(pending)

    def forget(self, groups: Sequence[str]) -> None:
        self._pending -= set(groups)

    def annotate(self, scored: Sequence[ScoredRollout]) -> Sequence[ScoredRollout]:
        """With the router's reward of each rollout that it will learn from, and the advantage of each turn's route."""
        used = super().annotate(scored)
        if not any(s.rollout.group_id in self._pending for s in scored):
            return used
        step = self._step = self._credit(scored)
        lambdas = self.budgets.lambdas
        turns: dict[str, list[tuple[float, float]]] = {s.rollout.rollout_id: [] for s in step.rollouts}
        for outcome, advantage in zip(step.outcomes, step.credit.advantages, strict=True):
            turns[outcome.rollout_id].append((advantage, outcome.net(lambdas)))
        return [_with_turns(s, turns.get(s.rollout.rollout_id, [])) for s in used]

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        step, self._step = self._step, None
        if step is None or step.given != [s.rollout.rollout_id for s in scored]:
            step = self._credit(scored)
        self._pending -= {s.rollout.group_id for s in scored}  # in asynchronous training others are under way
        self.budgets.observe(self._spent_now(step) if self.stale else step.spent)
        units = tuple(self.budgets.lambdas)
        examples = [
            RouterExample(
                prediction,
                (RouteSample(route, outcome.reward, tuple(outcome.costs[unit] for unit in units), advantage),),
            )
            for prediction, route, outcome, advantage in zip(
                step.predictions, step.routes, step.outcomes, step.credit.advantages, strict=True
            )
        ]
        metrics = self.model.learn(examples, self.multipliers) | self._report(step, lost=len(scored))
        self.budgets.step()  # last: the advantages use the λ that the routes were sampled with
        return metrics | self.budgets.metrics()

    def _spent_now(self, step: _StepCredit) -> Mapping[str, Sequence[float]]:
        """The costs, weighted by how much likelier the head as it is now would route a rollout that way."""
        ratios = [
            current_prediction(self.model, prediction, self.multipliers).logprobs[route] - prediction.logprobs[route]
            for prediction, route in zip(step.predictions, step.routes, strict=True)
        ]
        logs, index = [], 0
        for s in step.rollouts:
            logs.append(math.fsum(ratios[index : index + len(s.steps)]))
            index += len(s.steps)
        costs = [{unit: spent[i] for unit, spent in step.spent.items()} for i in range(len(step.rollouts))]
        return weighted_costs(costs, logs, self.cost.units)

    def _credit(self, scored: Sequence[ScoredRollout]) -> _StepCredit:
        usable = [
            s
            for s in scored
            if s.rollout.group_id in self._pending
            and s.result.has_valid_score
            and s.rollout.trainable
            and s.rollout.steps
        ]
        outcomes, predictions, routes = [], [], []
        spent: dict[str, list[float]] = {unit: [] for unit in self.cost.units}
        for s in usable:
            costs = self.costs_by_turn(s.rollout)
            for unit, total in total_costs(self.cost, costs).items():
                spent[unit].append(total)
            outcomes += _outcomes(s, costs, self.cost.units)
            chosen = s.rollout.turn_routes[: len(s.steps)]
            predictions += [route.prediction for route in chosen]
            routes += [self.routes.index(route.route) for route in chosen]
        return _StepCredit(
            given=[s.rollout.rollout_id for s in scored],
            rollouts=usable,
            outcomes=outcomes,
            predictions=predictions,
            routes=routes,
            credit=credit_turns(outcomes, self.budgets.lambdas),
            spent=spent,
        )

    def _report(self, step: _StepCredit, *, lost: int) -> Metrics:
        probs, credit = [prediction.probs for prediction in step.predictions], step.credit
        alone = [not by_state for by_state in credit.by_state]
        return {
            **{f"router/share/{route}": _mean([p[i] for p in probs]) for i, route in enumerate(self.routes.names)},
            **{
                f"router/turns/{route}": float(sum(r == i for r in step.routes))
                for i, route in enumerate(self.routes.names)
            },
            "router/r_task": _mean([s.score for s in step.rollouts]),
            "router/prompts": float(len({s.rollout.group_id for s in step.rollouts})),
            "router/rollouts_lost": float(lost - len(step.rollouts)),
            "router/turns_per_rollout": len(step.outcomes) / max(1, len(step.rollouts)),
            "router/frac_state_alone": _mean([float(x) for x in alone]),
            "router/frac_uncompared": _mean([float(not x) for x in credit.compared]),
            **{f"router/{unit}/mean": _mean(costs) for unit, costs in step.spent.items()},
        }

    def save(self, folder: Any) -> None:
        calibration = {} if self.calibration is None else {KEY: self.calibration.to_json()}
        self.model.save(folder, {**self.metadata, "multipliers": self.budgets.lambdas, **calibration})

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "budgets": self.budgets.state_dict(),
            KEY: None if self.calibration is None else self.calibration.to_json(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.budgets.load_state_dict(state["budgets"])
        self.calibration = self._read_calibration(state)
        self._pending, self._step = set(), None


def _with_turns(scored: ScoredRollout, turns: Sequence[tuple[float, float]]) -> ScoredRollout:
    """With the advantage and the return of each turn."""
    if scored.router is None or not turns:
        return scored
    advantages, returns = zip(*turns, strict=True)
    credit = replace(scored.router, reward=returns[0], turn_advantages=advantages, turn_returns=returns)
    return replace(scored, router=credit)


def _outcomes(scored: ScoredRollout, costs: Sequence[Mapping[str, float]], units: Sequence[str]) -> list[TurnOutcome]:
    """One per turn: the rewards from it on, which add up to the score, and the costs."""
    rollout = scored.rollout
    # A route's note must not tell states apart: the state is what was there when the route was chosen.
    steps = [_unrouted(step) for step in scored.steps]
    episode = episodes_of([steps], [scored.score], [rollout.group_id], terminal_score="remainder")
    rewards = sums_to_go(episode.rewards.tolist())
    to_go = {unit: sums_to_go([turn[unit] for turn in costs]) for unit in units}
    states = StateAnchor().keys(steps)
    return [
        TurnOutcome(
            rollout.group_id, rollout.rollout_id, turn, states[turn], rewards[turn], {u: to_go[u][turn] for u in units}
        )
        for turn in range(len(steps))
    ]


def _unrouted(step: StepData) -> StepData:
    return step.model_copy(update={"observation_data": unconditioned(step.observation_data)})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
