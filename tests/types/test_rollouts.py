"""The types passed between stages: their fields, JSON and pickle, and memory linear in an episode's steps."""

from __future__ import annotations

import json
import math
import pickle
import tracemalloc
from array import array
from typing import Any

import pytest
from pydantic import ValidationError

from toolwise.messages import Message, Prefix, ToolCall
from toolwise.types import EvaluateResult, EvaluationFault, Rollout, ScoredRollout, StepData, StopReason, Task, Usage


def a_step(**more: Any) -> StepData:
    return StepData(
        system_step_index=0, observation_data=[], action_taken={"type": "text"}, resulting_messages_history=[], **more
    )


def test_step_data_has_the_documents_fields_and_defaults() -> None:
    required = {"system_step_index", "observation_data", "action_taken", "resulting_messages_history"}
    optional = {
        "raw_policy_output": None,
        "policy_logprobs": None,
        "policy_value_estimate": None,
        "is_done": False,
        "step_info": {},
        "base_reward": None,
        "advantage": None,
        "return_to_go": None,
    }
    fields = StepData.model_fields
    assert set(fields) == required | set(optional)
    assert {name for name, field in fields.items() if field.is_required()} == required
    step = a_step()
    assert {name: getattr(step, name) for name in optional} == optional


def test_two_steps_do_not_share_their_info() -> None:
    first, second = a_step(), a_step()
    first.step_info["seen"] = True
    assert second.step_info == {}


@pytest.mark.parametrize("missing", ["system_step_index", "action_taken", "resulting_messages_history"])
def test_a_step_without_what_the_document_requires_is_refused(missing: str) -> None:
    whole = a_step().model_dump()
    del whole[missing]
    with pytest.raises(ValidationError, match=missing):
        StepData.model_validate(whole)


def a_whole_step() -> StepData:
    messages = [
        Message(role="user", content="7?"),
        Message(role="assistant", content="é"),
        Message(role="user", content="!"),
    ]
    call = ToolCall(id="call_0", name="add", arguments={"a": 1})
    return StepData(
        system_step_index=2,
        observation_data=Prefix(messages, 1),
        action_taken={"type": "tool_call", "content": "", "name": "add", "arguments": {"a": 1}, "tool_calls": [call]},
        raw_policy_output="…",
        resulting_messages_history=Prefix(messages, 2),
        policy_logprobs={
            "token_ids": array("i", [5, 6]),
            "logprobs": array("f", [-0.5, -0.25]),
            "prompt_ids": Prefix(array("i", [1, 2, 3]), 2),
            "finish_reason": "stop",
            "policy_version": 3,
        },
        step_info={"assistant_turn_index": 2},
        base_reward=0.5,
    )


