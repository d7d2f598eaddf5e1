"""Selects rollouts for the report: held-out tasks whose outcome changed, and groups with different scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from toolwise.training.records import RolloutRecord

Outcome = Literal[
    "learned", "better", "cheaper", "lost", "worse", "still wrong", "still right", "unchanged", "not repeated"
]

MAX_PER_OUTCOME: dict[Outcome, int] = {"learned": 8, "better": 8, "cheaper": 2, "lost": 2, "worse": 2, "still wrong": 3}
"""Tasks shown per outcome, in this order. `better` and `worse` compare scores where correctness is unknown."""


@dataclass(frozen=True, slots=True)
class TaskChange:
    """One held-out task before and after training."""

    before: RolloutRecord
    after: RolloutRecord | None
    outcome: Outcome


def changed_tasks(before: Sequence[RolloutRecord], after: Sequence[RolloutRecord]) -> list[TaskChange]:
    """Tasks to show side by side, spread over the kinds; without a second validation, a few from before."""
    if not after:
        return [TaskChange(record, None, "not repeated") for record in _interleave_kinds(before)[:4]]
    later = {record.task_id: record for record in after}
    changes = [
        TaskChange(record, later[record.task_id], _outcome(record, later[record.task_id]))
        for record in _interleave_kinds(before)
        if record.task_id in later
    ]
    return [
        c for outcome, limit in MAX_PER_OUTCOME.items() for c in [c for c in changes if c.outcome == outcome][:limit]
    ]


def contrasting_groups(rollouts: Iterable[RolloutRecord], limit: int = 2) -> list[list[RolloutRecord]]:
    """Best and worst rollout of the groups with the largest score difference."""
    groups: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in rollouts:
        if largest_advantage([record]) > 0:
            groups[record.group_id].append(record)
    pairs = []
    for members in groups.values():
        ordered = sorted(members, key=_score, reverse=True)
        if len(ordered) > 1 and _score(ordered[0]) > _score(ordered[-1]):
            pairs.append([ordered[0], ordered[-1]])
    return sorted(pairs, key=lambda pair: _score(pair[0]) - _score(pair[1]), reverse=True)[:limit]


def largest_advantage(records: Iterable[RolloutRecord]) -> float:
    advantages = (step.advantage for record in records for step in record.steps)
    return max((abs(advantage) for advantage in advantages if advantage is not None), default=0.0)


def _outcome(before: RolloutRecord, after: RolloutRecord) -> Outcome:
    was, now = before.correct, after.correct
    if was is None or now is None:
        change = _score(after) - _score(before)
        return "better" if change > 0 else "worse" if change < 0 else "unchanged"
    if not was:
        return "learned" if now else "still wrong"
    if not now:
        return "lost"
    return "cheaper" if (after.cost or 0.0) < (before.cost or 0.0) else "still right"


def _interleave_kinds(records: Sequence[RolloutRecord]) -> list[RolloutRecord]:
    """Reorder so that the first few records cover every kind."""
    kinds: dict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        kinds[str(record.kind)].append(record)
    return [record for turn in zip_longest(*kinds.values()) for record in turn if record is not None]


def _score(record: RolloutRecord) -> float:
    return record.score or 0.0
