"""Encodes calls for a worker and validates its answers, which are untrusted: types, sizes and ranges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from toolwise.messages import Message
from toolwise.rewards.function import fault_result, read_result
from toolwise.sandbox.faults import KINDS, MAX_TRACEBACK_CHARS, WorkerFault, read_fault, sanitize_text
from toolwise.sandbox.frames import encode
from toolwise.types import EvaluateResult


def pack(messages: Sequence[Any], ground_truth: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Encode one call as plain data."""
    plain = [m.to_openai() if isinstance(m, Message) else m for m in messages]
    return {"messages": plain, "ground_truth": ground_truth, "kwargs": kwargs}


def split_labels(request: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Separate the labels from the calls of a request. A batch request is one call and gets one label."""
    batch = request.get("batch")
    calls = (batch or request).get("calls") or []
    labels = [str(call.get("label", "")) for call in calls]
    plain = [{key: value for key, value in call.items() if key != "label"} for call in calls]
    if batch is None:
        return {**request, "calls": plain}, labels
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return {"batch": {**batch, "calls": plain}}, [f"{labels[0]}{more}" if labels else ""]


def protocol_fault() -> WorkerFault:
    return WorkerFault("bad_type", "the worker sent an unexpected message")


def encode_request(request: Any) -> bytes:
    try:
        return encode(request)
    except (TypeError, ValueError, RecursionError) as fault:
        raise WorkerFault("bad_type", f"the arguments cannot be sent as JSON: {fault}") from None


def is_result(answer: Any) -> bool:
    return isinstance(answer, dict) and "result" in answer


def read_answer(answer: Any, score_range: tuple[float, float] | None = None) -> EvaluateResult:
    """Parse an answer; anything invalid becomes a typed fault."""
    if isinstance(answer, dict) and "fault" in answer:
        return read_fault(answer["fault"]).result()
    text = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(text, str):
        return fault_result("bad_type", "the worker's answer is not a result")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return fault_result("bad_type", "the worker's answer is not valid JSON")
    try:
        result = (
            read_result(value) if isinstance(value, dict) else fault_result("bad_type", "the answer is not a result")
        )
    except Exception as fault:  # a forged answer can make anything fail; blame the answer
        return fault_result("bad_type", f"the worker's answer cannot be read: {type(fault).__name__}")
    return _in_range(_normalize_error(result), score_range)


def _normalize_error(result: EvaluateResult) -> EvaluateResult:
    """Keep the message of a fault that the function itself reports, but map its kind to a known one."""
    if result.error is None:
        return result
    kind = result.error.kind if result.error.kind in KINDS else "exception"
    traceback = sanitize_text(result.error.traceback, MAX_TRACEBACK_CHARS)
    fault = result.error.model_copy(update={"kind": kind, "traceback": traceback})
    return result.model_copy(update={"error": fault, "score": None, "is_score_valid": False})


def _in_range(result: EvaluateResult, score_range: tuple[float, float] | None) -> EvaluateResult:
    if score_range is None or not result.has_valid_score or result.score is None:
        return result
    low, high = score_range
    if low <= result.score <= high:
        return result
    return fault_result("out_of_range", f"the score is {result.score}; it must lie between {low} and {high}")
