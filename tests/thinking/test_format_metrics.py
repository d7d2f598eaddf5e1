"""Format validity: the metrics, and the reward as a run uses it."""

from __future__ import annotations

import pytest

from toolwise.messages import Message, ToolCall
from toolwise.rewards.function import Reward
from toolwise.thinking.format_metrics import format_metrics, format_reward
from toolwise.thinking.reply import parse_reply

GOOD = "<level>2</level><think>a</think><action>b</action>"
REFERENCE = "toolwise.thinking.format_metrics:format_reward"


def said(*texts: str) -> list[Message]:
    messages = [Message(role="user", content="You are in a room.")]
    for text in texts:
        messages += [Message(role="assistant", content=text), Message(role="user", content="Go on.")]
    return messages


def test_metrics_of_some_replies() -> None:
    texts = [GOOD, GOOD, "<level>1</level><action>b</action>", "<level>7</level><think>a</think><action>b</action>"]
    assert format_metrics([parse_reply(text) for text in texts]) == {
        "thinking/format_valid": 0.75,
        "thinking/level_1_share": pytest.approx(1 / 3),
        "thinking/level_2_share": pytest.approx(2 / 3),
        "thinking/level_3_share": 0.0,
        "thinking/level_4_share": 0.0,
        "thinking/fault/bad_level": 0.25,
    }


def test_no_replies_have_no_metrics() -> None:
    assert format_metrics([]) == {}


def test_replies_without_a_level_have_zero_shares() -> None:
    assert format_metrics([parse_reply("go")])["thinking/level_1_share"] == 0.0


def test_the_reward_is_the_share_of_valid_replies_and_each_step_has_its_part() -> None:
    result = format_reward(said(GOOD, "go left"))
    assert result.score == 0.5
    assert result.reason == "1: no_level, no_thought"
    assert [(s.step_index, s.base_reward) for s in result.step_outputs or ()] == [(0, 0.5), (1, 0.0)]
    assert result.metrics["format_valid"].score == 0.5


def test_an_extracted_tool_call_counts_as_the_action() -> None:
    call = ToolCall(id="call_0", name="search", arguments={"query": "x"})
    message = Message(role="assistant", content="<level>2</level><think>look it up</think>", tool_calls=[call])
    assert format_reward([message]).score == 1.0
    assert format_reward([message.model_copy(update={"tool_calls": None})]).score == 0.0


def test_no_assistant_message_scores_zero() -> None:
    assert format_reward(said()).score == 0.0


def test_a_run_finds_it_by_reference() -> None:
    reward = Reward.of(REFERENCE)
    assert reward.mode == "pointwise"
    assert reward(said(GOOD), ground_truth=None).score == 1.0
