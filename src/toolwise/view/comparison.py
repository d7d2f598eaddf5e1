"""Metrics before and after training: the rows of the terminal table and of the report table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolwise.training.trackers.console import format_metric
from toolwise.training.trackers.conversation import clean_text

HIGHER_IS_BETTER = frozenset({"correct", "score"})
"""Metrics where more is better. Cost and tokens are not judged: spending less is not good in itself."""


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
        return f"{self.difference:+,.0f}" if self.name == "tokens" else f"{self.difference:+.3f}"

    @property
    def tone(self) -> str:
        """`good`, `bad` or `same`; `same` too for metrics where more is not better."""
        if abs(self.difference) < 5e-4 or self.name not in HIGHER_IS_BETTER:
            return "same"
        return "good" if self.difference > 0 else "bad"


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One kind of task, or all tasks."""

    label: str
    n: int | None
    changes: tuple[MetricChange, ...]


def headline(summary: Mapping[str, Any]) -> list[MetricChange]:
    """The run's main metrics, without missing ones."""
    before, after = _table(summary.get("before")), _table(summary.get("after"))
    changes = [_change(name, before, after) for name in ("correct", "score", "cost", "tokens")]
    return [c for c in changes if c.before is not None or c.after is not None]


def rows_by_kind(summary: Mapping[str, Any]) -> list[ComparisonRow]:
    """All tasks first, then each kind; columns are share correct (or score) and cost."""
    before, after = _table(summary.get("before")), _table(summary.get("after"))
    has_correct = any(_number(side.get("correct")) is not None for side in (before, after))
    kinds_before, kinds_after = _table(before.get("by_kind")), _table(after.get("by_kind"))
    names = ("correct" if has_correct or kinds_before or kinds_after else "score", "cost")

    def row(label: str, kind_before: Mapping[str, Any], kind_after: Mapping[str, Any]) -> ComparisonRow:
        n = kind_before.get("n") or kind_after.get("n")
        return ComparisonRow(clean_text(label), n, tuple(_change(name, kind_before, kind_after) for name in names))

    kinds = dict.fromkeys([*kinds_before, *kinds_after])
    kind_rows = [row(kind, _table(kinds_before.get(kind)), _table(kinds_after.get(kind))) for kind in kinds]
    return [row("all tasks", before, after), *kind_rows]


def _change(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> MetricChange:
    return MetricChange(name, _number(before.get(name)), _number(after.get(name)))


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
