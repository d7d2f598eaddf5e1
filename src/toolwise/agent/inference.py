"""A trained router with everything it needs to route: the head, its model, how routes change prompts, and thresholds.

Thresholds let it meet budgets it was not trained for; they are fitted on validation rows and stored with its head.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from toolwise.concurrency.deadlines import gather_all
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.routing.cost import Cost, RouteUsage, merge_unknown_calls
from toolwise.routing.families import ROUTES, RouteAction
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.inference_router import Conditioning
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Floats, Threshold
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.tools.base import BaseTool
from toolwise.training import checkpoint
from toolwise.training.checkpoint.writer import amend
from toolwise.types import Rollout, RouteDecision, Task

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy
    from toolwise.routing.head.predictor import HeadPredictor

_KEY = "calibration"
PROMPT_BATCH_SIZE = 256
"""Prompts encoded together."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Thresholds for a list of budgets; a budget between two of them mixes both at random."""

    budgets: tuple[float, ...]
    """Increasing."""
    thresholds: tuple[Threshold, ...]
    route_costs: tuple[float, ...]
    """Mean cost of each route on the validation rows; used if the head does not predict costs."""
    unit: str = "cost"
    rows: int = 0
    """Number of validation rows it was fitted on."""
    direct_s: float | None = None
    """Mean seconds per prompt that is answered directly, one at a time."""
    with_tools_s: float | None = None
    """Mean seconds for the same prompts with all their tools."""

    def threshold_for(self, budget: float, chance: float) -> Threshold:
        """`chance`, uniform in [0, 1), picks one of the two neighbouring thresholds for a budget between them."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            raise ConfigError(
                f"budget {budget:g} is outside {self.budgets[0]:g} to {self.budgets[-1]:g}, which the checkpoint is "
                "calibrated for: choose a budget within it, or calibrate again with toolwise eval --budgets"
            )
        above = bisect_left(self.budgets, budget)
        if self.budgets[above] == budget:
            return self.thresholds[above]
        low, high = self.budgets[above - 1], self.budgets[above]
        return self.thresholds[above if chance < (budget - low) / (high - low) else above - 1]

    def route(self, values: Floats, costs: Floats | None, budget: float, chances: tuple[float, float]) -> int:
        """The route of one prompt from the head's values and predicted costs, [routes] each."""
        threshold = self.threshold_for(budget, chances[0])
        return threshold.route(values, np.asarray(self.route_costs) if costs is None else costs, chances[1])


def calibration_of(metadata: Mapping[str, Any]) -> Calibration | None:
    """The calibration stored in a head's metadata; None if it was never calibrated."""
    if _KEY not in metadata:
        return None
    try:
        return TypeAdapter(Calibration).validate_python(metadata[_KEY])
    except ValidationError as fault:
        raise CheckpointError(
            f"{ROUTER_METADATA_FILE} holds a calibration that cannot be read ({fault.errors()[0]['msg']}): calibrate "
            "again with toolwise eval --budgets"
        ) from None


def store_calibration(model: Path, calibration: Calibration) -> None:
    """Adds the calibration to the head's metadata in `model`, a checkpoint (whose manifest is updated) or an export."""
    path = model / ROUTER_METADATA_FILE
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise CheckpointError(f"{path} cannot be read ({fault}): is there a router in {model}?") from None
    data = (json_text(metadata | {_KEY: asdict(calibration)}, indent=2) + "\n").encode()
    if (model.parent / checkpoint.MANIFEST).is_file():
        amend(model.parent, {f"{model.name}/{ROUTER_METADATA_FILE}": data})
    else:
        write_atomic(path, data)


