"""Evaluates the frontier of a checkpoint with a router: rollout pool, baselines, comparison and calibration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from toolwise.agent.agent import Agent
from toolwise.agent.inference import Calibration, TrainedRouter, values_of
from toolwise.agent.time_saved import TimeSaved, time_saved
from toolwise.config.router import RouterConfig
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.frontier.baselines import training_rows
from toolwise.frontier.reference_curves import describe_unmet
from toolwise.frontier.rollout_pool import ALL_TOOLS, OutcomeTable, PoolPlan, fill_pool, read_cells
from toolwise.frontier.router_comparison import Frontier, RouteValues, calibrate, compute_frontier
from toolwise.frontier.shards import count_cells, merge_shards, run_in_processes, shard_path, shard_paths
from toolwise.frontier.tuning import TUNING_DRAWS_SHARE, baseline_routers, tuning_tasks
from toolwise.routing.threshold import Floats
from toolwise.serialization.json_text import json_text
from toolwise.training import checkpoint
from toolwise.training.evaluate import build_scoring
from toolwise.training.rollout_setup import build_scheduler, local_policy
from toolwise.training.tasks import check_task_tools
from toolwise.types import Task
from toolwise.view.frontier import render_frontier


@dataclass(frozen=True, slots=True)
class FrontierEvaluation:
    """A frontier, the calibration it gives, and the time that direct answers save."""

    frontier: Frontier
    calibration: Calibration
    time: TimeSaved | None
    notes: tuple[str, ...]
    """Why something is missing from the comparison, and how the baselines were tuned."""

    def write(self, folder: Path, title: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        record = self.frontier.to_json() | {"calibration": asdict(self.calibration), "notes": list(self.notes)}
        (folder / "frontier.json").write_text(json_text(record, indent=2) + "\n", encoding="utf-8")
        (folder / "frontier.png").write_bytes(render_frontier(record, name=title))


async def evaluate_frontier(
    routing: TrainedRouter,
    tasks: Sequence[Task],
    budgets: Sequence[float],
    folder: Path,
    *,
    actors: Mapping[str, tuple[RunConfig, Path]] | None = None,
    train_tasks: Sequence[Task] | None = None,
    tuning_rows: int = 0,
    draws: int = 16,
    metric: str = "auto",
    replicates: int = 1000,
    seed: int = 0,
    source: Path | None = None,
    jobs: int = 1,
    on_done: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> FrontierEvaluation:
    """Rolls out `tasks` under every route and compares the router with the baselines at each budget.

    `folder` holds the pools, so that an interrupted evaluation resumes. `actors` are other trained actors, not routed:
    by name the configuration and the model. `train_tasks` are what the baselines are fitted to and, `tuning_rows` of
    them, tuned on, by default the run's training tasks; without `tuning_rows` there are only the classifiers, untuned.
    With `source`, where a process loads the router from, `jobs` processes fill the pools.
    """
    levels, routes = sorted(set(budgets)), [str(name) for name in routing.routes.names]
    train, notes = training_rows(routing, train_tasks)
    tuning = tuning_tasks(train, tasks, source, min(tuning_rows, len(train) // 2))
    request = _PoolRequest(
        tasks=list(tasks), tuning=tuning, folder=folder, actors=actors or {}, draws=draws, metric=metric, seed=seed
    )
    request.check_names(routes)
    if source is not None and jobs > 1:
        await _fill_in_processes(routing, request, source, jobs, on_done)
    pools = {name: await _fill(pool, routing, on_done) for name, pool in request.pools(routing).items()}
    outcomes = reduce(OutcomeTable.concat_routes, (pools[name] for name in request.actors), pools["pool"])
    router_values = route_values(routing, tasks)
    baselines, baseline_notes = await baseline_routers(
        routing, train, tasks, tuning, pools.get("tuning"), levels, seed=seed
    )
    notes += baseline_notes + other_budgets(routing.config.router)
    if not request.actors:
        notes.append("no other trained actor: give one with --baseline NAME=RUN")
    frontier = compute_frontier(
        outcomes,
        {"router": router_values} | baselines,
        levels,
        routes=routes,
        replicates=replicates,
        seed=seed,
        served=served_budgets(routing, tasks, levels),
        delivered=delivered_routes(routing, tasks),
    )
    saved = await time_saved(Agent(routing), tasks)
    if saved is None:
        notes.append("no time saved: the router prefers the direct answer for no prompt")
    routed = outcomes.select_routes(routes)
    spent, scores = routed.mean_over_draws("costs"), routed.mean_over_draws("scores")
    complete = np.flatnonzero(np.isfinite(scores).all(axis=1))
    notes += describe_unmet(levels, spent[complete], _applicable(routing, tasks)[complete])
    thresholds, means = calibrate(router_values.select_rows(complete), spent[complete], scores[complete], levels)
    calibration = Calibration(
        budgets=tuple(levels),
        thresholds=tuple(thresholds),
        route_costs=tuple(means.tolist()),
        unit=routing.unit,
        rows=len(complete),
        direct_s=None if saved is None else saved.direct_s,
        with_tools_s=None if saved is None else saved.with_tools_s,
    )
    return FrontierEvaluation(frontier, calibration, saved, tuple(notes))


def other_budgets(router: RouterConfig) -> list[str]:
    """A note about budgets that the thresholds of an evaluation do not know: they are in the unit of the first one."""
    first, *others = [repr(budget.unit) for budget in router.budgets] or [""]
    return [f"these budgets are in {first}; those in {', '.join(others)} are not kept"] if others else []


def _applicable(routing: TrainedRouter, tasks: Sequence[Task]) -> NDArray[np.bool_]:
    """[tasks, routes] which routes the tasks can take."""
    every = (True,) * len(routing.routes)
    return np.array([routing.conditioning.applicable(task) or every for task in tasks])


def route_values(routing: TrainedRouter, tasks: Sequence[Task]) -> RouteValues:
    """With random budgets, those for the default one: every threshold is fitted to them."""
    predictions = [
        prediction if routing.bins is None else prediction.at(routing.bins.pick(None, task.prompt))
        for task, prediction in zip(tasks, routing.predict(tasks), strict=True)
    ]
    values, costs = zip(*map(values_of, predictions), strict=True)
    samples = costs[0] is None
    return RouteValues(np.stack(values), None if samples else np.stack(costs), samples)


def served_budgets(routing: TrainedRouter, tasks: Sequence[Task], levels: Sequence[float]) -> dict[str, list[Floats]]:
    """With random budgets: the probabilities of the routes [tasks, routes] for each level, as the router serves it by
    itself; levels beyond its budgets get the nearest."""
    bins = routing.bins
    if bins is None or not bins.calibrations:
        return {}
    predictions, count = routing.predict(tasks), len(routing.routes)
    mixtures = []
    for level in np.clip(levels, bins.values[0], bins.values[-1]).tolist():
        mixture = np.zeros((len(tasks), count))
        for index, weight in bins.weights(level):
            mixture += weight * np.stack([bins.calibrations[index].probabilities(p.at(index)) for p in predictions])
        mixtures.append(mixture)
    return {"budget given": mixtures}


def delivered_routes(routing: TrainedRouter, tasks: Sequence[Task]) -> Floats | None:
    """Probabilities of the routes [tasks, routes] by default, as `toolwise run` chooses them; None without thresholds
    of training."""
    bins, trained = routing.bins, routing.trained
    if bins is not None and bins.calibrations:
        (default,) = served_budgets(routing, tasks, [bins.default])["budget given"]
        return default
    if trained is None or bins is not None:
        return None
    return np.stack([trained.probabilities(prediction) for prediction in routing.predict(tasks)])


class _PoolRequest(BaseModel):
    """Everything a pool depends on except the router; sent as JSON to each worker process."""

    tasks: list[Task]
    tuning: list[Task]
    folder: Path
    actors: dict[str, tuple[RunConfig, Path]]
    draws: int
    metric: str
    seed: int

    def check_names(self, routes: Sequence[str]) -> None:
        """Raises for an actor whose name is another column's, or no file name."""
        taken = {name.lower() for name in (*routes, ALL_TOOLS, "pool", "tuning")}
        for name in self.actors:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", name):
                raise ConfigError(f"--baseline: {name!r} is not a name: use letters, digits, and . _ + -")
            if name.lower() in taken:
                raise ConfigError(f"--baseline: the name {name!r} is taken: give another one")
            taken.add(name.lower())

    def pools(self, routing: TrainedRouter) -> dict[str, _PoolFile]:
        """Every row under every route and unrouted; tuning rows alike, with fewer draws; and every row unrouted with
        each other actor, scored and charged alike."""
        routes = {str(route): partial(routing.decide, route=route) for route in routing.routes.names}
        unrouted, provenance = partial(routing.decide, route=None), _provenance(routing)
        plan = PoolPlan(self.tasks, {**routes, ALL_TOOLS: unrouted}, self.draws, self.metric, self.seed, provenance)
        pools = {"pool": _PoolFile(plan, self.folder / "pool.jsonl", routing.config, lambda: routing.policy)}
        if self.tuning:
            tuning = replace(plan, tasks=self.tuning, draws=max(1, self.draws // TUNING_DRAWS_SHARE))
            pools["tuning"] = replace(pools["pool"], plan=tuning, path=self.folder / "tuning.jsonl")
        for name, (config, model) in self.actors.items():
            other = replace(plan, routes={name: unrouted}, of={**provenance, "model": str(model.resolve())})
            file = self.folder / f"{name.lower()}.jsonl"
            pools[name] = _PoolFile(other, file, config, partial(local_policy, config, str(model)))
        return pools


@dataclass(frozen=True, slots=True)
class _PoolFile:
    """A file of outcomes, and the policy that produces them."""

    plan: PoolPlan
    path: Path
    config: RunConfig
    policy: Callable[[], Any]

    @property
    def missing(self) -> list[Task]:
        """Tasks with at least one cell that is not in the file."""
        cells = read_cells(self.path, self.plan)
        return [t for t in self.plan.tasks if any((t.task_id, name) not in cells for name in self.plan.routes)]

    def shard(self, number: int, of: int) -> _PoolFile:
        """Every `of`-th missing task, in a separate file."""
        plan = replace(self.plan, tasks=self.missing[number::of])
        return replace(self, plan=plan, path=shard_path(self.path, number, of))


async def _fill_in_processes(
    routing: TrainedRouter, request: _PoolRequest, source: Path, jobs: int, on_done: Any
) -> None:
    """Splits the missing tasks among the processes and merges the results into the pools."""
    pools = list(request.pools(routing).values())
    cells = sum(len(pool.plan.tasks) * len(pool.plan.routes) for pool in pools)

    def report() -> None:
        files = [file for pool in pools for file in (pool.path, *shard_paths(pool.path))]
        on_done(f"{jobs} processes", min(count_cells(files), cells), cells)

    request.folder.mkdir(parents=True, exist_ok=True)
    for pool in pools:
        merge_shards(pool.path, pool.plan)
    most = max(len(pool.missing) for pool in pools)
    if most:
        payload = {
            "source": str(source),
            "config": routing.config.model_dump(mode="json"),
            "request": request.model_dump(mode="json"),
        }
        await run_in_processes(f"{__name__}:fill_shard", payload, min(jobs, most), report)
    for pool in pools:
        merge_shards(pool.path, pool.plan)


def fill_shard(payload: Mapping[str, Any], number: int, of: int) -> None:
    """Runs in a worker process: fills its shard of every pool."""
    import asyncio

    import torch

    from toolwise.agent.loader import load_router

    request = _PoolRequest.model_validate(payload["request"])
    routing = load_router(Path(payload["source"]), config=RunConfig.model_validate(payload["config"]))
    torch.set_num_threads(1)  # one process per core: more threads would compete
    for pool in request.pools(routing).values():
        shard = pool.shard(number, of)
        if shard.plan.tasks:
            asyncio.run(_fill(shard, routing))


async def _fill(pool: _PoolFile, routing: TrainedRouter, on_done: Any = lambda label, done, of: None) -> OutcomeTable:
    for task in pool.plan.tasks:
        check_task_tools(task, dict(routing.tools), env=routing.config.env.name)
    label = list(pool.plan.routes)[-1].lower()
    scoring = build_scoring(routing.config.reward)
    try:
        scoring.check(pool.plan.tasks)
        return await fill_pool(
            pool.plan,
            pool.path,
            build_scheduler(pool.config, pool.policy(), dict(routing.tools)),
            scoring,
            routing.cost_of,
            on_done=lambda done, of: on_done(label, done, of),
        )
    finally:
        scoring.close()


def _provenance(routing: TrainedRouter) -> Mapping[str, Any]:
    """What the outcomes depend on: the weights and the settings of rollouts, rewards and routes."""
    from toolwise.learner.fingerprint import fingerprint

    settings = routing.config.model_dump(mode="json", exclude_none=True)
    relevant = {key: settings[key] for key in ("tools", "env", "rollout", "multi_turn", "reward", "router", "seed")}
    return {"model": str(fingerprint(routing.policy.model)), "settings": checkpoint.settings_digest(relevant)}
