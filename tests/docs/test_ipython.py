"""Cells in a real IPython: trained with inside its running event loop, and used from the command line afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")
Cli = Callable[..., Any]

CELLS = [
    "import os, re\nimport toolwise\nfrom toolwise import reward_function, tool\nNUMBER = re.compile(r'-?\\d+')",
    """@reward_function
def grade(messages, ground_truth):
    found = NUMBER.findall(messages[-1].content or "")
    length = sum(len(m.content or "") for m in messages)
    return {"score": float(str(ground_truth) in found) + length / 1000, "reason": f"pid {os.getpid()}"}
""",
    """@tool(price=0.5)
def calculator(expression: str) -> str:
    '''Calculates.

    Args:
        expression: Such as 12 * 3.
    '''
    return "".join(NUMBER.findall(expression))
""",
    """from dataclasses import dataclass

@dataclass
class Steps(toolwise.Callback):
    file: str

    def on_step(self, event):
        with open(event.run_folder / self.file, "a") as lines:
            print(event.step, file=lines)
""",
    """import asyncio
await asyncio.sleep(0)  # IPython runs this cell inside an event loop, as a notebook does
rows = [{"prompt": f"What is {a} * {b}?", "ground_truth": a * b} for a, b in ((123, 45), (67, 89))]
config = {
    "deterministic": True,
    "model": {"device": "cpu"},
    "data": {"batch_size": 2},
    "rollout": {"n": 2, "max_new_tokens": 16},
    "multi_turn": {"max_turns": 2},
    "trainer": {"total_steps": 1, "console": False},
}
given = {"tools": [calculator], "reward": grade, "callbacks": [Steps("steps.txt")]}
result = toolwise.train(config, tasks=rows, val=rows[:1], **given, out="run")
""",
    # A cell edited and run again: the function that counts is the last one.
    """@reward_function
def grade(messages, ground_truth):
    return 0.125
""",
    """short = {"model": {"device": "cpu"}, "rollout": {"max_new_tokens": 4}}
model = result.out / "checkpoints/step-000001/model"
print("again", toolwise.evaluate(model, rows[:1], config=short, tools=[calculator], reward=grade)["score"])
""",
]
SHELL = """
import json, os, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in json.loads(sys.stdin.read()):
    shell.run_cell(cell, store_history=True).raise_error()
print("pid", os.getpid())
"""


def test_a_run_of_cells_in_ipython(tmp_path: Path, cli: Cli) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHELL],
        input=json.dumps(CELLS),
        cwd=tmp_path,
        env={**os.environ, "IPYTHONDIR": str(tmp_path / "ipython"), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "again 0.125" in lines
    run = tmp_path / "run"
    assert (run / "code" / "reward_grade.py").is_file()
    rows = [json.loads(line) for file in (run / "rollouts").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert rows
    assert {row["reason"] for row in rows}.isdisjoint({lines[-1]})  # the sandbox's processes, not IPython's
    ended = cli("eval", run, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out) == json.loads((run / "summary.json").read_bytes())["after"]
    ended = cli("resume", run, "--set", "trainer.total_steps=2")
    assert ended.status == 0, ended.err
    assert (run / "steps.txt").read_text().split() == ["1", "2"]
