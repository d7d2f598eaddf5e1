"""Real commands on a real terminal with hostile names: only text and our own colors reach it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selection import quick_first
from terminal_bytes import foreign, on_terminal

HOSTILE = (
    "\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\\x1b]52;c;cm0=\x07\x1b[2J\x1b[8mhid\x9b31m\x9d0;t\x9c"
    "\x08\x7f\u202e\u2066[red]r[/red][link=http://evil]l[/link][/nothing]"
)
NAME = HOSTILE.replace("/", "|")
LINE = f"{HOSTILE}\rall is well"
REWARD = f"""
def reward(messages, ground_truth, **kwargs):
    print({LINE!r})
    raise ValueError({LINE!r})
"""
FINE = f"""
def reward(messages, ground_truth, **kwargs):
    print({LINE!r})
    return {{"score": 1.0, "reason": {LINE!r}, "metrics": {{{LINE!r}: 1.0}}}}
"""
TOOL = f"""
import toolwise

@toolwise.tool
def look(city: str) -> str:
    {LINE!r}
    print({LINE!r})
    raise ValueError({LINE!r})
"""


def row(number: int) -> dict[str, Any]:
    return {
        "task_id": f"{LINE}{number}",
        "prompt": [{"role": "user", "content": LINE}],
        "ground_truth": LINE,
        "data_source": LINE,
        "ability": LINE,
        "extra_info": {"kind": LINE},
    }


def record(number: int) -> dict[str, Any]:
    messages = [*row(number)["prompt"], {"role": "assistant", "content": LINE}]
    return {**row(number), "rollout_id": f"{LINE}{number}", "group_id": LINE, "messages": messages, "score": 0.5}


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def toolwise(folder: Path, *arguments: object) -> tuple[int, str]:
    return on_terminal([sys.executable, "-m", "toolwise", *map(str, arguments)], cwd=folder)


Case = Callable[[Path], tuple[int, list[object]]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def data_stats(folder: Path) -> tuple[int, list[object]]:
    return 0, ["data", "stats", lines(folder / f"{NAME}.jsonl", [row(i) for i in range(3)])]


@case
def data_stats_as_json(folder: Path) -> tuple[int, list[object]]:
    return 0, ["data", "stats", "--json", lines(folder / f"{NAME}.jsonl", [row(i) for i in range(3)])]


@case
def a_file_that_is_not_there(folder: Path) -> tuple[int, list[object]]:
    return 2, ["data", "stats", f"{NAME}.jsonl"]


@case
def an_option_that_is_none(folder: Path) -> tuple[int, list[object]]:
    return 2, ["data", "stats", f"--{NAME}"]


@case
def a_command_that_is_none(folder: Path) -> tuple[int, list[object]]:
    return 2, [NAME]


@case
def arguments_too_many(folder: Path) -> tuple[int, list[object]]:
    return 2, ["data", "stats", "a.jsonl", NAME]


@case
def a_bad_override(folder: Path) -> tuple[int, list[object]]:
    (folder / "run.toml").write_text("seed = 1\n")
    return 2, ["train", "run.toml", "--set", f"{NAME}=1"]


@case
def keys_of_a_configuration(folder: Path) -> tuple[int, list[object]]:
    (folder / "run.toml").write_text(f"{json.dumps(HOSTILE.replace(chr(0x7F), ''))} = 1\n", encoding="utf-8")
    return 2, ["train", "run.toml"]


@case
def check_of_a_reward(folder: Path) -> tuple[int, list[object]]:
    (folder / "rewards.py").write_text(FINE, encoding="utf-8")
    stored = lines(folder / "rollouts.jsonl", [record(i) for i in range(4)])
    return -1, ["check", "reward", "rewards.py:reward", "--rollouts", stored, "--tier", "basic"]


@case
def check_of_a_reward_that_raises(folder: Path) -> tuple[int, list[object]]:
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    stored = lines(folder / "rollouts.jsonl", [record(i) for i in range(4)])
    return -1, ["check", "reward", "rewards.py:reward", "--rollouts", stored, "--tier", "off"]


@case
def score_again(folder: Path) -> tuple[int, list[object]]:
    (folder / "rewards.py").write_text(FINE, encoding="utf-8")
    stored = lines(folder / "rollouts.jsonl", [record(i) for i in range(4)])
    return -1, ["score", stored, "--reward", "rewards.py:reward", "--tier", "off"]


@case
def check_of_a_tool(folder: Path) -> tuple[int, list[object]]:
    (folder / "tools.py").write_text(TOOL, encoding="utf-8")
    return -1, ["check", "tool", "tools.py:look", "--call", json.dumps({"city": LINE})]


@case
def rollouts(folder: Path) -> tuple[int, list[object]]:
    (folder / "rewards.py").write_text(FINE, encoding="utf-8")
    (folder / "tools.py").write_text(TOOL, encoding="utf-8")
    lines(folder / "tasks.jsonl", [row(i) for i in range(2)])
    call = "<tool_call>" + json.dumps({"name": "look", "arguments": {"city": LINE}}) + "</tool_call>"
    other = "<tool_call>" + json.dumps({"name": LINE, "arguments": {}}) + "</tool_call>"
    (folder / "script.json").write_text(json.dumps([f"{LINE}{call}", other, LINE]))
    (folder / "run.toml").write_text(
        'tools = ["tools.py:look"]\n[data]\ntrain = "tasks.jsonl"\n[reward]\nfunction = "rewards.py:reward"\n'
        '[reward.sandbox]\ntier = "off"\n'
    )
    return 0, ["rollout", "run.toml", "--policy", "scripted", "--script", "script.json", "--out", f"out-{NAME}"]


@case
def a_dry_run_with_a_name(folder: Path) -> tuple[int, list[object]]:
    lines(folder / "tasks.jsonl", [row(i) for i in range(2)])
    name = json.dumps(HOSTILE.replace(chr(0x7F), ""))
    (folder / "run.toml").write_text(
        f'name = {name}\n[data]\ntrain = "tasks.jsonl"\n[reward]\nfunction = {name}\n', encoding="utf-8"
    )
    return 2, ["train", "run.toml", "--dry-run"]


QUICK = ("data_stats", "an_option_that_is_none", "rollouts", "check_of_a_reward_that_raises")


@pytest.mark.parametrize("name", quick_first(list(CASES), QUICK))
def test_only_text_and_colours_reach_the_terminal(name: str, tmp_path: Path) -> None:
    status, arguments = CASES[name](tmp_path)
    ended, shown = toolwise(tmp_path, *arguments)
    assert foreign(shown) == "", repr(shown[-2000:])
    flat = shown.replace("\r\n", "")
    assert "\\x1b]0;owned" in flat or "\\u001b]0;owned" in flat, shown[-2000:]
    if status >= 0:
        assert ended == status, shown[-2000:]


def test_uncaught_exceptions_warnings_and_logs_are_guarded(tmp_path: Path) -> None:
    program = f"""
