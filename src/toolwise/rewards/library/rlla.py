"""The RLLA reward (ToolRL, arXiv 2504.13958): format of the answer plus similarity of its tool calls to the gold calls.

R = 6·s/M − 3      s = J(names) + Σ over gold calls of the best unused call with that name: J(parameters) + equal values
                   M = 1 + Σ (1 + number of parameters)      J = |∩| / |∪| on multisets, 1 if equal, 0 if one is empty
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple, get_args

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.rewards.library.rlla_format import (
    RllaCall,
    first_thought,
    is_well_formed,
    read_calls,
    required_tags,
    to_rlla_text,
)
from toolwise.rewards.transcript import replies_to_user
from toolwise.types import EvaluateResult, MetricResult

Schedule = Literal["constant", "two_stage", "linear"]
Matching = Literal["fine", "refined", "intermediate", "coarse"]
LengthReward = Literal["off", "fixed", "scheduled"]
ScoreRange = tuple[float, float]
"""Minimum and maximum of one part of the score."""

_CHOICES = {"schedule": get_args(Schedule), "matching": get_args(Matching), "length_reward": get_args(LengthReward)}


@dataclass(frozen=True, slots=True)
class RllaOptions:
    """Scoring options. Upstream reads these from environment variables."""

    tool_range: float = 3.0
    """Correctness ranges from −tool_range to +tool_range. Schedules set their own range."""
    schedule: Schedule = "constant"
    """`two_stage`: ±1 and format 1 before step 30, then ±3 and 0.5. `linear`: from ±2 to ±3 over 150 steps, while the
    maximum of the format reward goes from 2 to 1 and its minimum from −2 to −1."""
    matching: Matching = "fine"
    """`refined`: names and parameters must be equal lists in the same order, instead of J. `intermediate`: a call
    counts only if it is identical. `coarse`: the minimum unless all calls are equal."""
    length_reward: LengthReward = "off"
    """Words of the thought divided by 512, at most 1; `scheduled` divides by 384 + 256·step/105."""
    literal_tags: bool = False
    """Also count tags inside the thought, as upstream does; an answer whose thought contains a tag then fails."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"rlla: {name} is {getattr(self, name)!r}; must be one of {', '.join(choices)}")
        if not isinstance(self.tool_range, int | float) or not self.tool_range > 0 or not isfinite(self.tool_range):
            raise ConfigError(f"rlla: tool_range is {self.tool_range!r}; must be a number above 0, such as 3 or 1")
        if self.schedule != "constant" and self.tool_range != 3.0:
            raise ConfigError(f"rlla: schedule {self.schedule!r} sets the range itself; leave tool_range out")

    def tool_bounds(self, step: int) -> ScoreRange:
        if self.schedule == "two_stage":
            high = 1.0 if step < 30 else 3.0
        elif self.schedule == "linear":
            high = min(2 + step / 150, 3.0)
        else:
            high = float(self.tool_range)
        return -high, high

    def format_bounds(self, step: int) -> ScoreRange:
        if self.schedule == "two_stage":
            return 0.0, 1.0 if step < 30 else 0.5
        if self.schedule == "linear":
            return min(-2 + 2 * step / 150, -1.0), max(2 - step / 150, 1.0)
        return 0.0, 1.0

    def target_words(self, step: int) -> float:
        """Thought length (in words) that earns the full length reward."""
        return 384 + 256 * step / 105 if self.length_reward == "scheduled" else 512.0


DEFAULT_OPTIONS = RllaOptions()


class RllaScore(NamedTuple):
    """Total score of an answer, and its parts."""

    score: float
    format: float
    correctness: float
    length: float


def compute_score(
    solution_str: str, ground_truth: str, step: int = 0, options: RllaOptions = DEFAULT_OPTIONS
) -> RllaScore:
    """Scores the assistant's text against the gold answer at a training step."""
    if not isinstance(ground_truth, str):
        raise DataError(f"rlla: the ground truth is a {type(ground_truth).__name__}; give the gold answer's text")
    text = solution_str.strip()
    form = _format(text, ground_truth, options, step)
    correctness = _correctness(text, ground_truth, options, step)
    length = _length(text, options, step)
    return RllaScore(form + correctness + length, form, correctness, length)


