"""A trained router with all that it needs to route: the head, the model under it, and how routes change prompts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

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
from toolwise.routing.usage import RouteUsage, merge_unknown_calls, usage_of
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from toolwise.policies.local import LocalPolicy
    from toolwise.routing.head.head import RouterHead

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TrainedRouter:
    """Decides; whoever holds it rolls out."""

    config: RunConfig
    policy: LocalPolicy
    head: RouterHead
    tools: Mapping[str, BaseTool]
    conditioning: Conditioning
    cost: Cost
    multipliers: tuple[float, ...] = ()
    """λ of each of the head's units, as training left them: what a head that foresees goes by without a budget."""
    calibration: Calibration | None = None

    @property
    def unit(self) -> str:
        """What budgets are in: the first that the router was trained under."""
        budgets = self.config.router.budgets
        return budgets[0].unit if budgets else self.cost.units[0]

    def features(self, tasks: Sequence[Task]) -> Floats:
        """What the head sees of prompts, [tasks, width]."""
        import numpy as np

        return np.asarray(self._features(tasks).double().cpu().numpy())

    def predict(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """What the head says of the original prompts, each through the model once."""
        return self._predictions(self._features(tasks))

    async def predict_in_engine(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """As `predict`, for a program that generates meanwhile: the engine reads the prompts between its other
        requests,
        and the rollouts go on from what it has read."""
        import torch

        from toolwise.engine import Engine

        engine, settings = self.policy.engine, self.head.settings
        if not isinstance(engine, Engine) or settings.layers != (-1,):
            return self.predict(tasks)
        prompts = self._prompts(tasks)
        read = await gather_all(engine.encode(prompt, pool=settings.pool) for prompt in prompts)
        return self._predictions(torch.stack(read))

    def _predictions(self, features: Any) -> list[RoutePrediction]:
        import torch

        with torch.no_grad():
            found = self.head(features)
            logprobs = self.head.logits(found, self.multipliers).log_softmax(-1).tolist()
            values = found.tolist() if self.head.settings.mode == "value" else [None] * len(logprobs)
        return [
            RoutePrediction(
                tuple(row),
                rewards=None if foreseen is None else tuple(route[0] for route in foreseen),
                costs=None if foreseen is None else tuple(tuple(route[1:]) for route in foreseen),
            )
            for row, foreseen in zip(logprobs, values, strict=True)
        ]

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
        """As it was trained, or by the calibrated threshold for `budget`. Chance depends on the seed and the task."""
        rng = Random(f"{seed}/{zlib.crc32(repr([m.content for m in task.prompt]).encode('utf-8', 'replace'))}")
        if budget is None:
            drawn = self.config.router.evaluate == "sample"
            return ROUTES[prediction.sample(rng) if drawn else prediction.argmax()]
        if self.calibration is None:
            raise CheckpointError(
                "this router was never calibrated, so it can keep to no budget: toolwise eval CHECKPOINT --budgets …"
            )
        values, costs = values_of(prediction)
        return ROUTES[self.calibration.route(values, costs, budget, (rng.random(), rng.random()))]

    def decide(self, task: Task, route: RouteAction | None, *, n: int = 1, seed: int = 0) -> RouteDecision:
        """`n` rollouts of a task under a route; None leaves the prompt as it is, with every tool."""
        name = "ALL-TOOLS" if route is None else route.value
        if route is None:
            return RouteDecision(task, f"{task.task_id}/{name}", n, seed, task.prompt)
        routed = self.conditioning(task, route, self.tools)
        # Ids that came with the task are those of its original prompt.
        own = task if task.prompt_ids is None else task.model_copy(update={"prompt_ids": None})
        return RouteDecision(
            task=own,
            group_id=f"{task.task_id}/{name}",
            n=n,
            seed=seed,
            prompt=routed.messages,
            tools=routed.tools,
            route=name,
            prompt_id=task.task_id,
            forbidden=routed.forbidden,
        )

    def families_of(self, task: Task) -> dict[str, Family]:
        return self.conditioning.families_of(task, self.tools)

    def price_of(self, calls: Mapping[str, int], families: Mapping[str, Family]) -> float:
        """What calls cost, in the unit of the budget."""
        return self.cost(RouteUsage.of(merge_unknown_calls(calls, families), families))[self.unit]

    def cost_of(self, rollout: Rollout) -> float:
        """What a rollout cost. Where tools are real, calls that the route refused do not count."""
        families = self.families_of(rollout.task)
        route = None if rollout.route is None else RouteAction.parse(rollout.route)
        allowed = families if route is None else allowed_tools(route, families, hard=self.conditioning.hard)
        source = "executed" if self.tools else self.config.router.usage
        return self.cost(usage_of(rollout, families, allowed=allowed, source=source))[self.unit]


def values_of(prediction: RoutePrediction) -> tuple[Floats, Floats | None]:
    """What a threshold goes by: foreseen rewards and costs, or log-probs alone; [routes] each."""
    import numpy as np

    if prediction.rewards is None or prediction.costs is None or not prediction.costs[0]:
        return np.asarray(prediction.logprobs), None
    return np.asarray(prediction.rewards), np.asarray([costs[0] for costs in prediction.costs])
