"""A routed checkpoint's frontier from beginning to end: pool, router, baselines, comparison, calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.agent.agent import RoutedAgent
from toolwise.agent.calibration import Calibration, sorted_budgets
from toolwise.agent.inference import TrainedRouter, values_of
from toolwise.agent.time_saved import TimeSaved, time_saved
from toolwise.config.schema import RunConfig
from toolwise.frontier.baselines import PROMPT_BATCH_SIZE, baseline_routers
from toolwise.frontier.comparison import Frontier, RouteValues, calibrate, compute_frontier
from toolwise.frontier.outcomes import ALL_TOOLS, OTC, OutcomeTable
from toolwise.frontier.report import as_json, plot_frontier
from toolwise.frontier.rollout_pool import PoolPlan, fill_pool, read_cells
from toolwise.frontier.shards import count_cells, merge_shards, run_in_processes, shard_path, shard_paths
from toolwise.routing.actions import ROUTES, RouteAction
from toolwise.serialization.json_text import json_text
from toolwise.training import checkpoint
from toolwise.training.run import build_scheduler, local_policy
from toolwise.training.scoring import build_scoring
from toolwise.training.tasks import check_task_tools
from toolwise.types import RouteDecision, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FrontierEvaluation:
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
        (folder / "frontier.json").write_text(json_text(told, indent=2) + "\n", encoding="utf-8")
        (folder / "frontier.png").write_bytes(plot_frontier(self.frontier, title))


async def evaluate_frontier(
    routing: TrainedRouter,
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
    sharding: ShardSettings | None = None,
    on_done: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> FrontierEvaluation:
    """`folder` keeps the pools, so that whoever is interrupted goes on. `otc` is another actor's configuration and
    model; `train_tasks` are what the classifiers learn from, the run's own training tasks where not given. With
    `sharding`, the pools are filled by so many processes."""
    wanted = sorted_budgets(budgets)
    asked = _PoolRequest(tasks, folder, otc, draws, metric, seed)
    if sharding is not None and sharding.jobs > 1:
        await _fill_in_processes(routing, asked, sharding, on_done)
    first, *others = [await _fill(pool, routing, on_done) for pool in asked.pools(routing)]
    outcomes = first if not others else first.concat_routes(others[0])
    router_values = route_values(routing, tasks)
    against, notes = baseline_routers(routing, train_tasks, tasks)
    if otc is None:
        notes.append("no OTC actor: name one with --otc")
    routes = [route.value for route in ROUTES]
    frontier = compute_frontier(
        outcomes, {"router": router_values} | against, wanted, routes=routes, replicates=replicates, seed=seed
    )
    saved = await time_saved(RoutedAgent(routing), tasks)
    if saved is None:
        notes.append("no time saved: as trained, the router likes no prompt best answered directly")
    return FrontierEvaluation(
        frontier, _calibration(routing, outcomes, router_values, wanted, saved), saved, tuple(notes)
    )


def route_values(routing: TrainedRouter, tasks: Sequence[Task]) -> RouteValues:
    """The head's word on every task."""
    import numpy as np

    weighed = [
        word
        for i in range(0, len(tasks), PROMPT_BATCH_SIZE)
        for word in routing.predict(tasks[i : i + PROMPT_BATCH_SIZE])
    ]
    pairs = [values_of(word) for word in weighed]
    foreseen = pairs[0][1] is not None
    costs = np.stack([cost for _, cost in pairs if cost is not None]) if foreseen else None
    return RouteValues(np.stack([values for values, _ in pairs]), costs, samples=not foreseen)


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How several processes come to the same routing: each loads it from `source`."""

    source: Path
    jobs: int


@dataclass(frozen=True, slots=True)
class _PoolRequest:
    """All that a pool depends on but the routing itself: what a process of its own is told."""

    tasks: Sequence[Task]
    folder: Path
    otc: tuple[RunConfig, Path] | None
    draws: int
    metric: str
    seed: int

    def to_json(self) -> dict[str, Any]:
        otc = None if self.otc is None else [self.otc[0].model_dump(mode="json"), str(self.otc[1])]
        tasks = [task.model_dump(mode="json") for task in self.tasks]
        plain = {"draws": self.draws, "metric": self.metric, "seed": self.seed}
        return {"tasks": tasks, "folder": str(self.folder), "otc": otc, **plain}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> _PoolRequest:
        tasks = [Task.model_validate(task) for task in told["tasks"]]
        otc = None if told["otc"] is None else (RunConfig.model_validate(told["otc"][0]), Path(told["otc"][1]))
        return cls(tasks, Path(told["folder"]), otc, told["draws"], told["metric"], told["seed"])

    def pools(self, routing: TrainedRouter) -> list[_PoolFile]:
        """Every row under every route and as it is; and the other actor's rows as they are, scored and priced alike."""

        def begin(route: RouteAction | None) -> Callable[[Task, int], RouteDecision]:
            return lambda task, seed: routing.decide(task, route, seed=seed)

        def plan(routes: Mapping[str, RouteAction | None], made_by: Mapping[str, Any]) -> PoolPlan:
            begun = {name: begin(route) for name, route in routes.items()}
            return PoolPlan(self.tasks, begun, self.draws, self.metric, self.seed, made_by)

        routes: dict[str, RouteAction | None] = {route.value: route for route in ROUTES}
        made_by = _provenance(routing)
        own = plan(routes | {ALL_TOOLS: None}, made_by)
        pools = [_PoolFile(own, self.folder / "pool.jsonl", routing.config, lambda: routing.policy)]
        if self.otc is not None:
            config, model = self.otc
            other = plan({OTC: None}, {**made_by, "model": str(model.resolve())})
            pools.append(_PoolFile(other, self.folder / "otc.jsonl", config, lambda: local_policy(config, str(model))))
        return pools