def _format(text: str, ground_truth: str, options: RllaOptions, step: int) -> float:
    low, high = options.format_bounds(step)
    tags = required_tags(ground_truth, literal=options.literal_tags)
    return high if is_well_formed(text, tags, literal=options.literal_tags) else low


def _length(text: str, options: RllaOptions, step: int) -> float:
    thought = first_thought(text)
    if options.length_reward == "off" or thought is None:
        return 0.0
    return min(round(len(thought.split()) / options.target_words(step), 2), 1.0)


def _correctness(text: str, ground_truth: str, options: RllaOptions, step: int) -> float:
    if "tool_call" not in required_tags(ground_truth):
        return 0.0
    try:
        gold = read_calls(ground_truth)
    except ValueError as fault:
        raise DataError(f"rlla: cannot read the calls of the ground truth ({fault}); fix that row") from fault
    low, high = options.tool_bounds(step)
    try:
        predicted = read_calls(text)
    except ValueError:
        return low
    if gold == predicted:
        return high
    if options.matching == "coarse":
        return low
    return (high - low) * match_calls(gold, predicted, options.matching) + low


def match_calls(gold: Sequence[RllaCall], predicted: Sequence[RllaCall], matching: Matching = "fine") -> float:
    """s/M: how closely the predicted calls match the gold calls, from 0 to 1.

    Greedy in gold order. Ties go to the first call, and a call that scores 0 stays available for later gold calls.
    """
    all_or_nothing = matching == "intermediate"
    score = _jaccard([call["name"] for call in gold], [call["name"] for call in predicted], matching)
    max_score = 1.0
    unused = list(range(len(predicted)))
    for call in gold:
        max_score += 1.0 if all_or_nothing else 1.0 + len(call["parameters"])
        same_name = [index for index in unused if predicted[index]["name"] == call["name"]]
        scores = {
            index: float(predicted[index] == call) if all_or_nothing else _call_score(call, predicted[index], matching)
            for index in same_name
        }
        best = max(same_name, key=lambda index: scores[index], default=None)
        if best is not None and scores[best] > 0:
            unused.remove(best)
            score += scores[best]
    return score / max_score


def _call_score(gold: RllaCall, predicted: RllaCall, matching: Matching) -> float:
    expected, actual = gold["parameters"], predicted["parameters"]
    equal = sum(1 for name, value in expected.items() if name in actual and actual[name] == value)
    return _jaccard(list(expected), list(actual), matching) + equal


def _jaccard(expected: list[str], actual: list[str], matching: Matching) -> float:
    """J: multiset Jaccard similarity of two lists."""
    if expected == actual:
        return 1.0
    if matching == "refined" or not expected or not actual:
        return 0.0
    shared = (Counter(expected) & Counter(actual)).total()
    return shared / (len(expected) + len(actual) - shared)


@reward_function
def rlla_reward(
    messages: list[Message],
    ground_truth: Any,
    step: int = 0,
    tool_range: float = 3.0,
    schedule: Schedule = "constant",
    matching: Matching = "fine",
    length_reward: LengthReward = "off",
    literal_tags: bool = False,
) -> EvaluateResult:
    """`compute_score` of the assistant's first reply to the user, since an RLLA row is a single decision."""
    options = RllaOptions(tool_range, schedule, matching, length_reward, literal_tags)
    replies = replies_to_user(messages)
    score = compute_score(to_rlla_text(replies[0]) if replies else "", ground_truth, step, options)
    parts = {"format": score.format, "correctness": score.correctness}
    if length_reward != "off":
        parts["length"] = score.length
    return EvaluateResult(
        score=score.score,
        reason=", ".join(f"{name} {value:g}" for name, value in parts.items()),
        metrics={name: MetricResult(score=value) for name, value in parts.items()},
    )
