"""Every way an episode ends, and which one counts if several apply."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from toolwise.messages import Message
from toolwise.rollout.decision import PolicyDecision
from toolwise.rollout.termination import Termination
from toolwise.rollout.worker import build_termination
from toolwise.types import StopReason, Task


def decided(
    kind: str = "text", content: str = "so", *, tokens: int = 0, cut: bool = False, raw: Any = ...
) -> PolicyDecision:
    action = {"type": kind, "content": content, "name": "add"}
    ids = {"token_ids": [1] * tokens, "logprobs": [-1.0] * tokens, "prompt_ids": [1]}
    logprobs = {**ids, "finish_reason": "length" if cut else "stop"}
    return PolicyDecision.from_answer((action, content if raw is ... else raw, logprobs, None))


@pytest.mark.parametrize("kind", ["text", "tool_call"])
def test_a_decision_like_any_other_ends_nothing(kind: str) -> None:
    assert Termination(regex=re.compile("FINAL")).stop_before_step(decided(kind)) is None


def test_a_terminate_action_comes_before_everything() -> None:
    ending = Termination(regex=re.compile("so")).stop_before_step(decided("terminate", cut=True))
    assert ending is StopReason.TERMINATED


def test_a_reply_that_was_cut_is_not_read() -> None:
    assert Termination(regex=re.compile("so")).stop_before_step(decided(cut=True)) is StopReason.MAX_TOKENS


@pytest.mark.parametrize(
    ("raw", "content", "ends"),
    [("a FINAL word", "x", True), (None, "a FINAL word", True), ("x", "a FINAL word", False), (None, "x", False)],
    ids=["raw", "content where there is no raw", "raw alone where there is one", "neither"],
)
def test_the_regex_reads_what_the_policy_wrote(raw: Any, content: str, ends: bool) -> None:
    ending = Termination(regex=re.compile("FINAL")).stop_before_step(decided(content=content, raw=raw))
    assert (ending is StopReason.REGEX) == ends


@pytest.mark.parametrize(
    ("info", "done", "structured", "expected"),
    [
        ({}, False, True, None),
        ({}, True, True, StopReason.ANSWERED),
        ({}, True, False, StopReason.ENV_DONE),
        ({"truncated": True}, False, True, StopReason.ENV_TRUNCATED),
        ({"truncated": True}, True, True, StopReason.ENV_TRUNCATED),
        ({"critical_error": "fell"}, True, True, StopReason.CRITICAL_ERROR),
        ({"critical_error": "fell", "truncated": True}, False, True, StopReason.CRITICAL_ERROR),
        ({"critical_error": "", "truncated": False}, False, True, None),
    ],
)
def test_what_the_world_brings_about(info: dict[str, Any], done: bool, structured: bool, expected: Any) -> None:
    assert Termination().stop_after_step(decided(), done, info, structured=structured) is expected


def test_a_call_that_ends_the_world_is_no_answer() -> None:
    assert Termination().stop_after_step(decided("tool_call"), True, {}, structured=True) is StopReason.ENV_DONE


def test_invalid_actions_end_it_only_in_a_row() -> None:
    termination = Termination(max_invalid_in_a_row=2)
    valid, invalid = {"is_action_valid": True}, {"is_action_valid": False}
    endings = [
        termination.stop_after_step(decided(), False, info, structured=True)
        for info in (invalid, valid, invalid, {}, invalid)
    ]
    assert endings == [None] * 5
    assert termination.stop_after_step(decided(), False, invalid, structured=True) is StopReason.REPEATED_INVALID


def test_an_invalid_action_that_ends_the_world_ends_it_so() -> None:
    termination = Termination(max_invalid_in_a_row=1)
    assert (
        termination.stop_after_step(decided(), True, {"is_action_valid": False}, structured=True) is StopReason.ANSWERED
    )


def test_steps_are_counted() -> None:
    termination = Termination(max_steps=3)
    assert [termination.count_step() for _ in range(3)] == [None, None, StopReason.MAX_STEPS]


def test_tokens_are_counted_over_the_episode() -> None:
    termination = Termination(max_tokens=10)
    endings = []
    for tokens in (4, 5, 1):
        assert termination.stop_before_step(decided(tokens=tokens)) is None
        endings.append(termination.count_step())
    assert endings == [None, None, StopReason.MAX_TOKENS]


def test_without_a_limit_tokens_end_nothing() -> None:
    termination = Termination()
    termination.stop_before_step(decided(tokens=10**6))
    assert termination.count_step() is None


def test_a_tasks_pattern_cannot_freeze_the_trainer() -> None:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], termination_regex="^(.+)+\\x00$")
    termination, began = build_termination(task, 10), time.process_time()
    assert termination.stop_before_step(decided(content="a" * 100_000)) is None
    assert time.process_time() - began < 5
    assert termination.stop_before_step(decided(content="a\x00")) is StopReason.REGEX


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "("])
def test_a_pattern_beyond_linear_time_is_refused_with_its_task(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"linear time|unterminated"):
        Task(task_id="t", prompt=[Message(role="user", content="?")], termination_regex=pattern)
