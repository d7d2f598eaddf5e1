"""The pool of outcomes: n rollouts of every row under every route, stored in a file that can be resumed.

A frontier is computed from the `OutcomeTable` of its pools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from toolwise.errors import DataError
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.threshold import Floats
from toolwise.serialization.json_text import json_line, load_json
from toolwise.training.evaluate import Scoring
from toolwise.types import EvaluateResult, Rollout, RouteDecision, Task

FORMAT = 1
ALL_TOOLS = "ALL-TOOLS"
"""Not a route: the unchanged prompt with all its tools."""
Cell = tuple[str, str]
"""A task id and a route."""


@dataclass(frozen=True, slots=True)
class OutcomeTable:
    """Scores and costs, [rows, routes, draws]; NaN where a draw could not be scored."""

    row_ids: tuple[str, ...]
    routes: tuple[str, ...]
    """The routes, followed by what they are compared with: ALL_TOOLS and the names of other trained actors."""
    scores: Floats
    costs: Floats

    def mean_over_draws(self, what: str) -> Floats:
        """The mean of "scores" or "costs" over the scored draws, [rows, routes]."""
        values = np.where(np.isnan(self.scores), np.nan, getattr(self, what))
        counts = (~np.isnan(values)).sum(axis=2)
        sums = np.nan_to_num(values, nan=0.0).sum(axis=2)
        return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)

    def complete_rows(self) -> NDArray[np.int64]:
        """Indices of the rows scored under every route."""
        complete = np.flatnonzero(~np.isnan(self.mean_over_draws("scores")).any(axis=1))
        if not len(complete):
            raise DataError(
                "no row was scored under every route: look for the reason in the pool's rollouts, then run again"
            )
        return complete

    def select_rows(self, chosen: Sequence[int] | NDArray[np.int64]) -> OutcomeTable:
        return replace(
            self,
            row_ids=tuple(self.row_ids[i] for i in chosen),
            scores=self.scores[chosen],
            costs=self.costs[chosen],
        )

    def select_routes(self, routes: Sequence[str]) -> OutcomeTable:
        columns = [self.routes.index(name) for name in routes]
        return replace(
            self,
            routes=tuple(routes),
            scores=self.scores[:, columns],
            costs=self.costs[:, columns],
        )

    def select_draws(self, chosen: slice) -> OutcomeTable:
        return replace(self, scores=self.scores[:, :, chosen], costs=self.costs[:, :, chosen])

    def concat_routes(self, other: OutcomeTable) -> OutcomeTable:
        """Adds the routes of `other`, which must have the same rows and number of draws."""
        return OutcomeTable(
            self.row_ids,
            (*self.routes, *other.routes),
            np.concatenate([self.scores, other.scores], axis=1),
            np.concatenate([self.costs, other.costs], axis=1),
        )


@dataclass(frozen=True, slots=True)
class PoolPlan:
    tasks: Sequence[Task]
    routes: Mapping[str, Callable[[Task], RouteDecision]]
    """name -> the decision to roll a task out under this route; the pool sets its seed and number of rollouts."""
    draws: int = 16
    metric: str = "auto"
    """The metric of the reward that counts as the score; "auto" is "correct" if the reward reports it, else the
    reward's score."""
    seed: int = 0
    of: Mapping[str, Any] = field(default_factory=dict)
    """Provenance (model, settings): a pool of another model is never resumed."""

    def header(self) -> dict[str, Any]:
        fields = {"draws": self.draws, "metric": self.metric, "seed": self.seed, "of": dict(self.of)}
        return {"pool": FORMAT, **json.loads(json.dumps(fields))}


