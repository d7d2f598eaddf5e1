"""The GSM8K reward: the correct number after `####` (`strict`), or as the last number in the answer (`flexible`)."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Literal

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.rewards.library.matching import NUMBER, last_number, match_to_decimal, parse_number
from toolwise.rewards.transcript import last_reply, split_thought
from toolwise.types import EvaluateResult, MetricResult

Method = Literal["strict", "flexible"]

_MARK = "####"
_TAIL = re.compile(r"[.,%]*(?:\s|$)")  # what may follow; a digit, slash or letter would make it a different number


def find_answer(text: str, method: Method = "strict") -> Decimal | None:
    """The number that `text` answers with, ignoring its thought.

    `strict`: directly after the last `####`. `flexible`: the last number in the text.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: method is {method!r}; must be strict or flexible")
    answer = split_thought(text)[1]
    return last_number(answer) if method == "flexible" else _after_mark(answer)


def _after_mark(text: str) -> Decimal | None:
    _, mark, rest = text.rpartition(_MARK)
    rest = rest.lstrip()
    match = NUMBER.match(rest) if mark else None
    return match_to_decimal(match) if match and _TAIL.match(rest, match.end()) else None


def gold_answer(ground_truth: Any) -> Decimal:
    """The number in a ground truth: a number, its text, or a full solution that ends in `#### N`."""
    number = parse_number(ground_truth)
    if number is None and isinstance(ground_truth, str):
        number = _after_mark(ground_truth)
    if number is None:
        raise DataError(f"gsm8k: ground truth {ground_truth!r:.80} is not a number; give one, or a text with `#### N`")
    return number


@reward_function
def gsm8k_reward(
    messages: list[Message], ground_truth: Any, method: Method = "strict", format_score: float = 0.0
) -> EvaluateResult:
    """1 for the correct number in the assistant's last message, `format_score` for a wrong one, 0 for none."""
    expected, answer = gold_answer(ground_truth), find_answer(last_reply(messages), method)
    correct = float(answer == expected)
    return EvaluateResult(
        score=correct or (0.0 if answer is None else format_score),
        reason=f"answered {'nothing' if answer is None else answer!s:.80}, expected {expected!s:.80}",
        metrics={"correct": MetricResult(score=correct), "answered": MetricResult(score=float(answer is not None))},
    )
