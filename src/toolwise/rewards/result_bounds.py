"""How much a reward may say: results that are too large are refused by name, texts that are too long are cut."""

from __future__ import annotations

import math

from toolwise.bounds import (
    LARGEST_METRIC,
    LARGEST_SCORE,
    LONGEST_FAULT,
    LONGEST_NAME,
    LONGEST_REASON,
    MOST_METRICS,
    MOST_STEP_OUTPUTS,
    cut,
    in_bounds,
)
from toolwise.results import MetricResult
from toolwise.types import EvaluateResult, StepOutput


def excess_of(result: EvaluateResult) -> tuple[str, str] | None:
    """The kind of fault and one line about the first thing that is beyond a limit; None where nothing is."""
    outputs = result.step_outputs or ()
    if len(result.metrics) > MOST_METRICS:
        return "too_big", f"the result has {len(result.metrics):,} metrics; at most {MOST_METRICS} are kept"
    if len(outputs) > MOST_STEP_OUTPUTS:
        return "too_big", f"the result has {len(outputs):,} step outputs; at most {MOST_STEP_OUTPUTS:,} are read"
    for name in result.metrics:
        if len(name) > LONGEST_NAME:
            return "too_big", f"a metric's name has {len(name):,} characters; at most {LONGEST_NAME} are kept"
    for output in outputs:
        index = output.step_index
        if len(index) > LONGEST_NAME if isinstance(index, str) else abs(index) > LARGEST_SCORE:
            return "too_big", "a step_index is no step's: give the number of a step, from 0"
    if result.score is not None and math.isfinite(result.score) and not in_bounds(result.score):
        return "out_of_range", f"the score is {result.score}; it must lie between ±{LARGEST_SCORE:g}"
    for name, metric in result.metrics.items():
        if math.isfinite(metric.score) and not in_bounds(metric.score, LARGEST_METRIC):
            return "out_of_range", f"the metric {name!r} is {metric.score}; it must lie between ±{LARGEST_METRIC:g}"
    return None


def shortened(result: EvaluateResult) -> EvaluateResult:
    """The same with reasons, names and tracebacks that any file takes."""
    changes: dict[str, object] = {}
    if result.reason is not None and (reason := cut(result.reason, LONGEST_REASON)) != result.reason:
        changes["reason"] = reason
    if any(_long(name, metric) for name, metric in result.metrics.items()):
        changes["metrics"] = {
            cut(name, LONGEST_NAME): metric.model_copy(update={"reason": cut(metric.reason, LONGEST_REASON)})
            for name, metric in result.metrics.items()
        }
    if any(
        output.reason is not None and cut(output.reason, LONGEST_REASON) != output.reason for output in _steps(result)
    ):
        changes["step_outputs"] = [
            output.model_copy(update={"reason": output.reason and cut(output.reason, LONGEST_REASON)})
            for output in _steps(result)
        ]
    if result.error is not None:
        fields = ("kind", "message", "traceback")
        told = {name: cut(getattr(result.error, name), LONGEST_FAULT) for name in fields}
        if any(told[name] != getattr(result.error, name) for name in fields):
            changes["error"] = result.error.model_copy(update=told)
    return result.model_copy(update=changes) if changes else result


def _steps(result: EvaluateResult) -> list[StepOutput]:
    return result.step_outputs or []


def _long(name: str, metric: MetricResult) -> bool:
    return cut(name, LONGEST_NAME) != name or cut(metric.reason, LONGEST_REASON) != metric.reason
