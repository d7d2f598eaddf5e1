"""A trained router with everything it needs to route: the head, its model, and how routes change prompts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from toolwise.agent.calibration import Calibration
from toolwise.concurrency.deadlines import gather_all
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError
from toolwise.routing.actions import ROUTES, RouteAction
from toolwise.routing.cost import Cost
from toolwise.routing.families import Family
from toolwise.routing.options import Conditioning
from toolwise.routing.prompts import allowed_tools
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Floats
from toolwise.routing.usage import RouteUsage, merge_unknown_calls, usage_of
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision, Task

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy
    from toolwise.routing.head.head import RouterHead


@dataclass(frozen=True, slots=True)
class TrainedRouter:
    """Chooses routes and builds the decisions to roll out; the caller rolls them out."""

    config: RunConfig
    policy: LocalPolicy
    head: RouterHead
    tools: Mapping[str, BaseTool]
    conditioning: Conditioning
    cost: Cost
    multipliers: tuple[float, ...] = ()
    """Final λ of each of the head's units; a value head uses them if no budget is given."""
    calibration: Calibration | None = None

    @property
    def unit(self) -> str:
        """Unit of budgets: that of the first budget in training."""
        budgets = self.config.router.budgets
        return budgets[0].unit if budgets else self.cost.units[0]

    def features(self, tasks: Sequence[Task]) -> Floats:
        """Inputs of the head, [tasks, width]."""
        return np.asarray(self._features(tasks).double().cpu().numpy())

    def predict(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """The head's predictions for the original prompts; one forward pass per prompt."""
        from toolwise.routing.head.head import predict_routes

        return predict_routes(self.head, self._features(tasks), self.multipliers)

    async def predict_in_engine(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """Like `predict`, but the engine encodes the prompts alongside its other requests, and the rollouts reuse the
        prefix it has cached."""
        import torch

        from toolwise.engine import Engine
        from toolwise.routing.head.head import predict_routes

        engine, settings = self.policy.engine, self.head.settings
        if not isinstance(engine, Engine) or settings.layers != (-1,):
            return self.predict(tasks)
        prompts = self._prompts(tasks)
        features = await gather_all(engine.encode(prompt, pool=settings.pool) for prompt in prompts)
        return predict_routes(self.head, torch.stack(features), self.multipliers)

    def _prompts(self, tasks: Sequence[Task]) -> list[Sequence[int]]:
        from toolwise.routing.head.builder import original_prompt

        return [original_prompt(self.policy.chat, task, self.tools) for task in tasks]

    def _features(self, tasks: Sequence[Task]) -> Any:
        import torch

        from toolwise.routing.head.features import prompt_features

        settings = self.head.settings
        with torch.no_grad():
            return prompt_features(self.policy.model, self._prompts(tasks), pool=settings.pool, layers=settings.layers)

    def choose(self, prediction: RoutePrediction, task: Task, *, budget: float | None, seed: int) -> RouteAction:
        """The route as trained, or by the threshold for `budget`. Random choices depend on the seed and the prompt."""
        rng = Random(f"{seed}/{zlib.crc32(repr([m.content for m in task.prompt]).encode('utf-8', 'replace'))}")
        if budget is None:
            sample = self.config.router.eval_mode == "sample"
            return ROUTES[prediction.sample(rng) if sample else prediction.argmax()]
        if self.calibration is None:
            raise CheckpointError(
                "this router is not calibrated, so it cannot keep to a budget: run toolwise eval CHECKPOINT --budgets …"
            )
        values, costs = values_of(prediction)
        return ROUTES[self.calibration.route(values, costs, budget, (rng.random(), rng.random()))]

    def decide(self, task: Task, route: RouteAction | None, *, n: int = 1, seed: int = 0) -> RouteDecision:
        """The decision to roll a task out `n` times under a route; None keeps the prompt and all its tools."""
        name = "ALL-TOOLS" if route is None else route.value
        if route is None:
            return RouteDecision(task, f"{task.task_id}/{name}", n, seed, task.prompt)
        return self.conditioning.decision(
            task, route, self.tools, group_id=f"{task.task_id}/{name}", n=n, seed=seed, prompt_id=task.task_id
        )

    def families_of(self, task: Task) -> dict[str, Family]:
        return self.conditioning.families_of(task, self.tools)

    def price_of(self, calls: Mapping[str, int], families: Mapping[str, Family]) -> float:
        """Cost of calls, in the unit of the budget."""
        return self.cost(RouteUsage.of(merge_unknown_calls(calls, families), families))[self.unit]

    def cost_of(self, rollout: Rollout) -> float:
        """Cost of a rollout. With real tools, calls that the route refused are free."""
        families = self.families_of(rollout.task)
        route = None if rollout.route is None else RouteAction.parse(rollout.route)
        allowed = families if route is None else allowed_tools(route, families, hard=self.conditioning.router.hard)
        source = "executed" if self.tools else self.config.router.usage
        return self.cost(usage_of(rollout, families, allowed=allowed, source=source))[self.unit]


def values_of(prediction: RoutePrediction) -> tuple[Floats, Floats | None]:
    """Inputs of a threshold, [routes] each: predicted rewards and costs, or log-probs and None."""
    if prediction.rewards is None or prediction.costs is None or not prediction.costs[0]:
        return np.asarray(prediction.logprobs), None
    return np.asarray(prediction.rewards), np.asarray([costs[0] for costs in prediction.costs])
