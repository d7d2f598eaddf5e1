"""Results of reward functions: return values become an `EvaluateResult` within size limits, or a typed fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from numbers import Real
from typing import Any

from pydantic import BaseModel, ValidationError

from toolwise.config.imports import did_you_mean
from toolwise.types import EvaluateResult, EvaluationFault
from toolwise.types.results import MetricResult, StepOutput, unwrap_scalar
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


def read_result(value: Any) -> EvaluateResult:
    """Converts a return value to an `EvaluateResult`; an invalid value becomes a typed fault, never a silent 0."""
    if isinstance(value, EvaluateResult):
        return _check_result(value)
    try:
        fields = dict(value) if isinstance(value, dict) else None
        score = _number(value if fields is None else fields.get("score"))
        if score is None and fields is None:
            problem = f"a reward must return a number or an EvaluateResult, not {_describe_type(value)}"
            return fault_result("bad_type", problem)
        if score is not None and not math.isfinite(score):
            return fault_result("non_finite", f"the score is {score}")
        return _check_result(EvaluateResult.model_validate({"score": score} if fields is None else fields))
    except OverflowError:
        return fault_result("non_finite", "the score is too large for a float")
    except ValidationError as fault:
        return fault_result("bad_type", _describe_error(fault.errors()[0]))


def _number(value: Any) -> float | None:
    """`value` as a float, or None if it is not a number. Bools and NumPy or torch scalars count as numbers."""
    scalar = unwrap_scalar(value)
    if isinstance(scalar, complex) or not isinstance(scalar, Real | Decimal):
        return None
    return float(scalar)


_NESTED_MODELS: dict[str, type[BaseModel]] = {
    "step_outputs": StepOutput,
    "metrics": MetricResult,
    "error": EvaluationFault,
}


def _describe_error(reason: Any) -> str:
    *path, name = map(str, reason["loc"] or ("result",))
    if reason["type"] != "extra_forbidden":
        return f"{'.'.join((*path, name))}: {reason['msg']}"
    known = list((_NESTED_MODELS[path[0]] if path else EvaluateResult).model_fields)
    hint = did_you_mean(name, known) or f"; known keys: {', '.join(known)}"
    return f"{'.'.join(path) or 'the result'} has an unknown key {name!r}{hint}"


def _check_result(result: EvaluateResult) -> EvaluateResult:
    """Rejects results beyond the size limits, and valid results without a finite score.

    If there is a score, a bad step reward is left to the aligner, which reports and ignores it.
    """
    fault = find_excess(result)
    if fault is None and result.is_score_valid and result.error is None:
        fault = _find_missing_number(result)
    return truncate_result(result) if fault is None else fault_result(*fault)


def _find_missing_number(result: EvaluateResult) -> tuple[str, str] | None:
    for name, metric in result.metrics.items():
        if not math.isfinite(metric.score):
            return "non_finite", f"the metric {name!r} is {metric.score}"
    if result.score is not None:
        return None if math.isfinite(result.score) else ("non_finite", f"the score is {result.score}")
    for output in result.step_outputs or ():
        if not in_bounds(output.base_reward):
            message = f"the base_reward of step {output.step_index} is {output.base_reward}, and there is no score"
            return "out_of_range" if math.isfinite(output.base_reward) else "non_finite", message
    return "bad_type", "the result has no score: set one, or set is_score_valid=False"


def _describe_type(value: Any) -> str:
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}{f' of shape {tuple(shape)}' if isinstance(shape, tuple) else ''}"


def fault_result(kind: str, message: str, traceback: str = "") -> EvaluateResult:
    """An invalid result that carries the reason."""
    fault = EvaluationFault(kind=kind, message=message, traceback=traceback)
    return EvaluateResult(score=None, is_score_valid=False, reason=message, error=fault)


def read_results(values: Any, count: int) -> list[EvaluateResult]:
    """Converts what a batch function returned for `count` rollouts: a list, array or tensor of that length."""
    if not isinstance(values, Sequence) and hasattr(type(values), "tolist") and getattr(values, "ndim", 0) > 0:
        values = values.tolist()  # NumPy or torch, without importing either
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return [fault_result("bad_type", f"a batch reward must return a list, not {_describe_type(values)}")] * count
    if len(values) != count:
        return [
            fault_result("wrong_length", f"a batch reward returned {len(values)} results for {count} rollouts")
        ] * count
    return [read_result(value) for value in values]


def find_excess(result: EvaluateResult) -> tuple[str, str] | None:
    """The fault kind and a one-line message for the first limit that `result` exceeds, or None."""
    outputs, scores = result.step_outputs or (), {name: metric.score for name, metric in result.metrics.items()}
    if len(scores) > MAX_METRICS:
        return "too_big", f"the result has {len(scores):,} metrics; at most {MAX_METRICS} are kept"
    if len(outputs) > MAX_STEP_OUTPUTS:
        return "too_big", f"the result has {len(outputs):,} step outputs; at most {MAX_STEP_OUTPUTS:,} are read"
    if (longest := max(map(len, scores), default=0)) > MAX_NAME_CHARS:
        return "too_big", f"a metric's name has {longest:,} characters; at most {MAX_NAME_CHARS} are kept"
    indices = [output.step_index for output in outputs]
    if any(len(i) > MAX_NAME_CHARS if isinstance(i, str) else abs(i) > MAX_SCORE for i in indices):
        return "too_big", "a step_index is not the number of a step: count steps from 0"
    if result.score is not None and math.isfinite(result.score) and not in_bounds(result.score):
        return "out_of_range", f"the score is {result.score}; it must lie between ±{MAX_SCORE:g}"
    for name, score in scores.items():
        if math.isfinite(score) and not in_bounds(score, MAX_METRIC_VALUE):
            return "out_of_range", f"the metric {name!r} is {score}; it must lie between ±{MAX_METRIC_VALUE:g}"
    return None


def truncate_result(result: EvaluateResult) -> EvaluateResult:
    """`result` with its reasons, names and traceback cut to their limits."""

    def cut(text: str) -> str:
        return truncate_text(text, MAX_REASON_CHARS)

    error, outputs = result.error, result.step_outputs
    texts = {
        "reason": result.reason and cut(result.reason),
        "metrics": {
            truncate_text(name, MAX_NAME_CHARS): metric.model_copy(update={"reason": cut(metric.reason)})
            for name, metric in result.metrics.items()
        },
        "step_outputs": outputs and [o.model_copy(update={"reason": o.reason and cut(o.reason)}) for o in outputs],
        "error": error and EvaluationFault(**{key: truncate_text(text, MAX_FAULT_CHARS) for key, text in error}),
    }
    changes = {key: value for key, value in texts.items() if value != getattr(result, key)}
    return result.model_copy(update=changes) if changes else result