async def fill_pool(
    plan: PoolPlan,
    path: Path,
    scheduler: RolloutScheduler,
    scoring: Scoring,
    cost_of: Callable[[Rollout], float],
    *,
    tasks_at_once: int = 32,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> OutcomeTable:
    """Rolls out every cell of the plan that is not in `path` yet, and returns the outcomes of all of them."""
    cells = read_cells(path, plan)
    planned = [(task, name) for task in plan.tasks for name in plan.routes]
    missing = [(task, name) for task, name in planned if (task.task_id, name) not in cells]
    size = tasks_at_once * len(plan.routes)
    on_done(len(planned) - len(missing), len(planned))
    for first in range(0, len(missing), size):
        chunk = missing[first : first + size]
        rollouts = await scheduler.roll_out([_decision(plan, task, name) for task, name in chunk], do_sample=True)
        records = dict(_records(chunk, rollouts, await scoring.evaluate(rollouts, step=0), plan, cost_of))
        append_cells(path, plan, records.values())
        cells |= records
        on_done(len(planned) - len(missing) + first + len(chunk), len(planned))
    return _outcomes(plan, cells)


def _decision(plan: PoolPlan, task: Task, name: str) -> RouteDecision:
    # Seeded by the cell and not by its position: a resumed pool samples what an uninterrupted one would have.
    seed = (plan.seed * 1_000_003) ^ (crc32(f"{name}/{task.task_id}".encode()) << 8)
    return replace(plan.routes[name](task), n=plan.draws, seed=seed)


def _records(
    part: Sequence[tuple[Task, str]],
    rollouts: Sequence[Rollout],
    results: Sequence[EvaluateResult],
    plan: PoolPlan,
    cost_of: Callable[[Rollout], float],
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """One line per cell, with all its draws."""
    pairs = list(zip(rollouts, results, strict=True))
    for index, (task, name) in enumerate(part):
        draws = [
            {
                "score": score_of(rollout, result, plan.metric),
                "cost": cost_of(rollout),
                "calls": dict(rollout.usage.calls),
                "tokens": rollout.usage.sampled_tokens,
                "stop": rollout.stop_reason.value,
                "said": (rollout.messages[-1].content or "")[-200:],
            }
            for rollout, result in pairs[index * plan.draws : (index + 1) * plan.draws]
        ]
        yield (task.task_id, name), {"task_id": task.task_id, "route": name, "draws": draws}


def score_of(rollout: Rollout, result: EvaluateResult, metric: str) -> float | None:
    """None if there is no valid score: the infrastructure or the reward failed."""
    if not result.has_valid_score or not rollout.trainable:
        return None
    if metric == "score" or (metric == "auto" and "correct" not in result.metrics):
        return result.score
    name = "correct" if metric == "auto" else metric
    if name not in result.metrics:
        raise DataError(
            f"the reward reports no metric {name!r}: choose --metric from {', '.join(('score', *result.metrics))}"
        )
    value = result.metrics[name]
    return value.score if value.is_score_valid else None


def read_cells(path: Path, plan: PoolPlan) -> dict[Cell, dict[str, Any]]:
    """The cells that a pool already has; truncated lines are skipped."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = [entry for entry in map(load_json, lines) if entry is not None]
    if not entries or entries[0] != plan.header():
        header = entries[0] if entries and isinstance(entries[0], dict) else {}
        differs = next((key for key, value in plan.header().items() if header.get(key) != value), "its first line")
        raise DataError(
            f"{path} is the pool of another evaluation ({differs} differs): give another --out, or remove it"
        )
    return {(line["task_id"], line["route"]): line for line in entries[1:] if len(line["draws"]) == plan.draws}


def append_cells(path: Path, plan: PoolPlan, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends cells to a pool, which is created if there is none; after a truncated line on a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(json_line(plan.header()))
    line_end = b"" if path.read_bytes().endswith(b"\n") else b"\n"
    with path.open("ab") as file:
        file.writelines([line_end, *map(json_line, lines)])


def _outcomes(plan: PoolPlan, cells: Mapping[Cell, Mapping[str, Any]]) -> OutcomeTable:
    rows = [[cells[task.task_id, name]["draws"] for name in plan.routes] for task in plan.tasks]
    scores, costs = (  # a missing score becomes NaN
        np.array([[[draw[what] for draw in draws] for draws in row] for row in rows], dtype=np.float64)
        for what in ("score", "cost")
    )
    return OutcomeTable(tuple(task.task_id for task in plan.tasks), tuple(plan.routes), scores, costs)
