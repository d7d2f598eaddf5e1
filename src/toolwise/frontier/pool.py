"""The pool of outcomes: so many rollouts of every row under every route, made once, kept on disk, gone on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from toolwise.errors import DataError
from toolwise.frontier.outcomes import Outcomes
from toolwise.json_text import json_text
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.scoring import Scoring
from toolwise.types import EvaluateResult, Rollout, RouteDecision, Task

FORMAT = 1
Cell = tuple[str, str]
"""A row's id and a route."""


@dataclass(frozen=True, slots=True)
class Plan:
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

    def head(self) -> dict[str, Any]:
        kept = {"draws": self.draws, "metric": self.metric, "seed": self.seed, "of": dict(self.of)}
        told: dict[str, Any] = json.loads(json.dumps(kept))
        return {"pool": FORMAT} | told


async def fill_pool(
    plan: Plan,
    path: Path,
    scheduler: RolloutScheduler,
    scoring: Scoring,
    cost_of: Callable[[Rollout], float],
    *,
    tasks_at_once: int = 32,
    on_done: Callable[[int, int], None] = lambda done, of: None,
) -> Outcomes:
    """Everything of the plan that `path` does not have yet is rolled out, and then all of it read back."""
    known = read_cells(path, plan)
    wanted = [(task, name) for task in plan.tasks for name in plan.routes]
    missing = [(task, name) for task, name in wanted if (task.task_id, name) not in known]
    done = len(wanted) - len(missing)
    on_done(done, len(wanted))
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, plan) if missing else _nothing() as file:
        for part in _parts(missing, tasks_at_once * len(plan.routes)):
            decisions = [_seeded(plan, task, name) for task, name in part]
            rollouts = await scheduler.roll_out(decisions, do_sample=True)
            results = await scoring.evaluate(rollouts, step=0)
            for cell, line in _lines(part, rollouts, results, plan, cost_of):
                known[cell] = line
                file.write(json_text(line) + "\n")
            file.flush()
            done += len(part)
            on_done(done, len(wanted))
    return _outcomes(plan, known)


def _seeded(plan: Plan, task: Task, name: str) -> RouteDecision:
    from dataclasses import replace
    from zlib import crc32

    # By what it is and not by its place: a pool that is gone on with draws what it would have drawn at once.
    seed = (plan.seed * 1_000_003) ^ (crc32(f"{name}/{task.task_id}".encode()) << 8)
    return replace(plan.routes[name](task, seed), n=plan.draws, seed=seed)


def _lines(
    part: Sequence[tuple[Task, str]],
    rollouts: Sequence[Rollout],
    results: Sequence[EvaluateResult],
    plan: Plan,
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
    if not result.counts or not rollout.trainable:
        return None
    if metric == "score" or (metric == "auto" and "correct" not in result.metrics):
        return result.score
    name = "correct" if metric == "auto" else metric
    if name not in result.metrics:
        known = ", ".join(("score", *result.metrics))
        raise DataError(f"the reward reports no {name!r}: choose --metric among {known}")
    found = result.metrics[name]
    return found.score if found.is_score_valid else None


def read_cells(path: Path, plan: Plan) -> dict[Cell, dict[str, Any]]:
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
    if not found or found[0] != plan.head():
        told = found[0] if found and isinstance(found[0], dict) else {}
        differs = next((key for key, value in plan.head().items() if told.get(key) != value), "its first line")
        raise DataError(f"{path} is the pool of something else ({differs} differs): give another --out, or remove it")
    return {(line["task_id"], line["route"]): line for line in found[1:] if len(line["draws"]) == plan.draws}


def write_cells(path: Path, plan: Plan, lines: Iterable[Mapping[str, Any]]) -> None:
    """More cells, behind those that the pool has."""
    with _opened(path, plan) as file:
        file.writelines(json_text(line) + "\n" for line in lines)


def _opened(path: Path, plan: Plan) -> IO[str]:
    new = not path.exists()
    whole = new or path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if new:
        file.write(json_text(plan.head()) + "\n")
    elif not whole:
        file.write("\n")
    return file


def _nothing() -> IO[str]:
    import io

    return io.StringIO()


def _parts(cells: Sequence[tuple[Task, str]], size: int) -> Iterator[Sequence[tuple[Task, str]]]:
    for first in range(0, len(cells), size):
        yield cells[first : first + size]


def _outcomes(plan: Plan, known: Mapping[Cell, Mapping[str, Any]]) -> Outcomes:
    import numpy as np

    shape = (len(plan.tasks), len(plan.routes), plan.draws)
    scores, costs = np.empty(shape), np.empty(shape)
    for i, task in enumerate(plan.tasks):
        for j, name in enumerate(plan.routes):
            draws = known[task.task_id, name]["draws"]
            scores[i, j] = [np.nan if draw["score"] is None else draw["score"] for draw in draws]
            costs[i, j] = [draw["cost"] for draw in draws]
    return Outcomes(tuple(task.task_id for task in plan.tasks), tuple(plan.routes), scores, costs)