@dataclass(frozen=True, slots=True)
class _PoolFile:
    """A file of outcomes, and who makes them."""

    plan: PoolPlan
    path: Path
    config: RunConfig
    policy: Callable[[], Any]

    @property
    def missing(self) -> list[Task]:
        """Tasks of which the file lacks anything."""
        known, names = read_cells(self.path, self.plan), list(self.plan.routes)
        return [task for task in self.plan.tasks if any((task.task_id, name) not in known for name in names)]

    def shard(self, number: int, of: int) -> _PoolFile:
        """Every so many-th of the missing tasks, in a file of its own."""
        mine = replace(self.plan, tasks=self.missing[number::of])
        return replace(self, plan=mine, path=shard_path(self.path, number, of))


async def _fill_in_processes(
    routing: TrainedRouter, asked: _PoolRequest, sharding: ShardSettings, on_done: Any
) -> None:
    """What is missing is shared out; afterwards the pools have all there is."""
    pools = asked.pools(routing)
    cells = sum(len(pool.plan.tasks) * len(pool.plan.routes) for pool in pools)

    def tell() -> None:
        files = [file for pool in pools for file in (pool.path, *shard_paths(pool.path))]
        on_done(f"{sharding.jobs} processes", min(count_cells(files), cells), cells)

    asked.folder.mkdir(parents=True, exist_ok=True)
    for pool in pools:
        merge_shards(pool.path, pool.plan)
    longest = max(len(pool.missing) for pool in pools)
    if longest:
        told = {
            "source": str(sharding.source),
            "config": routing.config.model_dump(mode="json"),
            "asked": asked.to_json(),
        }
        await run_in_processes(f"{__name__}:fill_shard", told, min(sharding.jobs, longest), tell)
    for pool in pools:
        merge_shards(pool.path, pool.plan)


def fill_shard(told: Mapping[str, Any], number: int, of: int) -> None:
    """One process's part."""
    import asyncio

    import torch

    from toolwise.agent.loader import load_router

    asked = _PoolRequest.from_json(told["asked"])
    routing = load_router(Path(told["source"]), config=RunConfig.model_validate(told["config"]))
    torch.set_num_threads(1)  # as many processes as cores: more threads would only wait for each other
    for pool in asked.pools(routing):
        shard = pool.shard(number, of)
        if shard.plan.tasks:
            asyncio.run(_fill(shard, routing))


async def _fill(pool: _PoolFile, routing: TrainedRouter, on_done: Any = lambda what, done, of: None) -> OutcomeTable:
    for task in pool.plan.tasks:
        check_task_tools(task, dict(routing.tools), env=routing.config.env.name)
    what = list(pool.plan.routes)[-1].lower()
    scoring = build_scoring(routing.config.reward)
    try:
        scoring.check(pool.plan.tasks)
        return await fill_pool(
            pool.plan,
            pool.path,
            build_scheduler(pool.config, pool.policy(), dict(routing.tools)),
            scoring,
            routing.cost_of,
            on_done=lambda done, of: on_done(what, done, of),
        )
    finally:
        scoring.close()


def _provenance(routing: TrainedRouter) -> Mapping[str, Any]:
    """What a pool depends on: the weights and all settings of rollouts, rewards and routes."""
    told = routing.config.model_dump(mode="json", exclude_none=True)
    kept = {key: told[key] for key in ("tools", "env", "rollout", "multi_turn", "reward", "router", "seed")}
    return {"model": _fingerprint(routing.policy.model), "settings": checkpoint.settings_digest(kept)}


def _fingerprint(model: Any) -> str:
    from toolwise.learner.fingerprint import fingerprint

    return str(fingerprint(model))


def _calibration(
    routing: TrainedRouter,
    outcomes: OutcomeTable,
    router_values: RouteValues,
    budgets: Sequence[float],
    saved: TimeSaved | None,
) -> Calibration:
    import numpy as np

    own = outcomes.select_routes([route.value for route in ROUTES])
    spent, scores = own.mean_over_draws("costs"), own.mean_over_draws("scores")
    kept = np.isfinite(scores).all(axis=1)
    known = RouteValues(
        router_values.values[kept],
        None if router_values.costs is None else router_values.costs[kept],
        router_values.samples,
    )
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
