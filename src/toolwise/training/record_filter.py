"""Conditions on stored rollouts, such as `score>=1` or `route=SEARCH`, as the command line takes them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from toolwise.config.imports import did_you_mean
from toolwise.errors import ConfigError
from toolwise.training.records import RolloutRecord

_CONDITION = re.compile(r"\s*([\w./-]+)\s*(>=|<=|!=|=|>|<)\s*(.*?)\s*")
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_WORDS = {"true": True, "false": False, "none": None}
FIELDS: Mapping[str, Callable[[int, RolloutRecord], Any]] = {
    "step": lambda step, record: step,
    "score": lambda step, record: record.score,
    "correct": lambda step, record: record.correct,
    "cost": lambda step, record: record.cost,
    "calls": lambda step, record: sum(record.calls.values()),
    "failed_calls": lambda step, record: sum(record.failed_calls.values()),
    "turns": lambda step, record: len(record.steps),
    "route": lambda step, record: record.route,
    "kind": lambda step, record: record.kind,
    "data_source": lambda step, record: record.data_source,
    "task_id": lambda step, record: record.task_id,
    "group_id": lambda step, record: record.group_id,
    "stop_reason": lambda step, record: record.stop_reason,
    "trained_on": lambda step, record: record.trained_on,
    "answered_by": lambda step, record: record.answered_by,
}
"""What a condition can name, from the rollout's step and record; also any metric of the reward as `metrics.NAME`."""


class Condition(NamedTuple):
    """`field`, an operator, and the value that it is compared with."""

    text: str
    field: str
    operator: str
    value: Any

    def holds(self, step: int, record: RolloutRecord) -> bool:
        """A value that the rollout does not have equals `none` and is neither less nor more than a number."""
        actual = (
            record.metrics.get(self.field.removeprefix("metrics."))
            if self.field.startswith("metrics.")
            else FIELDS[self.field](step, record)
        )
        if self.operator in ("=", "!="):
            # text of digits may be a name: kind=3 matches the text "3" too
            is_equal = actual == self.value or (isinstance(actual, str) and actual == self.text)
            return is_equal == (self.operator == "=")
        return isinstance(actual, int | float) and _COMPARE[self.operator](actual, self.value)


def parse_condition(text: str) -> Condition:
    """`score>=1`, `route=SEARCH`, `metrics.format<1`, `correct=true`, `cost!=none`."""
    match = _CONDITION.fullmatch(text)
    if match is None or not match[3]:
        raise ConfigError(f"--where {text!r}: write a condition such as score>=1, route=SEARCH or correct=true")
    field, sign, value_text = match.groups()
    if field not in FIELDS and not field.startswith("metrics."):
        known = f"; use one of {', '.join(FIELDS)}, or metrics.NAME"
        raise ConfigError(f"--where {text!r}: there is no field {field!r}{did_you_mean(field, FIELDS) or known}")
    value = _WORDS.get(value_text.lower(), value_text)
    if isinstance(value, str):
        value = _as_number(value)
    if sign not in ("=", "!=") and (isinstance(value, str | bool) or value is None):
        raise ConfigError(f"--where {text!r}: {sign} compares numbers, {value_text!r} is none; use = or !=")
    return Condition(value_text, field, sign, value)


def _as_number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def satisfies(conditions: Sequence[Condition], step: int, record: RolloutRecord) -> bool:
    return all(condition.holds(step, record) for condition in conditions)
