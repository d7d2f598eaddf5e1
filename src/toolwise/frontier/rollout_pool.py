"""The pool of outcomes: n rollouts of every row under every route, stored in a file that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import numpy as np

from toolwise.errors import DataError
from toolwise.frontier.outcomes import OutcomeTable
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.serialization.json_text import json_text
from toolwise.training.scoring import Scoring
from toolwise.types import EvaluateResult, Rollout, RouteDecision, Task

FORMAT = 1
Cell = tuple[str, str]
"""A task id and a route."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What a pool holds."""

    tasks: Sequence[Task]
    routes: Mapping[str, Callable[[Task, int], RouteDecision]]
    """name -> the decision to roll a task out under this route, given a seed."""
    draws: int = 16
    metric: str = "auto"
    """The metric of the reward that counts as the score; "auto" is "correct" if the reward reports it, else the
    reward's score."""
    seed: int = 0
    of: Mapping[str, Any] = field(default_factory=dict)
    """Provenance (model, settings): a pool of another model is never resumed."""

    def header(self) -> dict[str, Any]:
        fields = {"draws": self.draws, "metric": self.metric, "seed": self.seed, "of": dict(self.of)}
        plain: dict[str, Any] = json.loads(json.dumps(fields))
        return {"pool": FORMAT} | plain


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
    done = len(planned) - len(missing)
    on_done(done, len(planned))
    if not missing:
        return _outcomes(plan, cells)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = tasks_at_once * len(plan.routes)
    with _open_for_append(path, plan) as file:
        for chunk in (missing[first : first + size] for first in range(0, len(missing), size)):
            decisions = [_decision(plan, task, name) for task, name in chunk]
            rollouts = await scheduler.roll_out(decisions, do_sample=True)
            results = await scoring.evaluate(rollouts, step=0)
            for cell, line in _records(chunk, rollouts, results, plan, cost_of):
                cells[cell] = line
                file.write(json_text(line) + "\n")
            file.flush()
            done += len(chunk)
            on_done(done, len(planned))
    return _outcomes(plan, cells)


def _decision(plan: PoolPlan, task: Task, name: str) -> RouteDecision:
    # Seeded by the cell and not by its position: a resumed pool samples what an uninterrupted one would have.
    seed = (plan.seed * 1_000_003) ^ (crc32(f"{name}/{task.task_id}".encode()) << 8)
    return replace(plan.routes[name](task, seed), n=plan.draws, seed=seed)


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
        cell_pairs = pairs[index * plan.draws : (index + 1) * plan.draws]
        draws = [
            {
                "score": score_of(rollout, result, plan.metric),
                "cost": cost_of(rollout),
                "calls": dict(rollout.usage.calls),
                "tokens": rollout.usage.sampled_tokens,
                "stop": rollout.stop_reason.value,
                "said": (rollout.messages[-1].content or "")[-200:],
            }
            for rollout, result in cell_pairs
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
        known = ", ".join(("score", *result.metrics))
        raise DataError(f"the reward reports no metric {name!r}: choose --metric from {known}")
    value = result.metrics[name]
    return value.score if value.is_score_valid else None


def read_cells(path: Path, plan: PoolPlan) -> dict[Cell, dict[str, Any]]:
    """The cells that a pool already has; truncated lines are skipped."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries: list[Any] = []
    for line in lines:
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    if not entries or entries[0] != plan.header():
        header = entries[0] if entries and isinstance(entries[0], dict) else {}
        differs = next((key for key, value in plan.header().items() if header.get(key) != value), "its first line")
        raise DataError(
            f"{path} is the pool of another evaluation ({differs} differs): give another --out, or remove it"
        )
    return {(line["task_id"], line["route"]): line for line in entries[1:] if len(line["draws"]) == plan.draws}


def append_cells(path: Path, plan: PoolPlan, lines: Iterable[Mapping[str, Any]]) -> None:
    """Appends cells to a pool."""
    with _open_for_append(path, plan) as file:
        file.writelines(json_text(line) + "\n" for line in lines)


def _open_for_append(path: Path, plan: PoolPlan) -> IO[str]:
    new = not path.exists()
    complete = new or path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if new:
        file.write(json_text(plan.header()) + "\n")
    elif not complete:
        file.write("\n")
    return file


def _outcomes(plan: PoolPlan, cells: Mapping[Cell, Mapping[str, Any]]) -> OutcomeTable:
    shape = (len(plan.tasks), len(plan.routes), plan.draws)
    scores, costs = np.empty(shape), np.empty(shape)
    for i, task in enumerate(plan.tasks):
        for j, name in enumerate(plan.routes):
            draws = cells[task.task_id, name]["draws"]
            scores[i, j] = [np.nan if draw["score"] is None else draw["score"] for draw in draws]
            costs[i, j] = [draw["cost"] for draw in draws]
    return OutcomeTable(tuple(task.task_id for task in plan.tasks), tuple(plan.routes), scores, costs)
