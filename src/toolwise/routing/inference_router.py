"""The router of a trained head, without learning.

decide   original prompt ─► predict ─► route ─► conditioned prompt
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from random import Random
from statistics import fmean
from typing import Any, ClassVar

from toolwise.config.router import RouterConfig
from toolwise.errors import ContextFullError
from toolwise.protocols import Metrics, Router
from toolwise.routing.budget import Budgets, delivered_metrics
from toolwise.routing.budget_bins import BINS_KEY, BudgetBins
from toolwise.routing.calibration import KEY, BudgetCalibration, read_budget_calibration, spending
from toolwise.routing.conditioning import PROMPT_BATCH_SIZE, Conditioning
from toolwise.routing.cost import (
    CallsCost,
    Cost,
    counts_written_calls,
    written_usage,
)
from toolwise.routing.delivered_budget import DeliveredBudget, uncalibrated
from toolwise.routing.families import Family
from toolwise.routing.routes import RouteSet, check_prices
from toolwise.routing.samples import RoutePrediction, RoutePredictor
from toolwise.types import CountUsage, Rollout, RouteDecision, RouterCredit, ScoredRollout, StepData, Task

log = logging.getLogger("toolwise")


@dataclass(frozen=True, slots=True)
class Spent:
    """What a rollout used. Rollouts that made the same calls on the same route share one."""

    costs: Mapping[str, float]
    """By unit."""
    cost: float
    """In the unit of the first budget."""
    used: tuple[bool, bool, bool]
    """Whether it used any tool, searched, calculated."""

    def credit(self, reward: float | None = None, advantage: float | None = None) -> RouterCredit:
        """With what the router learns from the rollout; None: nothing."""
        return RouterCredit(*self.used, cost=self.cost, reward=reward, advantage=advantage)


@dataclass(frozen=True, slots=True)
class PredictedPrompt:
    """A prompt with the head's prediction and the random numbers for its routes."""

    task: Task
    prompt_id: str
    prediction: RoutePrediction
    rng: Random
    bin: int | None = None
    """Its budget, if budgets are random."""
    fits: bool = True
    """Whether the prompt fits the context; if not, the prediction is uniform and not learned from."""


