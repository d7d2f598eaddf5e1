"""A routed checkpoint's frontier from beginning to end: pool, router, baselines, comparison, calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise import checkpoint
from toolwise.config import RunConfig
from toolwise.errors import ConfigError
from toolwise.frontier.classifier import fit_classifier
from toolwise.frontier.comparing import Frontier, RouteValues, calibrate, compare
from toolwise.frontier.outcomes import ALL_TOOLS, OTC, Outcomes
from toolwise.frontier.pool import Plan, fill_pool
from toolwise.frontier.report import as_json, picture
from toolwise.routed.agent import RoutedAgent
from toolwise.routed.calibration import Calibration, sorted_budgets
from toolwise.routed.routing import Routing, values_of
from toolwise.routed.timing import TimeSaved, time_saved
from toolwise.routing.actions import MIXED, ROUTES, RouteAction
from toolwise.routing.learned import target_of
from toolwise.run import build_scheduler, check_tools, labelled, load_split, local_policy
from toolwise.scoring import build_scoring
from toolwise.types import RouteDecision, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

KIND_TARGETS = {
    "known": RouteAction.ANSWER.value,
    "lookup": RouteAction.SEARCH_FAMILY.value,
    "arithmetic": RouteAction.CALCULATE_FAMILY.value,
    "two_step": MIXED,
}
"""What a person would say of the kinds of the demo's small world; labels of the rows come first."""
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A frontier, and what was found out on the way."""

    frontier: Frontier
    calibration: Calibration
    time: TimeSaved | None
    notes: tuple[str, ...]
    """What is missing from the comparison, and why."""

    def write(self, folder: Path, title: str) -> None:
        """frontier.json and frontier.png."""
        folder.mkdir(parents=True, exist_ok=True)
        told = as_json(self.frontier) | {"calibration": self.calibration.to_json(), "notes": list(self.notes)}
        (folder / "frontier.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        (folder / "frontier.png").write_bytes(picture(self.frontier, title))


async def evaluate_frontier(
    routing: Routing,
    tasks: Sequence[Task],
    budgets: Sequence[float],
    folder: Path,
    *,
    otc: tuple[RunConfig, Path] | None = None,
    train_tasks: Sequence[Task] | None = None,
    draws: int = 16,
    metric: str = "auto",
    replicates: int = 1000,
    seed: int = 0,
    on_done: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Evaluated:
    """`folder` keeps the pools, so that whoever is interrupted goes on. `otc` is another actor's configuration and
    model; `train_tasks` are what the classifier learns from, the run's own training tasks where not given."""
    wanted = sorted_budgets(budgets)
    outcomes = await _pool(routing, tasks, folder / "pool.jsonl", draws, metric, seed, on_done)
    if otc is not None:
        outcomes = outcomes.beside(await _otc_pool(routing, otc, tasks, folder, draws, metric, seed, on_done))
    word = route_values(routing, tasks)
    routers, notes = {"router": word}, []
    try:
        routers["classifier"] = classifier_values(routing, train_tasks, tasks)
    except ConfigError as fault:
        notes.append(f"no classifier: {fault}")
    if otc is None:
        notes.append("no OTC actor: name one with --otc")
    routes = [route.value for route in ROUTES]
    frontier = compare(outcomes, routers, wanted, routes=routes, replicates=replicates, seed=seed)
    saved = await time_saved(RoutedAgent(routing), tasks)
    if saved is None:
        notes.append("no time saved: as trained, the router likes no prompt best answered directly")
    return Evaluated(frontier, _calibration(routing, outcomes, word, wanted, saved), saved, tuple(notes))


def route_values(routing: Routing, tasks: Sequence[Task]) -> RouteValues:
    """The head's word on every task."""
    import numpy as np

    weighed = [word for part in _parts(tasks) for word in routing.weigh(part)]
    pairs = [values_of(word) for word in weighed]
    foreseen = pairs[0][1] is not None
    costs = np.stack([cost for _, cost in pairs if cost is not None]) if foreseen else None
    return RouteValues(np.stack([values for values, _ in pairs]), costs, samples=not foreseen)


