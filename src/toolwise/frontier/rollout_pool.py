"""The pool of outcomes: so many rollouts of every row under every route, made once, kept on disk, gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolwise.errors import DataError
from toolwise.frontier.outcomes import OutcomeTable
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.serialization.json_text import json_text
from toolwise.training.scoring import Scoring
from toolwise.types import EvaluateResult, Rollout, RouteDecision, Task

FORMAT = 1
Cell = tuple[str, str]
"""A row's id and a route."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What a pool holds."""

    tasks: Sequence[Task]
    routes: Mapping[str, Callable[[Task, int], RouteDecision]]
    """name -> how a task's rollouts begin under it, given a seed."""
    draws: int = 16
    metric: str = "auto"
    """What counts as the score: a metric that the reward reports; "auto" is "correct" where it is reported, else the
    score itself."""
    seed: int = 0
    of: Mapping[str, Any] = field(default_factory=dict)
    """What it was made by: a pool of another model is never gone on with."""

    def header(self) -> dict[str, Any]:
        kept = {"draws": self.draws, "metric": self.metric, "seed": self.seed, "of": dict(self.of)}
        told: dict[str, Any] = json.loads(json.dumps(kept))
        return {"pool": FORMAT} | told


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
    """Everything of the plan that `path` does not have yet is rolled out, and then all of it read back."""
    known = read_cells(path, plan)
    wanted = [(task, name) for task in plan.tasks for name in plan.routes]
    missing = [(task, name) for task, name in wanted if (task.task_id, name) not in known]
    done = len(wanted) - len(missing)
    on_done(done, len(wanted))
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _open_for_append(path, plan) if missing else _null_file() as file:
        for part in _chunks(missing, tasks_at_once * len(plan.routes)):
            decisions = [_decision(plan, task, name) for task, name in part]
            rollouts = await scheduler.roll_out(decisions, do_sample=True)
            results = await scoring.evaluate(rollouts, step=0)
            for cell, line in _records(part, rollouts, results, plan, cost_of):
                known[cell] = line
                file.write(json_text(line) + "\n")
            file.flush()
            done += len(part)
            on_done(done, len(wanted))
    return _outcomes(plan, known)


def _decision(plan: PoolPlan, task: Task, name: str) -> RouteDecision:
    from dataclasses import replace
    from zlib import crc32

    # By what it is and not by its place: a pool that is gone on with draws what it would have drawn at once.
    seed = (plan.seed * 1_000_003) ^ (crc32(f"{name}/{task.task_id}".encode()) << 8)
    return replace(plan.routes[name](task, seed), n=plan.draws, seed=seed)


def _records(
    part: Sequence[tuple[Task, str]],
    rollouts: Sequence[Rollout],
    results: Sequence[EvaluateResult],
    plan: PoolPlan,
    cost_of: Callable[[Rollout], float],
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """A line a cell, with every draw of it."""
    pairs = list(zip(rollouts, results, strict=True))
    for place, (task, name) in enumerate(part):
        own = pairs[place * plan.draws : (place + 1) * plan.draws]
        draws = [
            {
                "score": score_of(rollout, result, plan.metric),
                "cost": cost_of(rollout),
                "calls": dict(rollout.usage.calls),
                "tokens": rollout.usage.sampled_tokens,
                "stop": rollout.stop_reason.value,
                "said": (rollout.messages[-1].content or "")[-200:],
            }
            for rollout, result in own
        ]
        yield (task.task_id, name), {"task_id": task.task_id, "route": name, "draws": draws}


def score_of(rollout: Rollout, result: EvaluateResult, metric: str) -> float | None:
    """None where there is none to be had: infrastructure failed, or the reward did."""
    if not result.has_valid_score or not rollout.trainable:
        return None
    if metric == "score" or (metric == "auto" and "correct" not in result.metrics):
        return result.score
    name = "correct" if metric == "auto" else metric
    if name not in result.metrics:
        known = ", ".join(("score", *result.metrics))
        raise DataError(f"the reward reports no {name!r}: choose --metric among {known}")
    found = result.metrics[name]
    return found.score if found.is_score_valid else None


def read_cells(path: Path, plan: PoolPlan) -> dict[Cell, dict[str, Any]]:
    """What a pool has already. A line that was cut off is not there."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found: list[Any] = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    if not found or found[0] != plan.header():
        told = found[0] if found and isinstance(found[0], dict) else {}
        differs = next((key for key, value in plan.header().items() if told.get(key) != value), "its first line")
        raise DataError(f"{path} is the pool of something else ({differs} differs): give another --out, or remove it")
    return {(line["task_id"], line["route"]): line for line in found[1:] if len(line["draws"]) == plan.draws}


def append_cells(path: Path, plan: PoolPlan, lines: Iterable[Mapping[str, Any]]) -> None:
    """More cells, behind those that the pool has."""
    with _open_for_append(path, plan) as file:
        file.writelines(json_text(line) + "\n" for line in lines)


def _open_for_append(path: Path, plan: PoolPlan) -> IO[str]:
    new = not path.exists()
    whole = new or path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if new:
        file.write(json_text(plan.header()) + "\n")
    elif not whole:
        file.write("\n")
    return file


def _null_file() -> IO[str]:
    import io

    return io.StringIO()


def _chunks(cells: Sequence[tuple[Task, str]], size: int) -> Iterator[Sequence[tuple[Task, str]]]:
    for first in range(0, len(cells), size):
        yield cells[first : first + size]


def _outcomes(plan: PoolPlan, known: Mapping[Cell, Mapping[str, Any]]) -> OutcomeTable:
    import numpy as np

    shape = (len(plan.tasks), len(plan.routes), plan.draws)
    scores, costs = np.empty(shape), np.empty(shape)
    for i, task in enumerate(plan.tasks):
        for j, name in enumerate(plan.routes):
            draws = known[task.task_id, name]["draws"]
            scores[i, j] = [np.nan if draw["score"] is None else draw["score"] for draw in draws]
            costs[i, j] = [draw["cost"] for draw in draws]
    return OutcomeTable(tuple(task.task_id for task in plan.tasks), tuple(plan.routes), scores, costs)
