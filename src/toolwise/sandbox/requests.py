"""What a worker is asked, as bytes and without our own labels, and what counts as an answer."""

from __future__ import annotations

from typing import Any

from toolwise.sandbox import frames
from toolwise.sandbox.faults import WorkerFault


def split_labels(request: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A request without the labels of its calls, which are ours, and the labels: one for all where it is one call."""
    batch = request.get("batch")
    calls = (batch or request).get("calls") or []
    labels = [str(call.get("label", "")) for call in calls]
    plain = [{key: value for key, value in call.items() if key != "label"} for call in calls]
    if batch is None:
        return {**request, "calls": plain}, labels
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return {"batch": {**batch, "calls": plain}}, [f"{labels[0]}{more}" if labels else ""]


def protocol_fault() -> WorkerFault:
    return WorkerFault("bad_type", "the worker sent something else than what it was asked for")


def encode_request(request: dict[str, Any]) -> bytes:
    try:
        return frames.encode(request)
    except (TypeError, ValueError, RecursionError) as fault:
        raise WorkerFault("bad_type", f"its arguments cannot be sent as JSON: {fault}") from None


def is_result(answer: Any) -> bool:
    return isinstance(answer, dict) and "result" in answer
