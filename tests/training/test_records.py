"""Rollouts on disk: readable JSON lines."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from toolwise.advantages import Grpo
from toolwise.errors import CheckpointError
from toolwise.messages import Message, Prefix, ToolCall
from toolwise.training.records import RolloutRecord, read_records
from toolwise.training.rollout_files import write_records
from toolwise.types import (
    AnnotatedRollout,
    EvaluateResult,
    EvaluationFault,
    MetricResult,
    Rollout,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    Usage,
)


def step(index: int, tokens: dict[str, Any] | None) -> StepData:
    return StepData(
        system_step_index=index,
        observation_data=None,
        action_taken={"type": "text"},
        resulting_messages_history=[],
        policy_logprobs=tokens,
        base_reward=0.5,
    )


def scored(name: str, score: float | None, steps: tuple[StepData, ...], **changes: Any) -> ScoredRollout:
    task = Task(
        task_id="t1",
        prompt=[Message(role="user", content="How many?")],
        ground_truth="31",
        extra_info={"kind": "lookup"},
    )
    messages = (
        *task.prompt,
        Message(role="assistant", content=None, tool_calls=[ToolCall(id="c", name="search", arguments={"query": "ä"})]),
        Message(role="tool", content="31 wells", tool_call_id="c"),
        Message(role="assistant", content=changes.pop("said", "Answer: 31")),
    )
    usage = Usage(calls={"search": 1}, failed_calls={"timeout": 1}, cost=1.0, sampled_tokens=3)
    result = EvaluateResult(score=score, reason="right", metrics={"correct": MetricResult(score=1.0)}, **changes)
    rollout = Rollout(name, "g", 0, 0, task, "SEARCH", steps, messages, StopReason.ANSWERED, usage)
    return ScoredRollout(rollout, result, steps)


TOKENS = Prefix(array("i", [5, 6, 7, 8]), 2)
TURNS = (
    step(0, {"prompt_ids": TOKENS, "token_ids": array("i", [7]), "logprobs": array("f", [-0.5])}),
    step(1, None),
    step(2, {"prompt_ids": [5, 6, 7, 8], "token_ids": [9, 10], "logprobs": [-1.0, -2.0]}),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_record_says_everything_a_reader_wants() -> None:
    pair = [scored("g/0", 1.0, TURNS), scored("g/1", 0.0, TURNS)]
    credited = Grpo(norm_by_std=False)([AnnotatedRollout(s) for s in pair]).rollouts
    record = RolloutRecord.of(pair[0], credited[0]).to_json()
    assert record["messages"][1]["tool_calls"][0]["function"] == {"name": "search", "arguments": '{"query": "ä"}'}
    del record["messages"]
    assert record == {
        "rollout_id": "g/0",
        "group_id": "g",
        "task_id": "t1",
        "kind": "lookup",
        "route": "SEARCH",
        "ground_truth": "31",
        "reward_kwargs": {},
        "extra_info": {"kind": "lookup"},
        "data_source": "",
        "score": 1.0,
        "metrics": {"correct": 1.0},
        "reason": "right",
        "error": None,
        "warnings": [],
        "stop_reason": "answered",
        "fault": None,
        "infrastructure_fault": False,
        "cost": 1.0,
        "calls": {"search": 1},
        "failed_calls": {"timeout": 1},
        "trained_on": True,
        "steps": [
            {"advantage": 0.5, "base_reward": 0.5, "tokens": 1},
            {"advantage": 0.5, "base_reward": 0.5, "tokens": 0},
            {"advantage": 0.5, "base_reward": 0.5, "tokens": 2},
        ],
    }


def test_what_was_not_learned_from_says_so_and_has_no_advantages() -> None:
    record = RolloutRecord.of(scored("g/0", 1.0, TURNS))
    assert record.trained_on is False
    assert {step.advantage for step in record.steps} == {None}


def test_a_failed_reward_is_kept_with_its_reason() -> None:
    fault = EvaluationFault(kind="exception", message="KeyError: 'x'", traceback="…")
    record = RolloutRecord.of(scored("g/0", None, (), error=fault, is_score_valid=False))
    assert record.score is None
    assert record.error == {"kind": "exception", "message": "KeyError: 'x'", "traceback": "…"}


def test_a_score_that_is_not_valid_is_not_stored() -> None:
    unsure = scored("g/0", 0.0, TURNS, is_score_valid=False)
    record = RolloutRecord.of(unsure)
    assert (record.score, record.metrics, record.correct, record.error) == (None, {}, None, None)
    assert record.reason == "right"


@pytest.mark.parametrize("said", ["two\nlines", "emoji 🙂", "half a pair \ud83d", "\u2028 \x00 \x85"])
def test_any_text_stays_one_line_of_json(tmp_path: Path, said: str) -> None:
    write_records(tmp_path, "x", [scored("g/0", 1.0, (), said=said)], [])
    raw = (tmp_path / "x.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert json.loads(raw)["messages"][-1]["content"] == said


def test_a_ground_truth_that_json_cannot_say_is_written_as_text(tmp_path: Path) -> None:
    one = scored("g/0", 1.0, ())
    one.rollout.task.ground_truth = {"when": Path("x")}
    write_records(tmp_path, "x", [one], [])
    assert read_lines(tmp_path / "x.jsonl")[0]["ground_truth"] == {"when": "x"}


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    pair = [scored("g/0", 1.0, TURNS), scored("g/1", None, (), error=EvaluationFault(kind="timeout", message="60 s"))]
    credited = Grpo()([AnnotatedRollout(pair[0])]).rollouts
    write_records(tmp_path, "step-000001", pair, credited)
    assert read_records(tmp_path / "step-000001.jsonl") == [
        RolloutRecord.of(pair[0], credited[0]),
        RolloutRecord.of(pair[1]),
    ]


def test_fields_of_other_versions_are_ignored_and_missing_ones_have_defaults() -> None:
    assert RolloutRecord.from_json({}) == RolloutRecord()
    record = RolloutRecord.from_json({"task_id": 7, "score": 1, "steps": [{"advantage": 1}, {}], "later": True})
    assert (record.task_id, record.score, record.trained_on) == ("7", 1.0, None)
    assert [step.advantage for step in record.steps] == [1.0, None]


@pytest.mark.parametrize("wrong", [None, True, "text", 10**400, float("nan"), [1, "a"], {"correct": "yes"}])
def test_values_of_another_type_count_as_missing(wrong: Any) -> None:
    names = ("messages", "score", "metrics", "error", "cost", "calls", "steps", "extra_info", "fault")
    record = RolloutRecord.from_json(dict.fromkeys(names, wrong))
    assert (record.score, record.cost, record.metrics, record.correct) == (None, None, {}, None)
    assert [step.advantage for step in record.steps] == ([None, None] if isinstance(wrong, list) else [])
    assert list(record.messages) == []


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"score": 1}\nnot JSON\n{"score": 0}\n')
    with pytest.raises(CheckpointError, match=r"x\.jsonl, line 2: not a JSON object"):
        read_records(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"metrics": {"correct": 1}, "score": -1.0}, True),
        ({"metrics": {"correct": 0.0}, "score": 3.0}, False),
        ({"metrics": {}, "score": 1.0}, True),
        ({"metrics": None, "score": 0.0}, False),
        ({"metrics": {}, "score": 0.4}, None),
        ({"score": None}, None),
    ],
)
def test_the_verdict_is_the_metric_correct_else_a_clear_score(stored: dict[str, Any], expected: bool | None) -> None:
    assert RolloutRecord.from_json(stored).correct is expected


def test_recording_leaves_rollouts_alone(tmp_path: Path) -> None:
    one = scored("g/0", 1.0, TURNS)
    before = [s.model_dump() for s in one.steps], [m.model_dump() for m in one.rollout.messages]
    write_records(tmp_path, "x", [one], Grpo()([AnnotatedRollout(one)]).rollouts)
    assert ([s.model_dump() for s in one.steps], [m.model_dump() for m in one.rollout.messages]) == before
