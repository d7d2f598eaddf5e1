"""The reward of the five routes: the last line of the reply must be the right answer, word for word."""

from __future__ import annotations

import re
from typing import Any

from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.types import EvaluateResult

_ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def right_answer(messages: list[Message], ground_truth: Any, **kwargs: Any) -> EvaluateResult:
    """1 for the right answer, 0 for any other. What the tools cost is the budget's business."""
    last = messages[-1]
    match = _ANSWER.search(last.content or "") if last.role == "assistant" else None
    answer = match.group(1) if match else "nothing"
    return EvaluateResult(score=float(answer == str(ground_truth)), reason=f"answered {answer}, not {ground_truth}")
