"""The demo's reward, written like a user's: correctness minus a small cost per call."""

from __future__ import annotations

import re
from typing import Any

from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.types import EvaluateResult, MetricResult

_ANSWER = re.compile(r"Answer:\s*(-?\d+)\s*$")


@reward_function
def small_world_reward(
    messages: list[Message], ground_truth: Any, price_per_call: float = 0.05, **kwargs: Any
) -> EvaluateResult:
    """1 for the right final answer, 0 for any other, minus `price_per_call` for each tool call."""
    last = messages[-1]  # a last message from a tool or the user is not an answer
    match = _ANSWER.search(last.content or "") if last.role == "assistant" else None
    correct = float(match is not None and match.group(1) == str(ground_truth))
    calls = sum(len(m.tool_calls or ()) for m in messages)
    answer = match.group(1) if match else "nothing"
    return EvaluateResult(
        score=correct - price_per_call * calls,
        reason=f"answered {answer}, {ground_truth} is right; {calls} calls",
        metrics={"correct": MetricResult(score=correct), "calls": MetricResult(score=float(calls))},
    )
