"""The RLLA reward (ToolRL, arXiv 2504.13958): format of the answer plus similarity of its tool calls to the gold calls.

R = 6·s/M − 3      s = J(names) + Σ over gold calls of the best unused call with that name: J(parameters) + equal values
                   M = 1 + Σ (1 + number of parameters)      J = |∩| / |∪| on multisets, 1 if equal, 0 if one is empty
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.rewards.transcript import replies_to_user, top_level_blocks
from toolwise.types import EvaluateResult, MetricResult

Schedule = Literal["constant", "two_stage", "linear"]
Matching = Literal["fine", "refined", "intermediate", "coarse"]
LengthReward = Literal["off", "fixed", "scheduled"]
ScoreRange = tuple[float, float]
"""Minimum and maximum of one part of the score."""

_CHOICES = {"schedule": get_args(Schedule), "matching": get_args(Matching), "length_reward": get_args(LengthReward)}
RllaCall = dict[str, Any]
"""A call in RLLA form: a string `name` and an object `parameters`."""

_TAGS = {"tool_call": r"\n<tool_call>\n.*\n</tool_call>", "response": r"\n<response>.*</response>"}
"""Tags after the thought -> pattern of their blocks, in the order in which an answer has them."""


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
        high = {
            "constant": float(self.tool_range),
            "two_stage": 1.0 if step < 30 else 3.0,
            "linear": min(2 + step / 150, 3.0),
        }[self.schedule]
        return -high, high

    def format_bounds(self, step: int) -> ScoreRange:
        return {
            "constant": (0.0, 1.0),
            "two_stage": (0.0, 1.0 if step < 30 else 0.5),
            "linear": (min(-2 + 2 * step / 150, -1.0), max(2 - step / 150, 1.0)),
        }[self.schedule]

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
    low, high = options.format_bounds(step)
    tags = required_tags(ground_truth, literal=options.literal_tags)
    form = high if is_well_formed(text, tags, literal=options.literal_tags) else low
    correctness = _correctness(text, ground_truth, options, step)
    words = len((first_thought(text) or "").split())
    length = 0.0 if options.length_reward == "off" else min(round(words / options.target_words(step), 2), 1.0)
    return RllaScore(form + correctness + length, form, correctness, length)


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


def required_tags(ground_truth: str, *, literal: bool = False) -> frozenset[str]:
    """Which of tool_call and response the gold answer has. `literal` also finds them in its thought."""
    if literal:
        return frozenset(tag for tag in _TAGS if f"<{tag}>" in ground_truth)
    tags = frozenset(block.tag for block in top_level_blocks(ground_truth)) & frozenset(_TAGS)
    if not tags and any(f"<{tag}>" in _after_thought(ground_truth) for tag in _TAGS):
        raise DataError(f"ground truth {ground_truth[-80:]!r} has an unclosed tag; close it")
    return tags


def is_well_formed(text: str, tags: frozenset[str], *, literal: bool = False) -> bool:
    """Whether `text` is a thought followed by exactly one pair of each of `tags`, and nothing else.

    Tags are counted after the leading thought, which may contain them; `literal` (upstream's rule) counts those too.
    """
    pattern = "".join(block for tag, block in _TAGS.items() if tag in tags)
    if literal:
        answer, pattern = text, f"<think>.*?</think>{pattern}"
    else:
        thought, closed, answer = text.partition("</think>")
        if not thought.startswith("<think>") or not closed or "<think>" in answer or "</think>" in answer:
            return False
    one_pair_each = all(answer.count(f"<{tag}>") == answer.count(f"</{tag}>") == 1 for tag in tags)
    return one_pair_each and re.fullmatch(pattern, answer, re.DOTALL) is not None


def first_thought(text: str) -> str | None:
    """The text of the first thought; None if there is none or it is not closed."""
    _, opened, rest = text.partition("<think>")
    thought, closed, _ = rest.partition("</think>")
    return thought if opened and closed else None


def _after_thought(text: str) -> str:
    return text.partition("</think>")[2] if text.startswith("<think>") and "</think>" in text else text


def read_calls(text: str) -> list[RllaCall]:
    """The calls in the last top-level tool_call block, one JSON object per line. Raises ValueError if unreadable."""
    blocks = [block.inner for block in top_level_blocks(text) if block.tag == "tool_call"]
    if not blocks:
        raise ValueError("there is no tool_call block")
    # Not splitlines: a JSON string may contain other line separators.
    return [_read_call(line) for line in blocks[-1].strip().split("\n")]


def _read_call(line: str) -> RllaCall:
    try:
        call = json.loads(line, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("a call is nested too deeply") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"a call without a name: {line.strip()[:80]}")
    if not isinstance(call.get("parameters"), dict):
        raise ValueError(f"a call without parameters: {line.strip()[:80]}")
    return call


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def to_rlla_text(message: Message) -> str:
    """A message in RLLA's text format.

    Calls that the policy's parser removed from the text are put back in one block, one per line. Their original layout
    is unknown and not judged.
    """
    text = message.content or ""
    if not message.tool_calls:
        return text
    lines = [
        json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        if call.name or not isinstance(call.arguments, str)
        else call.arguments
        for call in message.tool_calls
    ]
    head, closed, rest = text.partition("</think>")
    thought, answer = (head + closed, rest.strip()) if closed else ("", text.strip())
    block = "<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"
    return "\n".join(part for part in (thought, block, answer) if part)
