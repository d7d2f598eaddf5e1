"""Steps survive a round trip through JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from toolwise.messages import Message
from toolwise.policies.scripted import ScriptedPolicy
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


def test_steps_are_read_back_as_they_were_written() -> None:
    steps = an_episode()
    again = [StepData.model_validate_json(step.model_dump_json()) for step in steps]
    assert [plain(step) for step in again] == [plain(step) for step in steps]
    assert len(again) == 2
    assert again[1].is_done
    assert again[0].resulting_messages_history[-1].content == "42"  # the calculator's result
    assert again[0].step_info["assistant_turn_index"] == 0
    assert again[0].action_taken["tool_calls"][0]["function"]["name"] == "calculator"