@dataclass(frozen=True, slots=True)
class TrainedRouter:
    """Chooses routes and builds the decisions to roll out; the caller rolls them out."""

    config: RunConfig
    policy: LocalPolicy
    predictor: HeadPredictor
    conditioning: Conditioning
    cost: Cost
    multipliers: tuple[float, ...] = ()
    """Final λ of each of the head's units; a value head uses them if no budget is given."""
    calibration: Calibration | None = None

    @property
    def tools(self) -> Mapping[str, BaseTool]:
        return self.conditioning.tools

    @property
    def unit(self) -> str:
        """Unit of budgets: that of the first budget in training."""
        return next((budget.unit for budget in self.config.router.budgets), self.cost.units[0])

    def features(self, tasks: Sequence[Task]) -> Floats:
        """Inputs of the head, [tasks, width]."""
        return np.stack([prediction.head_inputs[1].double().cpu().numpy() for prediction in self.predict(tasks)])

    def predict(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """The head's predictions for the original prompts; one forward pass per prompt."""
        prompts = self._prompts(tasks)
        parts = [prompts[i : i + PROMPT_BATCH_SIZE] for i in range(0, len(prompts), PROMPT_BATCH_SIZE)]
        return [each for part in parts for each in self.predictor.predict(part, self.multipliers)]

    async def predict_in_engine(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """Like `predict`, but the engine encodes the prompts alongside its other requests, and the rollouts reuse the
        prefix it has cached."""
        import torch

        from toolwise.engine import Engine
        from toolwise.routing.head.head import predict_routes

        engine, head = self.policy.engine, self.predictor.head
        if not isinstance(engine, Engine) or head.settings.layers != (-1,):
            return self.predict(tasks)
        features = await gather_all(engine.encode(p, pool=head.settings.pool) for p in self._prompts(tasks))
        return predict_routes(head, torch.stack(features), self.multipliers)

    def _prompts(self, tasks: Sequence[Task]) -> list[Sequence[int]]:
        return [self.conditioning.original_prompt(self.policy.chat, task) for task in tasks]

    def choose(self, prediction: RoutePrediction, task: Task, *, budget: float | None, seed: int) -> RouteAction:
        """The route as trained, or by the threshold for `budget`. Random choices depend on the seed and the prompt."""
        rng = Random(f"{seed}/{zlib.crc32(repr([m.content for m in task.prompt]).encode('utf-8', 'replace'))}")
        if budget is None:
            samples = self.config.router.eval_mode == "sample"
            return ROUTES[prediction.sample(rng) if samples else prediction.argmax()]
        if self.calibration is None:
            raise CheckpointError(
                "this router is not calibrated, so it cannot keep to a budget: run toolwise eval CHECKPOINT --budgets …"
            )
        values, costs = values_of(prediction)
        return ROUTES[self.calibration.route(values, costs, budget, (rng.random(), rng.random()))]

    def decide(self, task: Task, route: RouteAction | None, *, n: int = 1, seed: int = 0) -> RouteDecision:
        """The decision to roll a task out `n` times under a route; None keeps the prompt and all its tools."""
        if route is None:
            return RouteDecision(task, f"{task.task_id}/ALL-TOOLS", n, seed, task.prompt)
        group_id = f"{task.task_id}/{route.value}"
        return self.conditioning.decision(task, route, group_id=group_id, n=n, seed=seed, prompt_id=task.task_id)

    def price_of(self, task: Task) -> Callable[[Mapping[str, int]], float]:
        """What calls of a task's tools cost, in the unit of the budget."""
        families = self.conditioning.families_of(task)
        return lambda calls: self.cost(RouteUsage.of(merge_unknown_calls(calls, families), families))[self.unit]

    def cost_of(self, rollout: Rollout) -> float:
        """Cost of a rollout. With real tools, calls that the route refused are free."""
        return self.cost(self.conditioning.usage_of(rollout, "executed" if self.tools else None))[self.unit]


def values_of(prediction: RoutePrediction) -> tuple[Floats, Floats | None]:
    """Inputs of a threshold, [routes] each: predicted rewards and costs, or log-probs and None."""
    if prediction.rewards is None or prediction.costs is None or not prediction.costs[0]:
        return np.asarray(prediction.logprobs), None
    return np.asarray(prediction.rewards), np.asarray([costs[0] for costs in prediction.costs])
