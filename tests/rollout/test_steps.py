"""Steps survive a round trip through a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.steps import load_steps, save_steps
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools import build_tools
from toolwise.types import StepData, Task

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def an_episode() -> list[StepData]:
    task = Task(task_id="t", prompt=[Message(role="user", content="6 * 7? \U0001f600")], ground_truth=42)
    worker = RLRolloutWorker(task, ScriptedPolicy([f"thinking {CALL}", "42"]), tools=build_tools(["calculator"]))
    return asyncio.run(worker.run_episode())[0]


def plain(step: StepData) -> Any:
    return json.loads(step.model_dump_json())


def test_steps_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    steps = an_episode()
    save_steps(tmp_path / "steps.jsonl", steps)
    again = load_steps(tmp_path / "steps.jsonl")
    assert [plain(step) for step in again] == [plain(step) for step in steps]
    assert len(again) == 2
    assert again[1].is_done
    assert again[0].resulting_messages_history[-1].content == "42"  # the calculator's result
    assert again[0].step_info["assistant_turn_index"] == 0
    assert again[0].action_taken["tool_calls"][0]["function"]["name"] == "calculator"


def test_a_file_of_something_else_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    save_steps(file, an_episode())
    file.write_text(file.read_text() + '{"a": 1}\n')
    with pytest.raises(DataError, match=r"steps\.jsonl, line 3: .*written by save_steps") as caught:
        load_steps(file)
    assert "\n" not in str(caught.value)
