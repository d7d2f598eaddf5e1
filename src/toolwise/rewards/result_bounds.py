"""Size limits of reward results: results that are too large are rejected, texts that are too long are truncated."""

from __future__ import annotations

import math

from toolwise.types import EvaluateResult
from toolwise.untrusted.bounds import (
    MAX_FAULT_CHARS,
    MAX_METRIC_VALUE,
    MAX_METRICS,
    MAX_NAME_CHARS,
    MAX_REASON_CHARS,
    MAX_SCORE,
    MAX_STEP_OUTPUTS,
    in_bounds,
    truncate_text,
)


def find_excess(result: EvaluateResult) -> tuple[str, str] | None:
    """The fault kind and a one-line message for the first limit that `result` exceeds, or None."""
    outputs = result.step_outputs or ()
    if len(result.metrics) > MAX_METRICS:
        return "too_big", f"the result has {len(result.metrics):,} metrics; at most {MAX_METRICS} are kept"
    if len(outputs) > MAX_STEP_OUTPUTS:
        return "too_big", f"the result has {len(outputs):,} step outputs; at most {MAX_STEP_OUTPUTS:,} are read"
    for name in result.metrics:
        if len(name) > MAX_NAME_CHARS:
            return "too_big", f"a metric's name has {len(name):,} characters; at most {MAX_NAME_CHARS} are kept"
    for output in outputs:
        index = output.step_index
        if len(index) > MAX_NAME_CHARS if isinstance(index, str) else abs(index) > MAX_SCORE:
            return "too_big", "a step_index is not the number of a step: count steps from 0"
    if result.score is not None and math.isfinite(result.score) and not in_bounds(result.score):
        return "out_of_range", f"the score is {result.score}; it must lie between ±{MAX_SCORE:g}"
    for name, metric in result.metrics.items():
        if math.isfinite(metric.score) and not in_bounds(metric.score, MAX_METRIC_VALUE):
            return "out_of_range", f"the metric {name!r} is {metric.score}; it must lie between ±{MAX_METRIC_VALUE:g}"
    return None


def truncate_result(result: EvaluateResult) -> EvaluateResult:
    """`result` with its reasons, names and traceback cut to their limits."""
    outputs = result.step_outputs or ()
    changes: dict[str, object] = {}
    if result.reason is not None and (reason := truncate_text(result.reason, MAX_REASON_CHARS)) != result.reason:
        changes["reason"] = reason
    if any(
        truncate_text(name, MAX_NAME_CHARS) != name or truncate_text(metric.reason, MAX_REASON_CHARS) != metric.reason
        for name, metric in result.metrics.items()
    ):
        changes["metrics"] = {
            truncate_text(name, MAX_NAME_CHARS): metric.model_copy(
                update={"reason": truncate_text(metric.reason, MAX_REASON_CHARS)}
            )
            for name, metric in result.metrics.items()
        }
    if any(
        output.reason is not None and truncate_text(output.reason, MAX_REASON_CHARS) != output.reason
        for output in outputs
    ):
        changes["step_outputs"] = [
            output.model_copy(update={"reason": output.reason and truncate_text(output.reason, MAX_REASON_CHARS)})
            for output in outputs
        ]
    if result.error is not None:
        fields = ("kind", "message", "traceback")
        texts = {name: truncate_text(getattr(result.error, name), MAX_FAULT_CHARS) for name in fields}
        if any(texts[name] != getattr(result.error, name) for name in fields):
            changes["error"] = result.error.model_copy(update=texts)
    return result.model_copy(update=changes) if changes else result
