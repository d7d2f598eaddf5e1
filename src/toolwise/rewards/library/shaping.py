"""Shaping rewards for the length and the tags of an answer, for small weights beside a correctness reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.rewards.function import reward_function
from toolwise.rewards.transcript import last_reply, replies_to_user, split_thought
from toolwise.types import EvaluateResult, MetricResult

TextPart = Literal["all", "thought", "answer"]


def length_shape(count: float, low: float = 0, high: float | None = None, slack: float = 0) -> float:
    """1 from `low` to `high`; rises linearly from 0 below, and falls linearly to 0 over `slack` above (at once if 0).

    `length_shape(...) - 1` is DAPO's soft overlong punishment (arXiv 2503.14476).
    """
    if count < low:
        return count / low
    if high is None or count <= high:
        return 1.0
    return max(0.0, 1 - (count - high) / slack) if slack > 0 else 0.0


@reward_function
def length_reward(
    messages: list[Message],
    ground_truth: Any,
    low_words: float = 0,
    high_words: float | None = None,
    slack_words: float = 0,
    part: TextPart = "all",
) -> EvaluateResult:
    """`length_shape` of the number of words in the assistant's messages since the last user message.

    `part` selects which words count: all, those in thoughts, or those in answers.
    """
    if part not in get_args(TextPart):
        raise ConfigError(f"length: part is {part!r}; must be one of {', '.join(get_args(TextPart))}")
    if low_words < 0 or slack_words < 0 or (high_words is not None and high_words < low_words):
        raise ConfigError(
            f"length: low_words {low_words}, high_words {high_words} and slack_words {slack_words} are not a range; "
            "give 0 <= low_words <= high_words and slack_words >= 0"
        )
    texts = [message.content or "" for message in replies_to_user(messages)]
    if part != "all":
        texts = [split_thought(text)[0 if part == "thought" else 1] for text in texts]
    words = sum(len(text.split()) for text in texts)
    return EvaluateResult(
        score=length_shape(words, low_words, high_words, slack_words),
        reason=f"{words} words",
        metrics={"words": MetricResult(score=words)},
    )


def tags_in_place(text: str, tags: Sequence[str]) -> int:
    """The number of leading `tags` that occur in `text` as one pair each, in order, separated only by whitespace.

    A think block may contain any tag; other blocks must not contain any of `tags`. If text follows the last block, that
    block does not count.
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rest, count = text.strip(), 0
    for tag in tags:
        inner, closed, after = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not rest.startswith(f"<{tag}>") or not closed or (tag != "think" and any(mark in inner for mark in marks)):
            break
        rest, count = after.strip(), count + 1
    return count - 1 if count == len(tags) and rest else count


@reward_function
def format_reward(
    messages: list[Message], ground_truth: Any, tags: Sequence[str] = ("think", "answer"), partial: bool = False
) -> EvaluateResult:
    """1 if the assistant's last message is exactly `<think>…</think><answer>…</answer>` (or other `tags`), else 0.

    `partial` returns the fraction of tags in place, counted from the first.
    """
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError(f'format: tags is {tags!r:.80}; must be a list of names, such as ["think", "answer"]')
    count = tags_in_place(last_reply(messages), tags)
    share = count / len(tags)
    return EvaluateResult(
        score=share if partial else float(share == 1.0),
        reason="well formed" if count == len(tags) else f"<{tags[count]}> is not in place",
        metrics={"tags_in_place": MetricResult(score=share)},
    )
