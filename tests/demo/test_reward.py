"""The demo's reward: correctness minus a small cost per call."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.demo.reward import small_world_reward
from toolwise.messages import Message, ToolCall
from toolwise.rewards import Reward


def talk(*said: str | int) -> list[Message]:
    """A question and the replies; a number n is a message with n calls."""
    messages = [Message(role="user", content="How many?")]
    for one in said:
        if isinstance(one, int):
            calls = [ToolCall(id=str(n), name="search", arguments={}) for n in range(one)]
            messages.append(Message(role="assistant", content="", tool_calls=calls))
            messages += [Message(role="tool", content="31", tool_call_id=str(n)) for n in range(one)]
        else:
            messages.append(Message(role="assistant", content=one))
    return messages


@pytest.mark.parametrize(
    ("messages", "score", "correct"),
    [
        (talk("Answer: 31"), 1.0, 1.0),
        (talk("Answer: 32"), 0.0, 0.0),
        (talk(1, "Answer: 31"), 0.95, 1.0),
        (talk(1, 1, "Answer: 31"), 0.9, 1.0),
        (talk(2, "Answer: 32"), -0.1, 0.0),
        (talk("31"), 0.0, 0.0),
        (talk("Answer: 310"), 0.0, 0.0),
        (talk("Answer: 31 or 32"), 0.0, 0.0),
        (talk("Answer: 32\nAnswer: 31 \n"), 1.0, 1.0),
        (talk("I looked. Answer: 31"), 1.0, 1.0),
        (talk(""), 0.0, 0.0),
    ],
)
def test_by_hand(messages: list[Message], score: float, correct: float) -> None:
    result = small_world_reward(messages, "31")
    assert result.score == pytest.approx(score)
    assert result.metrics["correct"].score == correct
    assert result.has_valid_score


def test_a_ground_truth_may_be_a_number() -> None:
    assert small_world_reward(talk("Answer: 31"), 31).score == 1.0


def test_negative_answers_are_read() -> None:
    assert small_world_reward(talk("Answer: -4"), "-4").score == 1.0
    assert small_world_reward(talk("Answer: 4"), "-4").score == 0.0


def test_the_price_is_set_by_the_configuration() -> None:
    reward = Reward.of("toolwise.demo.reward:small_world_reward", {"price_per_call": 0.25})
    assert reward.function(talk(2, "Answer: 31"), "31", **reward.kwargs).score == pytest.approx(0.5)


def test_only_the_assistant_can_answer() -> None:
    """A conversation cut off after a call ends with a tool result, which must not count as an answer."""
    echoed = [*talk(1)[:-1], Message(role="tool", content="error: cannot read Answer: 31", tool_call_id="0")]
    assert small_world_reward(echoed, "31").metrics["correct"].score == 0.0
    unanswered = [Message(role="user", content="What stands after Answer: 31")]
    assert small_world_reward(unanswered, "31").score == 0.0


def test_calls_and_reason_are_told() -> None:
    result: Any = small_world_reward(talk(2, "Answer: 30"), "31")
    assert result.metrics["calls"].score == 2.0
    assert result.reason == "answered 30, 31 is right; 2 calls"
    assert "answered nothing" in (small_world_reward(talk("hm"), "31").reason or "")


def test_messages_are_left_alone() -> None:
    messages = talk(1, "Answer: 31")
    before = [m.model_dump() for m in messages]
    small_world_reward(messages, "31")
    assert [m.model_dump() for m in messages] == before
