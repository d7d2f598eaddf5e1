"""What the page of one rollout shows: its conversation, its tokens with their numbers, and its thoughts."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.training.token_records import StepTokens
from toolwise.view.rollout_store import NotFoundError, RunStore

MAX_TEXT = 20_000
"""Characters of a text that are sent at first."""
MAX_TOKENS = 4000
"""Tokens of a step that are sent at first."""


def rollout_page(store: RunStore, file: str, rollout_id: str) -> dict[str, Any]:
    row = store.row(file, rollout_id)
    record = store.record(row)
    siblings = [brief(other) for other in store.group(file, row["group_id"])]
    return {
        "row": {name: value for name, value in row.items() if name not in ("offset", "length")},
        "messages": message_views(record.messages),
        "steps": [step.to_json() for step in record.steps],
        "tokens": [step_view(step, store.vocabulary) for step in store.tokens(row)],
        "metrics": record.metrics,
        "reason": cut(record.reason),
        "error": record.error and {key: cut(str(value)) for key, value in record.error.items()},
        "fault": cut(record.fault),
        "warnings": [cut(str(warning)) for warning in record.warnings],
        "ground_truth": cut(_as_text(record.ground_truth)),
        "failed_calls": record.failed_calls,
        "calls": record.calls,
        "thinking": record.thinking,
        "siblings": siblings,
    }


def message_text(store: RunStore, file: str, rollout_id: str, index: int) -> dict[str, Any]:
    """One message in full."""
    messages = store.record(store.row(file, rollout_id)).messages
    if not 0 <= index < len(messages):
        raise NotFoundError(f"rollout {rollout_id!r:.80} has {len(messages)} messages")
    return message_view(messages[index], limit=None)


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("file", "rollout_id", "score", "correct", "cost", "advantage", "route", "stop_reason", "tokens", "steps")
    return {name: row[name] for name in names}


def message_views(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    views, names = [], dict[str, str]()
    for message in messages:
        view = message_view(message)
        for call in view["calls"]:
            names[call["id"]] = call["name"]
        if not view["name"]:
            view["name"] = names.get(str(message.get("tool_call_id")), "")
        views.append(view)
    return views


def message_view(message: Mapping[str, Any], limit: int | None = MAX_TEXT) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(p.get("text", "")) if isinstance(p, Mapping) else str(p) for p in content)
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role") or ""),
        "name": str(message.get("name") or ""),
        "text": cut("" if content is None else str(content), limit),
        "thought": cut(str(message["reasoning_content"]), limit) if message.get("reasoning_content") else None,
        "calls": [_call_view(call, limit) for call in calls] if isinstance(calls, list) else [],
    }


def _call_view(call: Any, limit: int | None) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return {"id": "", "name": "", "arguments": cut(_as_text(call), limit)}
    arguments = function.get("arguments")
    return {
        "id": str(call.get("id")),
        "name": str(function.get("name") or ""),
        "arguments": cut(arguments if isinstance(arguments, str) else _as_text(arguments), limit),
    }


def cut(text: str | None, limit: int | None = MAX_TEXT) -> Any:
    """The text, or its beginning and how long it is."""
    if text is None or limit is None or len(text) <= limit:
        return text
    return {"start": text[:limit], "chars": len(text)}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def step_view(step: StepTokens, vocabulary: Mapping[int, bytes], limit: int = MAX_TOKENS) -> dict[str, Any]:
    """Columns of one step, one entry per token; None where nothing is stored."""

    def column(values: Any) -> list[Any] | None:
        if values is None:
            return None
        plain = values[:limit].tolist()
        return [None if isinstance(v, float) and not math.isfinite(v) else v for v in plain]

    names = ("versions", "advantages", "gaps", "entropies", "clipped")
    return {
        "step": step.step,
        "count": len(step.token_ids),
        "ids": column(step.token_ids),
        "texts": token_texts(step.token_ids[:limit].tolist(), vocabulary),
        "logprobs": column(step.logprobs),
        **{name: column(getattr(step, name)) for name in names},
        "parts": {name: column(values) for name, values in step.parts.items()},
        "factors": {name: column(values) for name, values in step.factors.items()},
    }


def token_texts(ids: Sequence[int], vocabulary: Mapping[int, bytes]) -> list[str | None]:
    """The text that each token completes; None for a token whose text is not stored."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str | None] = []
    for number in ids:
        raw = vocabulary.get(number)
        if raw is None:
            decoder.reset()
        texts.append(None if raw is None else decoder.decode(raw))
    return texts