def classifier_values(routing: Routing, train: Sequence[Task] | None, tasks: Sequence[Task]) -> RouteValues:
    """A classifier of labels, on the features that the head sees."""
    import numpy as np

    if train is None:
        train = labelled(routing.config, load_split(routing.config, "train", routing.config.data.limit))
    labels = [_label(task) for task in train]
    if not any(label is not None for label in labels):
        raise ConfigError("no training task has a label or a known kind: run toolwise data label, set router.labels")
    seen, asked = (np.concatenate([routing.features(part) for part in _parts(given)]) for given in (train, tasks))
    return RouteValues(fit_classifier(seen, labels, len(ROUTES)).log_probs(asked))


def _label(task: Task) -> int | None:
    target = target_of(task) or KIND_TARGETS.get(str(task.extra_info.get("kind")))
    return None if target is None or target == MIXED else RouteAction.parse(target).index


def _parts(tasks: Sequence[Task]) -> list[Sequence[Task]]:
    return [tasks[first : first + _AT_ONCE] for first in range(0, len(tasks), _AT_ONCE)]


async def _pool(
    routing: Routing, tasks: Sequence[Task], path: Path, draws: int, metric: str, seed: int, on_done: Any
) -> Outcomes:
    def begin(route: RouteAction | None) -> Callable[[Task, int], RouteDecision]:
        return lambda task, seed: routing.decide(task, route, seed=seed)

    routes: dict[str, Callable[[Task, int], RouteDecision]] = {route.value: begin(route) for route in ROUTES}
    plan = Plan(tasks, routes | {ALL_TOOLS: begin(None)}, draws, metric, seed, _made_by(routing))
    return await _filled(plan, path, routing, routing.policy, routing.config, ALL_TOOLS.lower(), on_done)


async def _otc_pool(
    routing: Routing,
    otc: tuple[RunConfig, Path],
    tasks: Sequence[Task],
    folder: Path,
    draws: int,
    metric: str,
    seed: int,
    on_done: Any,
) -> Outcomes:
    """The other actor on the same tasks with the same tools, scored and priced alike."""
    config, model = otc
    made_by = {**_made_by(routing), "model": str(model.resolve())}
    plan = Plan(tasks, {OTC: lambda task, seed: routing.decide(task, None, seed=seed)}, draws, metric, seed, made_by)
    return await _filled(plan, folder / "otc.jsonl", routing, local_policy(config, str(model)), config, OTC, on_done)


async def _filled(
    plan: Plan, path: Path, routing: Routing, policy: Any, config: RunConfig, what: str, on_done: Any
) -> Outcomes:
    for task in plan.tasks:
        check_tools(task, dict(routing.tools))
    scoring = build_scoring(routing.config.reward)
    try:
        scoring.check(plan.tasks)
        return await fill_pool(
            plan,
            path,
            build_scheduler(config, policy, dict(routing.tools)),
            scoring,
            routing.cost_of,
            on_done=lambda done, of: on_done(what, done, of),
        )
    finally:
        scoring.close()


def _made_by(routing: Routing) -> Mapping[str, Any]:
    """What a pool depends on: the weights and all settings of rollouts, rewards and routes."""
    told = routing.config.model_dump(mode="json", exclude_none=True)
    kept = {key: told[key] for key in ("tools", "env", "rollout", "multi_turn", "reward", "router", "seed")}
    return {"model": _fingerprint(routing.policy.model), "settings": checkpoint.digest(kept)}


def _fingerprint(model: Any) -> str:
    from toolwise.learner.fingerprint import fingerprint

    return str(fingerprint(model))


def _calibration(
    routing: Routing, outcomes: Outcomes, word: RouteValues, budgets: Sequence[float], saved: TimeSaved | None
) -> Calibration:
    import numpy as np

    own = outcomes.only([route.value for route in ROUTES])
    spent, scores = own.over_draws("costs"), own.over_draws("scores")
    kept = np.isfinite(scores).all(axis=1)
    known = RouteValues(word.values[kept], None if word.costs is None else word.costs[kept], word.samples)
    thresholds, means = calibrate(known, spent[kept], scores[kept], budgets)
    return Calibration(
        budgets=tuple(budgets),
        thresholds=tuple(thresholds),
        route_costs=tuple(means.tolist()),
        unit=routing.unit,
        rows=int(kept.sum()),
        direct_s=None if saved is None else saved.direct_s,
        with_tools_s=None if saved is None else saved.with_tools_s,
    )