def test_a_step_of_a_rollout_can_be_written_as_json() -> None:
    written = json.loads(a_whole_step().model_dump_json())
    assert written["observation_data"] == [{"role": "user", "content": "7?"}]
    assert [m["content"] for m in written["resulting_messages_history"]] == ["7?", "é"]
    assert written["policy_logprobs"] == {
        "token_ids": [5, 6],
        "logprobs": [-0.5, -0.25],
        "prompt_ids": [1, 2],
        "finish_reason": "stop",
        "policy_version": 3,
    }
    assert written["action_taken"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_step_written_as_json_can_be_read_again() -> None:
    step = a_whole_step()
    again = StepData.model_validate_json(step.model_dump_json())
    assert list(again.resulting_messages_history) == list(step.resulting_messages_history)
    assert again.policy_logprobs is not None
    assert list(again.policy_logprobs["token_ids"]) == [5, 6]
    assert (again.base_reward, again.is_done, again.step_info) == (0.5, False, {"assistant_turn_index": 2})


def test_a_step_survives_pickling() -> None:
    step = a_whole_step()
    again = pickle.loads(pickle.dumps(step))
    assert again == step
    assert list(again.observation_data) == list(step.observation_data)


def history_bytes(steps: int) -> int:
    """What the histories of an episode take beyond its messages."""
    tracemalloc.start()
    try:
        messages = [Message(role="user", content="begin")]
        made = []
        held = []
        for i in range(steps):
            before = tracemalloc.get_traced_memory()[0]
            messages.append(Message(role="assistant", content="x" * 100))
            made.append(tracemalloc.get_traced_memory()[0] - before)
            held.append(
                StepData(
                    system_step_index=i,
                    observation_data=Prefix(messages, len(messages) - 1),
                    action_taken={"type": "text"},
                    resulting_messages_history=Prefix(messages),
                )
            )
        assert held[-1].observation_data._items is messages
        return tracemalloc.get_traced_memory()[0] - sum(made)
    finally:
        tracemalloc.stop()


def test_histories_take_memory_linear_in_the_steps() -> None:
    small, large = history_bytes(200), history_bytes(1600)
    assert large < 8 * small * 1.3


def a_scored(result: EvaluateResult, stop: StopReason = StopReason.ANSWERED, logprobs: Any = None) -> ScoredRollout:
    step = a_step(policy_logprobs=logprobs)
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    rollout = Rollout("r", "g", 0, 0, task, None, (step,), (), stop, Usage())
    return ScoredRollout(rollout, result, (step,))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_is_finite(bad: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        EvaluateResult(score=bad)


def test_a_missing_score_raises() -> None:
    with pytest.raises(ValueError, match="rollout r has no score"):
        a_scored(EvaluateResult()).score  # noqa: B018


SAMPLED = {"token_ids": [1], "logprobs": [-1.0], "prompt_ids": [2]}


@pytest.mark.parametrize(
    ("result", "stop", "logprobs", "expected"),
    [
        (EvaluateResult(score=1), StopReason.ANSWERED, SAMPLED, True),
        (
            EvaluateResult(score=1),
            StopReason.MAX_TOKENS,
            SAMPLED,
            True,
        ),
        (EvaluateResult(score=1), StopReason.ANSWERED, None, False),
        (
            EvaluateResult(score=None),
            StopReason.ANSWERED,
            SAMPLED,
            False,
        ),
        (
            EvaluateResult(score=1, is_score_valid=False),
            StopReason.ANSWERED,
            SAMPLED,
            False,
        ),
        (
            EvaluateResult(score=1, error=EvaluationFault(kind="k", message="m")),
            StopReason.ANSWERED,
            SAMPLED,
            False,
        ),
        (
            EvaluateResult(score=1),
            StopReason.DEADLINE,
            SAMPLED,
            False,
        ),
        (
            EvaluateResult(score=1),
            StopReason.POLICY_FAULT,
            SAMPLED,
            False,
        ),
        (
            EvaluateResult(score=1),
            StopReason.ENV_FAULT,
            SAMPLED,
            False,
        ),
    ],
)
def test_what_is_learned_from(result: EvaluateResult, stop: StopReason, logprobs: Any, expected: bool) -> None:
    assert a_scored(result, stop, logprobs).trainable is expected


def test_only_what_is_not_the_policy_s_doing_is_not_learned_from() -> None:
    assert {reason for reason in StopReason if not reason.trainable} == {
        StopReason.PROMPT_TOO_LONG,
        StopReason.DEADLINE,
        StopReason.POLICY_FAULT,
        StopReason.ENV_FAULT,
    }


def test_what_counts_as_cut_short() -> None:
    assert {reason for reason in StopReason if reason.truncated} == {
        StopReason.MAX_STEPS,
        StopReason.MAX_TOKENS,
        StopReason.ENV_TRUNCATED,
        StopReason.DEADLINE,
    }


def test_a_task_reads_openai_messages_and_refuses_unknown_columns() -> None:
    task = Task.model_validate({"task_id": "t", "prompt": [{"role": "user", "content": "hi"}]})
    assert task.prompt[0].content == "hi"
    with pytest.raises(ValidationError):
        Task.model_validate({"task_id": "t", "prompt": [], "promt_ids": []})