import logging, sys, threading, warnings
import toolwise.cli as cli

@cli.app.command("break")
def break_everything():
    logging.getLogger("x").error({LINE!r})
    warnings.warn({LINE!r})
    thread = threading.Thread(target=lambda: 1 / int({LINE!r}))
    thread.start()
    thread.join()
    class Late:
        def __del__(self):
            raise ValueError({LINE!r})
    Late()
    raise RuntimeError({LINE!r})

sys.argv = ["toolwise", "break"]
cli.main()
"""
    status, shown = on_terminal([sys.executable, "-c", program], cwd=tmp_path)
    assert status == 1
    assert foreign(shown) == "", repr(shown)
    assert shown.count("\\x1b]0;owned") >= 5


def test_help_keeps_its_colours(tmp_path: Path) -> None:
    status, shown = on_terminal([sys.executable, "-m", "toolwise", "--help"], env={"COLUMNS": "100"})
    assert status == 0
    assert "\x1b[" in shown
    assert "\\x1b" not in shown
    assert foreign(shown) == ""


def test_an_exit_message_is_guarded() -> None:
    program = f"import sys, toolwise.cli as cli; cli.app = lambda **_: sys.exit({LINE!r}); cli.main()"
    status, shown = on_terminal([sys.executable, "-c", program], env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert status == 1
    assert foreign(shown) == ""
