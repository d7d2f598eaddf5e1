"""RLLA's reward (ToolRL, arXiv 2504.13958): the format of an answer, plus how far its tool calls are the gold ones.

R = 6·s/M − 3      s = J(names) + Σ over gold calls of the best unused call of that name: J(parameters) + equal values
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
"""The least and the most that a part of the score can be."""

_CHOICES = {"schedule": get_args(Schedule), "matching": get_args(Matching), "length_reward": get_args(LengthReward)}


@dataclass(frozen=True, slots=True)
class RllaOptions:
    """How to score. What upstream reads from environment variables stands here."""

    tool_range: float = 3.0
    """Correctness runs from minus this to this. Schedules bring their own range."""
    schedule: Schedule = "constant"
    """`two_stage`: ±1 and format 1 before step 30, then ±3 and 0.5. `linear`: from ±2 to ±3 over 150 steps, while the
    format's most goes from 2 to 1 and its least from −2 to −1."""
    matching: Matching = "fine"
    """`refined`: names and parameters must be equal lists, order included, instead of J. `intermediate`: a call counts
    whole or not at all. `coarse`: all calls equal, or the least."""
    length_reward: LengthReward = "off"
    """Words of the thought over 512, at most 1; `scheduled` over 384 + 256·step/105."""
    literal_tags: bool = False
    """Count tags in the thought too, as upstream does: an answer whose thought names a tag then fails."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"rlla: {name} is {getattr(self, name)!r}; give one of {', '.join(choices)}")
        if not isinstance(self.tool_range, int | float) or not self.tool_range > 0 or not isfinite(self.tool_range):
            raise ConfigError(f"rlla: tool_range is {self.tool_range!r}; give a number above 0, such as 3 or 1")
        if self.schedule != "constant" and self.tool_range != 3.0:
            raise ConfigError(f"rlla: schedule {self.schedule!r} sets the range itself; leave tool_range out")

    def tool_bounds(self, step: int) -> ScoreRange:
        if self.schedule == "two_stage":
            most = 1.0 if step < 30 else 3.0
        elif self.schedule == "linear":
            most = min(2 + step / 150, 3.0)
        else:
            most = float(self.tool_range)
        return -most, most

    def format_bounds(self, step: int) -> ScoreRange:
        if self.schedule == "two_stage":
            return 0.0, 1.0 if step < 30 else 0.5
        if self.schedule == "linear":
            return min(-2 + 2 * step / 150, -1.0), max(2 - step / 150, 1.0)
        return 0.0, 1.0

    def target_words(self, step: int) -> float:
        """How long a thought earns the whole length reward."""
        return 384 + 256 * step / 105 if self.length_reward == "scheduled" else 512.0


DEFAULT_OPTIONS = RllaOptions()


class RllaScore(NamedTuple):
    """What an answer earned, whole and in parts."""

    score: float
    format: float
    correctness: float
    length: float


def compute_score(
    solution_str: str, ground_truth: str, step: int = 0, options: RllaOptions = DEFAULT_OPTIONS
) -> RllaScore:
    """The score of what the assistant wrote, against the gold answer, at a training step."""
    if not isinstance(ground_truth, str):
        raise DataError(f"rlla: the ground truth is a {type(ground_truth).__name__}; give the gold answer's text")
    text = solution_str.strip()
    form = _format(text, ground_truth, options, step)
    correctness = _correctness(text, ground_truth, options, step)
    length = _length(text, options, step)
    return RllaScore(form + correctness + length, form, correctness, length)


def _format(text: str, ground_truth: str, options: RllaOptions, step: int) -> float:
    least, most = options.format_bounds(step)
    tags = required_tags(ground_truth, literal=options.literal_tags)
    return most if is_well_formed(text, tags, literal=options.literal_tags) else least


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
        raise DataError(f"rlla: the calls of the ground truth cannot be read ({fault}); correct that row") from fault
    least, most = options.tool_bounds(step)
    try:
        made = read_calls(text)
    except ValueError:
        return least
    if gold == made:
        return most
    if options.matching == "coarse":
        return least
    return (most - least) * match_calls(gold, made, options.matching) + least


def match_calls(gold: Sequence[RllaCall], made: Sequence[RllaCall], matching: Matching = "fine") -> float:
    """s/M: how far the calls that were made are the gold ones, from 0 to 1.

    Greedy in gold order; of equally good calls the first is taken, and one that earns nothing is left to others.
    """
    whole = matching == "intermediate"
    earned = _jaccard([call["name"] for call in gold], [call["name"] for call in made], matching)
    possible = 1.0
    unused = list(range(len(made)))
    for call in gold:
        possible += 1.0 if whole else 1.0 + len(call["parameters"])
        same_name = [place for place in unused if made[place]["name"] == call["name"]]
        worth = {
            place: float(made[place] == call) if whole else _call_score(call, made[place], matching)
            for place in same_name
        }
        best = max(same_name, key=lambda place: worth[place], default=None)
        if best is not None and worth[best] > 0:
            unused.remove(best)
            earned += worth[best]
    return earned / possible


def _call_score(gold: RllaCall, made: RllaCall, matching: Matching) -> float:
    wanted, given = gold["parameters"], made["parameters"]
    equal = sum(1 for name, value in wanted.items() if name in given and given[name] == value)
    return _jaccard(list(wanted), list(given), matching) + equal


def _jaccard(wanted: list[str], given: list[str], matching: Matching) -> float:
    """J: what two lists share of what either has, whatever their order."""
    if wanted == given:
        return 1.0
    if matching == "refined" or not wanted or not given:
        return 0.0
    shared = (Counter(wanted) & Counter(given)).total()
    return shared / (len(wanted) + len(given) - shared)


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
    """`compute_score` of the assistant's first reply to the user: a row of RLLA is one decision."""
    options = RllaOptions(tool_range, schedule, matching, length_reward, literal_tags)
    replies = replies_to_user(messages)
    earned = compute_score(to_rlla_text(replies[0]) if replies else "", ground_truth, step, options)
    parts = {"format": earned.format, "correctness": earned.correctness}
    if length_reward != "off":
        parts["length"] = earned.length
    return EvaluateResult(
        score=earned.score,
        reason=", ".join(f"{name} {value:g}" for name, value in parts.items()),
        metrics={name: MetricResult(score=value) for name, value in parts.items()},
    )
