"""A trained router with everything it needs to route: the head, its model, how routes change prompts, and thresholds.

The thresholds for the trained budgets were fitted in training; those for other budgets are fitted on validation rows
(`toolwise eval --budgets`). Both are stored with the head.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from toolwise.concurrency.deadlines import gather_all
from toolwise.concurrency.text_threads import run_if_long
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ContextFullError, QuestionError
from toolwise.messages import text_chars
from toolwise.routing.budget_bins import BudgetBins
from toolwise.routing.calibration import BudgetCalibration, prompt_uniform, values_and_costs
from toolwise.routing.conditioning import PROMPT_BATCH_SIZE, Conditioning
from toolwise.routing.cost import Cost, PricesCost, price_of_calls, refused_by_route
from toolwise.routing.delivered_budget import check_numbers, reason_of, uncalibrated
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.routes import RouteSet
from toolwise.routing.samples import RoutePrediction
from toolwise.routing.threshold import Floats, Threshold
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.tools.base import BaseTool
from toolwise.training import checkpoint
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE, update_file
from toolwise.training.checkpoint.writer import amend
from toolwise.types import Rollout, RouteDecision, Task

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy
    from toolwise.routing.head.predictor import HeadPredictor

log = logging.getLogger("toolwise")

_KEY = "calibration"


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

    def __post_init__(self) -> None:
        """Raises ValueError for numbers that do not belong together: those of a damaged file."""
        if not self.budgets or len(self.thresholds) != len(self.budgets):
            raise ValueError("its thresholds are not one per budget")
        if any(not low < high for low, high in pairwise(self.budgets)):
            raise ValueError("its budgets do not increase")
        check_numbers("its budgets and route costs", *self.budgets, *self.route_costs)

    def threshold_for(self, budget: float, chance: float) -> Threshold:
        """`chance`, uniform in [0, 1), picks one of the two neighbouring thresholds for a budget between them."""
        if not self.budgets[0] <= budget <= self.budgets[-1]:
            raise QuestionError(
                f"budget {budget:g} is outside {self.budgets[0]:g} to {self.budgets[-1]:g}, which the checkpoint is "
                "calibrated for: choose a budget within it, or calibrate again with toolwise eval --budgets",
                "budget",
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
            f"{ROUTER_METADATA_FILE} holds a calibration that cannot be read ({reason_of(fault)}): calibrate "
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
    elif (model / AGENT_FILE).is_file():
        update_file(model, ROUTER_METADATA_FILE, data)
    else:
        write_atomic(path, data)


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """How a question is rolled out."""

    decision: RouteDecision
    route: str = ""
    """Empty without a router, or if each turn has its own."""
    route_probs: Mapping[str, float] | None = None
    too_long: str | None = None
    """Why the question is not answered."""


@dataclass(frozen=True)
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
    """Thresholds for budgets in one unit, of `toolwise eval --budgets`."""
    trained: BudgetCalibration | None = None
    """Thresholds for the trained budgets, the default."""
    bins: BudgetBins | None = None
    """With random budgets: all of them, each with its thresholds."""

    @property
    def routes(self) -> RouteSet:
        return self.conditioning.routes

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
        return self._restricted(tasks, [p for part in parts for p in self.predictor.predict(part, self.multipliers)])

    async def predict_in_engine(self, tasks: Sequence[Task]) -> list[RoutePrediction]:
        """Like `predict`, but the engine encodes the prompts alongside its other requests, and the rollouts reuse the
        prefix it has cached."""
        import torch

        from toolwise.engine import Engine
        from toolwise.routing.head.head import predict_routes

        engine, head = self.policy.engine, self.predictor.head
        if not isinstance(engine, Engine) or head.settings.layers != (-1,):
            return self.predict(tasks)
        pool, wait = head.settings.pool, len(tasks) > 1
        prompts = await run_if_long(sum(text_chars(task.prompt) for task in tasks), self._prompts, tasks)
        features = await gather_all(engine.encode(prompt, pool=pool, wait=wait) for prompt in prompts)
        return self._restricted(tasks, predict_routes(head, torch.stack(features), self.multipliers))

    def _restricted(self, tasks: Sequence[Task], predictions: Sequence[RoutePrediction]) -> list[RoutePrediction]:
        """To the routes that apply to each task."""
        pairs = zip(tasks, predictions, strict=True)
        return [prediction.restricted(self.conditioning.applicable(task)) for task, prediction in pairs]

    def _prompts(self, tasks: Sequence[Task]) -> list[Sequence[int]]:
        return [self.conditioning.original_prompt(self.policy.chat, task) for task in tasks]

    async def route_question(
        self, task: Task, *, budget: float | None, route: str | None, cap: float | None, seed: int
    ) -> RouteChoice:
        """How to answer one question; `route` is one that the caller wants."""
        self._check_cap(cap)
        too_long: ContextFullError | None = None
        names = self.routes.names
        try:
            (prediction,) = await self.predict_in_engine([task])
            prediction = self.at_budget(prediction, task, budget)
            route_probs = {str(name): prob for name, prob in zip(names, prediction.probs, strict=True)}
            chosen = route or self.choose(prediction, task, budget=budget, seed=seed)
            chosen = self.within_cap(chosen, prediction, cap, given=route is not None)
        except ContextFullError as full:
            # With a given route the conditioned prompt may be shorter and still fit.
            fallback = route or self.routes.direct or names[0]
            route_probs, chosen, too_long = {}, fallback, None if route else full
        decision = self.decide(task, chosen, seed=seed, budget=self.told_budget(task, budget), max_cost=cap)
        return RouteChoice(decision, str(chosen), route_probs, None if too_long is None else str(too_long))

    def at_budget(self, prediction: RoutePrediction, task: Task, budget: float | None) -> RoutePrediction:
        """The prediction that a budget is served by; None: the default. With random budgets it is that for the budget,
        or, if they are not calibrated, that for the default, which the thresholds of `toolwise eval --budgets` fit."""
        if self.bins is None:
            return prediction
        return prediction.at(self.bins.pick(budget if self.bins.calibrations else None, task.prompt))

    def told_budget(self, task: Task, budget: float | None) -> float | None:
        """What the agent is told: of random budgets the one that it was trained for and that the prompt drew."""
        if budget is None or self.bins is None or not self.bins.calibrations:
            return budget
        return self.bins.values[self.bins.pick(budget, task.prompt)]

    def choose(self, prediction: RoutePrediction, task: Task, *, budget: float | None, seed: int) -> str:
        """The route by the threshold for `budget`, by default the trained one. The lottery of a threshold depends on
        the prompt alone; routes sampled without one depend on the prompt and the seed."""
        if self.bins is not None and (self.bins.calibrations or budget is None):
            return self.routes.names[self._choose_in_bin(prediction, task, budget, seed)]
        if budget is None:
            return self.routes.names[self._choose_by_default(prediction, task, seed)]
        trained = self.trained
        limits = {} if trained is None else dict(zip(trained.units, trained.limits, strict=True))
        # As by default: thresholds of `toolwise eval --budgets` are for others, and know one unit only.
        if trained is not None and limits.get(self.unit) == budget:
            return self.routes.names[trained.route(prediction, task.prompt)]
        if self.calibration is None:
            known = f" other than the trained one ({limits[self.unit]:g})" if self.unit in limits else ""
            if self.bins is not None:
                self.bins.weights(budget)  # raises if it is outside of the trained ones
            raise QuestionError(
                f"this router is not calibrated for a budget{known}: run toolwise eval CHECKPOINT --budgets …", "budget"
            )
        values, costs = values_of(self.at_budget(prediction, task, budget))
        chances = prompt_uniform(task.prompt, "neighbour"), prompt_uniform(task.prompt)
        return self.routes.names[self.calibration.route(values, costs, budget, chances)]

    def _choose_in_bin(self, prediction: RoutePrediction, task: Task, budget: float | None, seed: int) -> int:
        """By the head's output for the budget, and its thresholds; the default is the trained one."""
        assert self.bins is not None
        index = self.bins.pick(budget, task.prompt)
        if self.config.router.eval_mode == "budget" and self.bins.calibrations:
            return self.bins.calibrations[index].route(prediction.at(index), task.prompt)
        return self._choose_by_default(prediction.at(index), task, seed)

    def _choose_by_default(self, prediction: RoutePrediction, task: Task, seed: int) -> int:
        router = self.config.router
        if router.eval_mode == "budget" and self.trained is not None:
            return self.trained.route(prediction, task.prompt)
        if router.eval_mode == "argmax":
            return prediction.argmax()
        if router.eval_mode == "budget" and router.budgets:
            warn_sampled()
        return prediction.sample(Random(f"{seed}/{prompt_uniform(task.prompt)}"))

    def decide(
        self,
        task: Task,
        route: str | None,
        *,
        n: int = 1,
        seed: int = 0,
        budget: float | None = None,
        max_cost: float | None = None,
    ) -> RouteDecision:
        """The decision to roll a task out `n` times under a route; None keeps the prompt and all its tools. `budget`
        and `max_cost` are what the agent is told, if it is told any; None: those of training."""
        if route is None:
            return RouteDecision(task, f"{task.task_id}/ALL-TOOLS", n, seed, task.prompt)
        group_id = f"{task.task_id}/{route}"
        return self.conditioning.decision(
            task,
            route,
            group_id=group_id,
            n=n,
            seed=seed,
            prompt_id=task.task_id,
            budget=budget,
            max_cost=max_cost,
        )

    def price_of(self, task: Task, route: str = "") -> Callable[[Mapping[str, int]], float]:
        """What calls of a task's tools cost on a route, in the unit of the budget."""
        offered = self.conditioning.offered(task, route) if route else ()
        return partial(price_of_calls, self.cost, self.conditioning.families_of(task), self.unit, offered=offered)

    def refused_calls(self, rollout: Rollout) -> Counter[str]:
        """Calls by tool that the route does not offer: they were refused, and are free."""
        if not self.tools or rollout.route is None:
            return Counter()
        offered = self.conditioning.offered(rollout.task, rollout.route)
        return refused_by_route(rollout.usage.calls, self.conditioning.families_of(rollout.task), offered)

    def _check_cap(self, cap: float | None) -> None:
        if cap is not None and isinstance(self.cost, PricesCost) and self.cost.prices_meters(self.unit):
            raise QuestionError(
                f"tokens or seconds have a price in {self.unit!r}, which a cap on calls cannot hold: leave the cap out",
                "max_cost",
            )

    def route_price(self, route: str) -> float:
        """What a route costs besides its calls, in the unit of the budget."""
        return self.conditioning.prices(route).get(self.unit, 0.0)

    def within_cap(self, route: str, prediction: RoutePrediction, cap: float | None, *, given: bool) -> str:
        """`route`, or if it alone costs more than `cap` the head's best of those that do not; raises if a `given` route
        does, or all do. The cap of training holds as well."""
        option = "route" if given else "max_cost"
        caps = [each for each in (cap, self.config.router.max_cost) if each is not None]
        cap = min(caps, default=None)
        if cap is None or not cap >= 0 or self.route_price(route) <= cap:
            return route
        names = self.routes.names
        affordable = [i for i, name in enumerate(names) if prediction.applies(i) and self.route_price(name) <= cap]
        if given or not affordable:
            which = f"the route {route!r} costs" if given else "every route costs"
            raise QuestionError(f"{which} more than {cap:g}, the most that this answer may cost: raise it", option)
        return names[max(affordable, key=prediction.logprobs.__getitem__)]

    def cost_of(self, rollout: Rollout) -> float:
        """Cost of a rollout and its route. With real tools, calls that the route refused are free."""
        return self.conditioning.costs_of(self.cost, rollout, "executed" if self.tools else None)[self.unit]


@cache
def warn_sampled(*, by_turn: bool = False) -> None:
    log.warning("%s", uncalibrated(other_budgets=False, by_turn=by_turn))


def values_of(prediction: RoutePrediction) -> tuple[Floats, Floats | None]:
    """Inputs of a threshold, [routes] each: predicted rewards and costs, or log-probs and None."""
    values, costs = values_and_costs(prediction)
    return values, None if costs is None else costs[:, 0]
