"""Rewards for a single correct answer: the same text, or the same number within a tolerance.

Numbers are parsed as people and models write them: thousands separators, currency signs, any minus.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import deque
from decimal import Decimal
from typing import Any

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.rewards.transcript import final_answer
from toolwise.types import EvaluateResult

NUMBER = re.compile(
    r"""(?P<sign>(?<![\w)\]])[-+−])?   # a minus directly after a digit, word or bracket is subtraction
        [$€£]?
        (?P<late>(?<=[$€£])[-+−])?
        (?P<body>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)
        (?P<exponent>[eE][-+]?[0-9]{1,4}(?![\w]))?""",
    re.VERBOSE,
)


def match_to_decimal(match: re.Match[str]) -> Decimal:
    """The number in a match of `NUMBER`."""
    sign = match["sign"] or match["late"] or ""
    digits = match["body"].replace(",", "") + (match["exponent"] or "")
    return Decimal(("-" if sign in ("-", "−") else "") + digits)


def last_number(text: str) -> Decimal | None:
    """The last number in `text`."""
    last = deque(NUMBER.finditer(text), maxlen=1)
    return match_to_decimal(last[0]) if last else None


def parse_number(value: Any) -> Decimal | None:
    """`value` as a number, if it is one or a text with nothing but a number; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Decimal(repr(value)) if math.isfinite(value) else None
    match = NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    return match_to_decimal(match) if match else None


def exact_match(answer: str, expected: str, *, ignore_case: bool = False, ignore_space: bool = True) -> bool:
    """Whether two texts are equal after Unicode normalization (NFC)."""
    return _normalize_text(answer, ignore_case, ignore_space) == _normalize_text(expected, ignore_case, ignore_space)


def _normalize_text(text: str, ignore_case: bool, ignore_space: bool) -> str:
    text = unicodedata.normalize("NFC", text.casefold() if ignore_case else text)
    return " ".join(text.split()) if ignore_space else text


def numeric_match(answer: Decimal, expected: Decimal, *, abs_tol: float = 0.0, rel_tol: float = 0.0) -> bool:
    """Whether two numbers are equal within `abs_tol` or within `rel_tol` times `expected`."""
    if answer == expected:
        return True
    allowed = max(abs_tol, rel_tol * abs(float(expected)))
    if not 0 < allowed < math.inf:  # exact comparison only: as floats, large neighbours would be equal
        return False
    # The slack absorbs rounding, as in 0.3 − 0.2: a distance of exactly the tolerance must pass.
    return abs(float(answer) - float(expected)) <= allowed * (1 + 1e-9)


@reward_function
def exact_match_reward(
    messages: list[Message],
    ground_truth: Any,
    after: str | None = None,
    ignore_case: bool = False,
    ignore_space: bool = True,
) -> EvaluateResult:
    """1 if the assistant's last message without its thought equals the ground truth (or one of a list), else 0.

    `after` is a marker such as "Answer:"; only the text after its last occurrence counts.
    """
    answer = _text_after(final_answer(messages), after)
    if answer is None:
        return EvaluateResult(score=0.0, reason=f"no {after!r} in the answer")
    expected = [_answer_text(value) for value in _accepted_answers(ground_truth)]
    hit = any(exact_match(answer, text, ignore_case=ignore_case, ignore_space=ignore_space) for text in expected)
    return EvaluateResult(score=float(hit), reason=f"answered {answer!r:.80}, expected {expected[0]!r:.80}")


@reward_function
def numeric_match_reward(
    messages: list[Message],
    ground_truth: Any,
    after: str | None = None,
    abs_tol: float = 0.0,
    rel_tol: float = 0.0,
) -> EvaluateResult:
    """1 if the last number in the assistant's last answer is the ground truth (or one of a list), else 0."""
    if min(abs_tol, rel_tol) < 0:
        raise ConfigError(f"numeric match: abs_tol {abs_tol} and rel_tol {rel_tol} must not be below 0")
    part = _text_after(final_answer(messages), after)
    answer = last_number(part) if part is not None else None
    if answer is None:
        return EvaluateResult(score=0.0, reason="no number in the answer")
    expected = [_answer_number(value) for value in _accepted_answers(ground_truth)]
    hit = any(numeric_match(answer, number, abs_tol=abs_tol, rel_tol=rel_tol) for number in expected)
    return EvaluateResult(score=float(hit), reason=f"answered {answer!s:.80}, expected {expected[0]!s:.80}")


def _text_after(text: str, after: str | None) -> str | None:
    if after is None:
        return text
    _, mark, rest = text.rpartition(after)
    return rest.strip() if mark else None


def _accepted_answers(ground_truth: Any) -> list[Any]:
    accepted = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not accepted:
        raise DataError("the ground truth is an empty list; give at least one answer")
    return list(accepted)


def _answer_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"the ground truth {value!r:.80} is neither a text nor a number; give one, or a list of them")
    return str(value)


def _answer_number(value: Any) -> Decimal:
    if (number := parse_number(value)) is None:
        raise DataError(f"the ground truth {value!r:.80} is not a number; give one, or a list of them")
    return number
