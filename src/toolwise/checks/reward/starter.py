"""`create_reward_files`: writes a template for a reward function and a few rollouts to test it on."""

from __future__ import annotations

import json
import keyword
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolwise.data.files import Row
from toolwise.errors import ConfigError
from toolwise.rewards.signature import Mode
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_line

PLACEHOLDER_NAME = "my_reward"
"""Name of the function in the templates."""


def create_reward_files(folder: Path, name: str = PLACEHOLDER_NAME, mode: Mode = "pointwise") -> tuple[Path, Path]:
    """Write NAME.py and NAME_rollouts.jsonl; neither may exist yet."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r} is not a valid function name; use letters, digits and _, such as my_reward")
    code, rollouts = folder / f"{name}.py", folder / f"{name}_rollouts.jsonl"
    for path in (code, rollouts):
        if path.exists():
            raise ConfigError(f"{path} already exists; give another name, or remove the file")
    text = (files("toolwise.checks.reward") / "starters" / f"{mode}.py").read_text("utf-8")
    write_atomic(code, text.replace(PLACEHOLDER_NAME, name).encode())
    write_atomic(rollouts, b"".join(map(json_line, sample_rows())))
    return code, rollouts


def sample_rows() -> list[Row]:
    """Three tasks with four rollouts each: correct directly, correct after a tool call, wrong, and no answer."""
    rows = []
    for task, (a, b) in enumerate([(17, 25), (6, 7), (340, 12)]):
        truth = str(a * b)
        question = {"role": "user", "content": f"What is {a} times {b}? End with 'Answer: ' and the number."}
        arguments = json.dumps({"expression": f"{a} * {b}"})
        call = {"id": "call-0", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        tool_call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        tool_result = {"role": "tool", "content": truth, "tool_call_id": "call-0"}
        right = {"role": "assistant", "content": f"Answer: {truth}"}
        wrong = {"role": "assistant", "content": f"I think it is close to {a * b + 10}.\nAnswer: {a * b + 10}"}
        no_answer = {"role": "assistant", "content": "I would rather not say."}
        endings = [[right], [tool_call, tool_result, right], [wrong], [tool_call, tool_result, no_answer]]
        rows += [
            {
                "task_id": f"task-{task}",
                "rollout_id": f"task-{task}/rollout-{number}",
                "messages": [question, *ending],
                "ground_truth": truth,
                "gold": f"Answer: {truth}",
            }
            for number, ending in enumerate(endings)
        ]
    return rows
