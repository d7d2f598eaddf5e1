"""Shaping rewards for length and tags."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.rewards.library.shaping import format_reward, length_reward, length_shape, tags_in_place


def said(*texts: str) -> list[Message]:
    return [Message(role="user", content="go on"), *(Message(role="assistant", content=text) for text in texts)]


@pytest.mark.parametrize(
    ("count", "low", "high", "slack", "worth"),
    [
        (0, 0, None, 0, 1),
        (0, 10, None, 0, 0),
        (5, 10, 20, 10, 0.5),
        (10, 10, 20, 10, 1),
        (20, 10, 20, 10, 1),
        (25, 10, 20, 10, 0.5),
        (30, 10, 20, 10, 0),
        (99, 10, 20, 10, 0),
        (21, 10, 20, 0, 0),
    ],
)
def test_the_shape_of_length(count: int, low: int, high: int | None, slack: int, worth: float) -> None:
    assert length_shape(count, low, high, slack) == worth


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_a_length_is_worth_from_nought_to_one(count: int, low: int, more: int, slack: int) -> None:
    assert 0 <= length_shape(count, low, low + more, slack) <= 1


@pytest.mark.parametrize(("part", "words"), [("all", 7), ("thought", 2), ("answer", 3)])
def test_which_words_are_counted(part: Any, words: int) -> None:
    messages = [Message(role="assistant", content="of the prompt"), *said("<think> a b </think> c", "d e")]
    result = length_reward(messages, None, part=part)
    assert result.metrics["words"].score == words
    assert result.score == 1


def test_length_as_a_reward() -> None:
    assert length_reward(said("a b c"), None, high_words=2, slack_words=4).score == 0.75
    assert length_reward(said(), None, low_words=10).score == 0


@pytest.mark.parametrize(
    "wrong", [{"part": "title"}, {"low_words": -1}, {"low_words": 5, "high_words": 4}, {"slack_words": -1}]
)
def test_a_length_that_makes_no_sense_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="length"):
        length_reward(said("x"), None, **wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("<think>a</think><answer>b</answer>", 2),
        ("\n<think>a</think>\n\n<answer>b</answer>\n", 2),
        ("<think>name <answer> and </answer></think><answer>b</answer>", 2),
        ("<think>a</think><answer>b</answer> bye", 1),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 1),
        ("<think>a</think><answer><answer>b</answer>", 1),
        ("<think>a</think>words<answer>b</answer>", 1),
        ("<think>a</think><answer>b", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<answer>b</answer>", 0),
        ("hello <think>a</think><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_tags_in_place(text: str, count: int) -> None:
    assert tags_in_place(text, ["think", "answer"]) == count
    assert format_reward(said(text), None).score == float(count == 2)
    assert format_reward(said(text), None, partial=True).score == count / 2


def test_other_tags() -> None:
    text = "<level>2</level><think>a</think><action>go</action>"
    assert format_reward(said(text), None, tags=["level", "think", "action"]).score == 1
    assert format_reward(said(text), None, tags=["level", "action"]).reason == "<action> is not in place"


@pytest.mark.parametrize("tags", ["think", [], [1], [""]])
def test_tags_that_are_none_are_an_error(tags: Any) -> None:
    with pytest.raises(ConfigError, match="tags"):
        format_reward(said("x"), None, tags=tags)
