"""Sends a finished completion as stream events, for clients that require streaming. Tokens are not sent one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def completion_events(answer: dict[str, Any]) -> Iterator[str]:
    """Server-sent events: each choice's message in one piece, then its end, then usage, then [DONE]."""
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        delta = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
        yield _event({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        yield _event(
            {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]}
        )
    extra = {key: value for key, value in answer.items() if key in ("usage", "prompt_token_ids", "policy_version")}
    yield _event({**head, "choices": [], **extra})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
