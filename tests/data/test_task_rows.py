"""Tasks survive a round trip through rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolwise.data import load_tasks
from toolwise.data.task_rows import tasks_to_jsonl
from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.types import Task


def task(**more: Any) -> Task:
    return Task(task_id="t", prompt=[Message(role="user", content="1 + 1?")], **more)


def read_back(tasks: list[Task], folder: Path) -> list[Task]:
    (folder / "train.jsonl").write_text(tasks_to_jsonl(tasks, "train"), encoding="utf-8")
    return load_tasks(folder / "train.jsonl")


@pytest.mark.parametrize(
    "given",
    [
        task(),
        task(ground_truth={"a": None, "b": [1, 2.5]}, data_source="mine", ability="sums"),
        task(tools=[], reward_kwargs={"weight": 2, "note": "ü"}),
        task(tools=["calculator"], tools_kwargs={"search": {"create_kwargs": {"documents": ["x"]}}}),
        task(reward_kwargs={"ability": "a name that rows use", "prompt": 1}),
        task(reward_kwargs={"limit": None, "deep": {"x": None}}, extra_info={"kind": "known"}),
        task(extra_info={"index": 3, "split": "train", "env_kwargs": {"size": 4}}, interaction_kwargs={"turns": 2}),
        task(termination_regex="done$", prompt_ids=[1, 2, 3]),
        Task(
            task_id="long",
            prompt=[
                Message(role="system", content="Be brief."),
                Message.model_validate(
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": null}'}}]}
                ),
                Message(role="tool", content="3", tool_call_id="c"),
            ],
        ),
    ],
    ids=range(9),
)
def test_a_task_comes_back(given: Task, tmp_path: Path) -> None:
    assert read_back([given], tmp_path) == [given]


def test_a_plain_row_stays_readable(tmp_path: Path) -> None:
    line = tasks_to_jsonl([task(ground_truth="2", reward_kwargs={"weight": 2})], "train")
    assert json.loads(line) == {
        "task_id": "t",
        "prompt": [{"role": "user", "content": "1 + 1?"}],
        "ground_truth": "2",
        "weight": 2,
    }


@pytest.mark.parametrize("truth", [{1, 2}, float("nan"), object()], ids=["set", "nan", "object"])
def test_what_json_cannot_hold_is_named(truth: Any) -> None:
    with pytest.raises(DataError, match="train: row 1 cannot be written as JSON") as caught:
        tasks_to_jsonl([task(), task(ground_truth=truth)], "train")
    assert "\n" not in str(caught.value)
