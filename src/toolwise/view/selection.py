"""Selects rollouts for the report: held-out tasks whose outcome changed, and groups with different scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from toolwise.training.trackers.conversation import is_correct

Record = Mapping[str, Any]
Outcome = Literal[
    "learned", "better", "cheaper", "lost", "worse", "still wrong", "still right", "unchanged", "not repeated"
]

MAX_PER_OUTCOME: dict[Outcome, int] = {"learned": 8, "better": 8, "cheaper": 2, "lost": 2, "worse": 2, "still wrong": 3}
"""Tasks shown per outcome, in this order. `better` and `worse` compare scores where correctness is unknown."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One held-out task before and after training."""

    before: Record
    after: Record | None
    outcome: Outcome


def changed_tasks(before: Sequence[Record], after: Sequence[Record]) -> list[TaskChange]:
    """Tasks to show side by side, spread over the kinds; without a second validation, a few from before."""
    if not after:
        return [TaskChange(record, None, "not repeated") for record in _interleave_kinds(before)[:4]]
    later = {record.get("task_id"): record for record in after}
    changes = [
        TaskChange(record, later[record.get("task_id")], _outcome(record, later[record.get("task_id")]))
        for record in _interleave_kinds(before)
        if record.get("task_id") in later
    ]
    return [
        c for outcome, limit in MAX_PER_OUTCOME.items() for c in [c for c in changes if c.outcome == outcome][:limit]
    ]


def contrasting_groups(rollouts: Iterable[Record], limit: int = 2) -> list[list[Record]]:
    """Best and worst rollout of the groups with the largest score difference."""
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in rollouts:
        if largest_advantage([record]) > 0:
            groups[record.get("group_id")].append(record)
    pairs = []
    for members in groups.values():
        ordered = sorted(members, key=_score, reverse=True)
        if len(ordered) > 1 and _score(ordered[0]) > _score(ordered[-1]):
            pairs.append([ordered[0], ordered[-1]])
    return sorted(pairs, key=lambda pair: _score(pair[0]) - _score(pair[1]), reverse=True)[:limit]


def advantages_of(record: Record) -> list[float | None]:
    """One per step, None if the step has none."""
    steps = record.get("steps")
    values = [step.get("advantage") if isinstance(step, Mapping) else None for step in steps or ()]
    return [float(a) if isinstance(a, int | float) else None for a in values]


def largest_advantage(records: Iterable[Record]) -> float:
    return max((abs(a) for record in records for a in advantages_of(record) if a is not None), default=0.0)


def _outcome(before: Record, after: Record) -> Outcome:
    was, now = is_correct(before), is_correct(after)
    if was is None or now is None:
        change = _score(after) - _score(before)
        return "better" if change > 0 else "worse" if change < 0 else "unchanged"
    if not was:
        return "learned" if now else "still wrong"
    if not now:
        return "lost"
    return "cheaper" if _cost(after) < _cost(before) else "still right"


def _interleave_kinds(records: Sequence[Record]) -> list[Record]:
    """Reorder so that the first few records cover every kind."""
    kinds: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        kinds[record.get("kind")].append(record)
    return [record for turn in zip_longest(*kinds.values()) for record in turn if record is not None]


def _score(record: Record) -> float:
    score = record.get("score")
    return float(score) if isinstance(score, int | float) else 0.0


def _cost(record: Record) -> float:
    cost = record.get("cost")
    return float(cost) if isinstance(cost, int | float) else 0.0
