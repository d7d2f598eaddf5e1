"""The router of a trained head, without learning: one route per prompt, its conditioned prompt, and what it costs.

decide   original prompt ─► predict ─► route ─► conditioned prompt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import Any

from toolwise.config.router import RouterConfig
from toolwise.errors import ContextFullError
from toolwise.protocols import Router
from toolwise.routing.actions import ROUTES, RouteAction
from toolwise.routing.budget import Budgets
from toolwise.routing.cost import CallsCost, Cost
from toolwise.routing.options import Conditioning
from toolwise.routing.overspend import overspend
from toolwise.routing.prompts import allowed_tools
from toolwise.routing.samples import RoutePrediction, RoutePredictor
from toolwise.routing.usage import counts_written_calls, usage_of, written_usage
from toolwise.tools.base import BaseTool
from toolwise.types import CountUsage, Rollout, RouteDecision, ScoredRollout, StepData, Task

_UNIFORM = RoutePrediction((-math.log(len(ROUTES)),) * len(ROUTES))
"""For a prompt that does not fit the context."""


@dataclass(frozen=True, slots=True)
class PredictedPrompt:
    """A prompt with the head's prediction and the random numbers for its routes."""

    task: Task
    prompt_id: str
    prediction: RoutePrediction
    fits: bool
    """Whether the prompt fits the context; the prediction is uniform if not."""
    rng: Random


@dataclass(eq=False)
class InferenceRouter(Router):
    model: RoutePredictor
    _: KW_ONLY
    prompt_of: Callable[[Task], Sequence[int]]
    """Returns the tokens of a task's original prompt."""
    tools: Mapping[str, BaseTool]
    budgets: Budgets
    cost: Cost = field(default_factory=CallsCost)
    conditioning: Conditioning = field(default_factory=Conditioning)
    training: RouterConfig = field(default_factory=RouterConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        self.budgets.check_units(self.cost.units)

    @property
    def multipliers(self) -> list[float]:
        return list(self.budgets.lambdas.values())

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = False
    ) -> list[RouteDecision]:
        """One decision per prompt, random for a prompt that does not fit the context. Only a router that learns
        explores."""
        return [
            self._decision(prompt, self._choose(prompt.prediction, prompt.rng), n)
            for prompt in self._prompts(tasks, step, label, averaged=True)
        ]

    def _prompts(self, tasks: Sequence[Task], step: int, label: str, *, averaged: bool) -> Iterator[PredictedPrompt]:
        predictions = self._predict([self.prompt_of(task) for task in tasks], averaged=averaged)
        for index, (task, prediction) in enumerate(zip(tasks, predictions, strict=True)):
            prompt_id = f"{label}-{step}/{index}/{task.task_id}"
            rng = Random(f"route/{self.seed}/{prompt_id}")
            yield PredictedPrompt(task, prompt_id, prediction or _UNIFORM, prediction is not None, rng)

    def _predict(self, prompts: Sequence[Sequence[int]], *, averaged: bool = False) -> list[RoutePrediction | None]:
        """None for prompts that do not fit the context; the others are still predicted."""
        try:
            return list(self.model.predict(prompts, self.multipliers, averaged=averaged))
        except ContextFullError:
            if len(prompts) == 1:
                return [None]
            half = len(prompts) // 2
            return [
                *self._predict(prompts[:half], averaged=averaged),
                *self._predict(prompts[half:], averaged=averaged),
            ]

    def _choose(self, prediction: RoutePrediction, rng: Random) -> int:
        return prediction.sample(rng) if self.training.eval_mode == "sample" else prediction.argmax()

    def _decision(self, prompt: PredictedPrompt, route_index: int, n: int) -> RouteDecision:
        route = ROUTES[route_index]
        return self.conditioning.decision(
            prompt.task,
            route,
            self.tools,
            group_id=f"{prompt.prompt_id}/{route}",
            n=n,
            seed=prompt.rng.getrandbits(48),
            prompt_id=prompt.prompt_id,
            log_prob=prompt.prediction.logprobs[route_index],
            count_usage=self._usage_counter(prompt.task),
        )

    def _usage_counter(self, task: Task) -> CountUsage | None:
        """Where no tool is executed, the tools' own accounting would be 0 everywhere: counts the calls in the text, in
        the first budget's unit."""
        if not counts_written_calls(task, self.training.usage):
            return None
        families = self.conditioning.families_of(task, self.tools)
        unit = next(iter(self.budgets.lambdas), self.cost.units[0])

        def count(steps: Sequence[StepData]) -> tuple[Mapping[str, int], float]:
            usage = written_usage(steps, families)
            return usage.calls_by_tool, self.cost(usage)[unit]

        return count

    def _costs(self, rollout: Rollout, route: RouteAction) -> Mapping[str, float]:
        """unit -> cost of a rollout under `route`"""
        families = self.conditioning.families_of(rollout.task, self.tools)
        allowed = allowed_tools(route, families, hard=self.conditioning.router.hard)
        return self.cost(usage_of(rollout, families, allowed=allowed, source=self.training.usage))

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """How far rollouts routed by this router exceed its budgets; None without budgets or rollouts."""
        answered = [s.rollout for s in scored if not s.rollout.unanswered]
        routed = [(rollout, RouteAction.parse(rollout.route)) for rollout in answered if rollout.route is not None]
        limits = {unit: multiplier.budget.limit for unit, multiplier in self.budgets.multipliers.items()}
        if not routed or not limits:
            return None
        costs = [self._costs(rollout, route) for rollout, route in routed]
        return overspend({unit: [cost[unit] for cost in costs] for unit in limits}, limits)

    def load(self, folder: Any) -> None:
        """Loads the head and the λ that were saved next to a model's weights."""
        self.budgets.set_lambdas(self.model.load(folder).get("multipliers") or {})