@dataclass(eq=False)
class InferenceRouter(Router):
    model: RoutePredictor
    _: KW_ONLY
    prompt_of: Callable[[Task], Sequence[int]]
    """Returns the tokens of a task's original prompt."""
    budgets: Budgets
    cost: Cost = field(default_factory=CallsCost)
    conditioning: Conditioning = field(default_factory=Conditioning)
    seed: int = 0
    calibration: DeliveredBudget | None = None
    """Thresholds for the budgets, from tasks that were never learned from."""
    calibration_key: ClassVar[str] = KEY
    """Where the metadata of a head and the router's state have the calibration."""
    bins: BudgetBins | None = None
    """The random budgets, each with its own thresholds."""
    _prepared: dict[str, tuple[Task, Sequence[int]]] = field(default_factory=dict, init=False)
    """task id -> the task and the tokens of its prompt"""

    def __post_init__(self) -> None:
        self.budgets.check_units(self.cost.units)
        check_prices(self.routes, self.cost.units, max_cost=self.config.max_cost, unit=self.unit)

    @property
    def unit(self) -> str:
        """That of the first budget."""
        return next(iter(self.budgets.lambdas), self.cost.units[0])

    @property
    def routes(self) -> RouteSet:
        return self.conditioning.routes

    @property
    def config(self) -> RouterConfig:
        return self.conditioning.router

    @property
    def multipliers(self) -> list[float]:
        return list(self.budgets.lambdas.values())

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = False
    ) -> list[RouteDecision]:
        """One decision per prompt, random for a prompt that does not fit the context. Only a router that learns
        explores."""
        return [self._decision(p, self._choose(p), n) for p in self._prompts(tasks, step, label, averaged=True)]

    def _choose(self, prompt: PredictedPrompt) -> int:
        mode, prediction = self.config.eval_mode, prompt.prediction
        calibration = self.calibration
        if self.bins is not None and self.bins.calibrations and prompt.bin is not None:
            calibration = self.bins.calibrations[prompt.bin]
        if mode == "budget" and isinstance(calibration, BudgetCalibration) and prompt.fits:
            return calibration.route(prediction, prompt.task.prompt)
        return prediction.argmax() if mode == "argmax" else prediction.sample(prompt.rng)

    def prepare(self, task: Task) -> None:
        """Render and tokenize the prompt of a task that will be decided next, and condition it on its routes, while
        there is time."""
        self._prepared[task.task_id] = task, self.prompt_of(task)
        for route in self.conditioning.routes_of(task):
            self.conditioning.conditioned(task, route)

    def _tokens_of(self, tasks: Sequence[Task]) -> list[Sequence[int]]:
        """The tokens of the tasks' original prompts. Whatever was prepared for others is forgotten."""
        prepared, self._prepared = self._prepared, {}
        found = []
        for task in tasks:
            other, tokens = prepared.get(task.task_id, (None, ()))
            if other is not None and other == task:
                self.conditioning.carry_over(other, task)
                found.append(tokens)
            else:
                found.append(self.prompt_of(task))
        return found

    def decide_all(self, tasks: Sequence[Task], step: int, bins: Sequence[int] | None = None) -> list[RouteDecision]:
        """Every task under every route that applies to it, once; nothing is learned from it. `bins` are the random
        budgets that agents are told."""
        return [
            self.conditioning.decision(
                task,
                route,
                group_id=f"calibration-{step}/{index}/{task.task_id}/{route}",
                n=1,
                seed=Random(f"calibration/{self.seed}/{step}/{task.task_id}/{route}").getrandbits(48),
                prompt_id=f"calibration-{step}/{index}/{task.task_id}",
                count_usage=self._usage_counter(task),
                budget=None if bins is None or self.bins is None else self.bins.values[bins[index]],
            )
            for index, task in enumerate(tasks)
            for route in self.conditioning.routes_of(task)
        ]

    def predict_delivered(self, tasks: Sequence[Task]) -> list[RoutePrediction | None]:
        """The predictions of the head that is saved; None for prompts that do not fit the context. Equal prompts are
        encoded once."""
        prompts = [tuple(self.prompt_of(task)) for task in tasks]
        distinct = list(dict.fromkeys(prompts))
        parts = [distinct[start : start + PROMPT_BATCH_SIZE] for start in range(0, len(distinct), PROMPT_BATCH_SIZE)]
        predictions = [prediction for part in parts for prediction in self._predict(part, averaged=True)]
        by_prompt = dict(zip(distinct, predictions, strict=True))
        return [
            None if prediction is None else prediction.restricted(self.conditioning.applicable(task))
            for task, prediction in zip(tasks, (by_prompt[prompt] for prompt in prompts), strict=True)
        ]

    def _prompts(self, tasks: Sequence[Task], step: int, label: str, *, averaged: bool) -> Iterator[PredictedPrompt]:
        """With random budgets, prompts that are learned from draw one, the others get the default."""
        predictions = self._predict(self._tokens_of(tasks), averaged=averaged)
        for index, (task, prediction) in enumerate(zip(tasks, predictions, strict=True)):
            prompt_id = f"{label}-{step}/{index}/{task.task_id}"
            rng = Random(f"route/{self.seed}/{prompt_id}")
            drawn = None
            if self.bins is not None:
                budget_rng = Random(f"budget/{self.seed}/{prompt_id}")
                drawn = self.bins.pick(None, task.prompt) if averaged else self.bins.draw(budget_rng)
            known = (prediction or self._uniform).at(drawn).restricted(self.conditioning.applicable(task))
            yield PredictedPrompt(task, prompt_id, known, rng, drawn, fits=prediction is not None)

    @property
    def _uniform(self) -> RoutePrediction:
        """For a prompt that does not fit the context."""
        return RoutePrediction((-math.log(len(self.routes)),) * len(self.routes))

    def _predict(self, prompts: Sequence[Sequence[int]], *, averaged: bool = False) -> list[RoutePrediction | None]:
        """None for prompts that do not fit the context; the others are still predicted."""
        try:
            return list(self.model.predict(prompts, self.multipliers, averaged=averaged))
        except ContextFullError:
            if len(prompts) == 1:
                return [None]
            half = len(prompts) // 2
            return [p for part in (prompts[:half], prompts[half:]) for p in self._predict(part, averaged=averaged)]

    def _decision(self, prompt: PredictedPrompt, route_index: int, n: int) -> RouteDecision:
        route = self.routes.names[route_index]
        return self.conditioning.decision(
            prompt.task,
            route,
            group_id=f"{prompt.prompt_id}/{route}",
            n=n,
            seed=prompt.rng.getrandbits(48),
            prompt_id=prompt.prompt_id,
            prediction=prompt.prediction,
            count_usage=self._usage_counter(prompt.task),
            budget=None if self.bins is None or prompt.bin is None else self.bins.values[prompt.bin],
        )

    def _usage_counter(self, task: Task) -> CountUsage | None:
        """Where no tool is executed, the tools' own accounting would be 0 everywhere: counts the calls in the text, in
        the first budget's unit."""
        if not counts_written_calls(task, self.config.usage):
            return None
        families = self.conditioning.families_of(task)

        def count(steps: Sequence[StepData]) -> tuple[Mapping[str, int], float]:
            usage = written_usage(steps, families)
            return usage.calls_by_tool, self.cost(usage)[self.unit]

        return count

    def costs_of(self, rollout: Rollout) -> dict[str, float]:
        """By unit."""
        return self.conditioning.costs_of(self.cost, rollout)

    def annotate(self, scored: Sequence[ScoredRollout]) -> Sequence[ScoredRollout]:
        """The rollouts with what each used, for the records; a router that learns adds its rewards and advantages."""
        return [replace(s, router=spent.credit()) for s, spent in zip(scored, self._spent(scored), strict=True)]

    def _spent(self, scored: Sequence[ScoredRollout]) -> list[Spent]:
        """What each rollout used and what it cost."""
        unit, known = self.unit, dict[Hashable, Spent]()
        spent = []
        for s in scored:
            key = self.conditioning.usage_key(self.cost, s.rollout)
            found = None if key is None else known.get(key)
            if found is None:
                found = self._spent_by(s.rollout, unit)
                if key is not None:
                    known[key] = found
            spent.append(found)
        return spent

    def _spent_by(self, rollout: Rollout, unit: str) -> Spent:
        usage = self.conditioning.usage_of(rollout)
        costs, calls = self.conditioning.costs_of(self.cost, rollout, usage=usage), usage.calls
        return Spent(costs, costs[unit], (usage.used_any_tool, calls[Family.SEARCH] > 0, calls[Family.CALCULATE] > 0))

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """How far rollouts routed by this router exceed its budgets; None without budgets or rollouts. If it is
        calibrated, up to two standard errors more than the usual tolerance count as chance."""
        costs = self._delivered(scored)
        if not costs or not self.budgets.multipliers:
            return None
        return self.budgets.overspend(costs, chance=2.0 if self.delivers_budgets else 0.0)

    @property
    def delivers_budgets(self) -> bool:
        return self.config.eval_mode == "budget" and self.calibration is not None and self.calibration.feasible

    def _delivered(self, scored: Sequence[ScoredRollout]) -> list[dict[str, float]]:
        routed = [s.rollout for s in scored if not s.rollout.unanswered and s.rollout.route is not None]
        return [self.costs_of(rollout) for rollout in routed]

    def budget_metrics(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """What a validation spent in each unit, against its budget; and if the router is calibrated, the score it would
        have had at exactly the budget, so that validations are compared at equal cost."""
        costs, limits = self._delivered(scored), self.budgets.limits
        if not costs or not limits:
            return {}
        means = {unit: fmean(cost[unit] for cost in costs) for unit in limits}
        metrics = delivered_metrics(costs, limits, self.config.max_cost)
        valid = [s.score for s in scored if s.result.has_valid_score]
        if self.delivers_budgets and self.calibration is not None and valid:
            beyond = spending(list(means.values()), limits) - spending(self.calibration.costs, limits)
            metrics["budget/score"] = fmean(valid) - self.calibration.slope * beyond
        return metrics

    def load(self, folder: Any) -> None:
        """Loads the head, the λ and the calibration that were saved next to a model's weights."""
        metadata = self.model.load(folder)
        self.budgets.set_lambdas(metadata.get("multipliers") or {})
        self.calibration = self._read_calibration(metadata)
        if self.bins is not None:
            self.bins.load_calibrations(metadata.get(BINS_KEY) or ())
        if self.calibration is None and self.budgets.limits and self.config.eval_mode == "budget":
            log.warning("%s", uncalibrated(self.calibration_key in metadata, by_turn=self.config.every == "turn"))

    def _read_calibration(self, state: Mapping[str, Any]) -> DeliveredBudget | None:
        """The calibration among saved metadata or state."""
        return read_budget_calibration(state, self.budgets.limits)
