"""Requests to a worker as bytes, without the labels that stay in the trainer, and checks of its answers."""

from __future__ import annotations

from typing import Any

from toolwise.sandbox import frames
from toolwise.sandbox.faults import WorkerFault


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
        return frames.encode(request)
    except (TypeError, ValueError, RecursionError) as fault:
        raise WorkerFault("bad_type", f"the arguments cannot be sent as JSON: {fault}") from None


def is_result(answer: Any) -> bool:
    return isinstance(answer, dict) and "result" in answer
