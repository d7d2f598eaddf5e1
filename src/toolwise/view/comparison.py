"""Before against after training: rows of metrics, and the rollouts that are worth showing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from toolwise.routing.delivered_budget import format_cost
from toolwise.training.records import RolloutRecord
from toolwise.training.trackers.console import format_metric
from toolwise.training.trackers.conversation import clean_text

HIGHER_IS_BETTER = frozenset({"correct", "score"})
"""Metrics where more is better. Cost and tokens are not judged: spending less is not good in itself."""
LOWER_IS_BETTER = frozenset({"loss"})


Outcome = Literal[
    "learned", "better", "cheaper", "lost", "worse", "still wrong", "still right", "unchanged", "not repeated"
]
MAX_PER_OUTCOME: dict[Outcome, int] = {"learned": 8, "better": 8, "cheaper": 2, "lost": 2, "worse": 2, "still wrong": 3}
"""Tasks shown per outcome, in this order. `better` and `worse` compare scores where correctness is unknown."""
BUDGET_FIGURES = ("limit", "delivered", "stderr")


@dataclass(frozen=True, slots=True)
class MetricChange:
    """One metric before and after; either value may be missing."""

    name: str
    before: float | None
    after: float | None

    @property
    def before_text(self) -> str:
        return format_metric(self.name, self.before)

    @property
    def after_text(self) -> str:
        return format_metric(self.name, self.after)

    @property
    def difference(self) -> float:
        return 0.0 if self.before is None or self.after is None else self.after - self.before

    @property
    def difference_text(self) -> str:
        if self.before is None or self.after is None:
            return ""
        if self.name == "correct":
            return f"{100 * self.difference:+.1f} points"
        if self.name == "cost":
            return f"{'+' if self.difference >= 0 else ''}{format_cost(self.difference, self.before or self.after)}"
        return f"{self.difference:+,.0f}" if self.name == "tokens" else f"{self.difference:+.3f}"

    @property
    def tone(self) -> str:
        """`good`, `bad` or `same`; `same` too for metrics where neither more nor less is better."""
        if abs(self.difference) < 5e-4 or self.name not in HIGHER_IS_BETTER | LOWER_IS_BETTER:
            return "same"
        return "good" if (self.difference > 0) == (self.name in HIGHER_IS_BETTER) else "bad"


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One kind of task, or all tasks."""

    label: str
    n: int | None
    changes: tuple[MetricChange, ...]


def headline(summary: Mapping[str, Any]) -> list[MetricChange]:
    """The run's main metrics, without missing ones."""
    before, after = _table(summary.get("before")), _table(summary.get("after"))
    changes = [_change(name, before, after) for name in ("loss", "correct", "score", "cost", "tokens")]
    return [c for c in changes if c.before is not None or c.after is not None]


def rows_by_kind(summary: Mapping[str, Any]) -> list[ComparisonRow]:
    """All tasks first, then each kind; columns are share correct (or score) and cost, or the loss of an SFT run."""
    before, after = _table(summary.get("before")), _table(summary.get("after"))
    if any(_number(side.get("loss")) is not None for side in (before, after)):
        held_out = _table(summary.get("conversations")).get("val")
        return [ComparisonRow("held-out conversations", held_out, (_change("loss", before, after),))]
    kinds_before, kinds_after = _table(before.get("by_kind")), _table(after.get("by_kind"))
    sides = [before, after, *map(_table, kinds_before.values()), *map(_table, kinds_after.values())]
    has_correct = any(_number(side.get("correct")) is not None for side in sides)
    names = ("correct" if has_correct else "score", "cost")

    def row(label: str, kind_before: Mapping[str, Any], kind_after: Mapping[str, Any]) -> ComparisonRow:
        changes = tuple(_change(name, kind_before, kind_after) for name in names)
        return ComparisonRow(clean_text(label), kind_before.get("n") or kind_after.get("n"), changes)

    kinds = dict.fromkeys([*kinds_before, *kinds_after])
    kind_rows = (row(kind, _table(kinds_before.get(kind)), _table(kinds_after.get(kind))) for kind in kinds)
    return [row("all tasks", before, after), *kind_rows]


def describe_budgets(summary: Mapping[str, Any]) -> list[str]:
    """What the last validation spent against each budget, with a 95 % interval, and how the router was calibrated."""
    after, calibration = _table(summary.get("after")), _table(summary.get("calibration"))
    lines = []
    for name in sorted(after):
        unit = name.removeprefix("budget/").removesuffix("/limit")
        if name != f"budget/{unit}/limit":
            continue
        limit, delivered, error = (_number(after.get(f"budget/{unit}/{what}")) for what in BUDGET_FIGURES)
        if limit is not None and delivered is not None and error is not None:
            low, high = max(0.0, delivered - 1.96 * error), delivered + 1.96 * error
            spent, *interval = (format_cost(value, limit) for value in (delivered, low, high))
            lines.append(f"delivered {unit} {spent} [{' '.join(interval)}] against a budget of {limit:g}")
    for unit, figures in _table(calibration.get("units")).items():
        cost, error, limit = (_number(_table(figures).get(name)) for name in ("cost", "standard_error", "limit"))
        if cost is not None and error is not None:
            rows = f"{calibration.get('tasks')} calibration tasks, {calibration.get('rolled_out')} rolled out"
            reached = f"{unit} {format_cost(cost, limit)} ± {format_cost(error, limit)} (standard error)"
            lines.append(f"calibrated at step {calibration.get('step')}: {reached} on {rows}")
    if calibration and not calibration.get("units"):
        lines.append(f"{calibration.get('tasks')} calibration tasks, not used yet")
    return lines


def _change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> MetricChange:
    return MetricChange(name, _number(before.get(name)), _number(after.get(name)))


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


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
    ordered = (sorted(members, key=_score, reverse=True) for members in groups.values())
    pairs = [[members[0], members[-1]] for members in ordered if _score(members[0]) > _score(members[-1])]
    return sorted(pairs, key=lambda pair: _score(pair[0]) - _score(pair[1]), reverse=True)[:limit]


def largest_advantage(records: Iterable[RolloutRecord]) -> float:
    advantages = (step.advantage for record in records for step in record.steps)
    return max((abs(advantage) for advantage in advantages if advantage is not None), default=0.0)


def _outcome(before: RolloutRecord, after: RolloutRecord) -> Outcome:
    was, now = before.correct, after.correct
    if was is None or now is None:
        if before.score is None or after.score is None:
            return "unchanged"  # without a score there is nothing to compare
        change = after.score - before.score
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
