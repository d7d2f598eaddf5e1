"""`toolwise check reward`: a table or JSON, with exit status 0 (no problems), 1 (problems) or 2 (usage error)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]


@pytest.fixture
def started(tmp_path: Path, cli: Cli) -> tuple[Path, Path]:
    """A reward and its sample of rollouts."""
    ended = cli("init", "reward", "mine", "--folder", tmp_path)
    assert ended.status == 0, ended.err
    return tmp_path / "mine.py", tmp_path / "mine_rollouts.jsonl"


def test_a_good_reward_is_status_0(started: tuple[Path, Path], cli: Cli) -> None:
    reward, rollouts = started
    ended = cli("check", "reward", reward, "--rollouts", rollouts)
    assert (ended.status, ended.err) == (0, "")
    for word in ("results", "determinism", "speed", "spread", "steps", "gold", "empty", "no problems found"):
        assert word in ended.out
    assert "sandbox: requested" in ended.out


def test_what_is_wrong_is_status_1_with_its_traceback(started: tuple[Path, Path], cli: Cli) -> None:
    reward, rollouts = started
    bad = reward.with_name("bad.py")
    bad.write_text("def judge(messages, ground_truth):\n    return messages[7].content\n")
    ended = cli("check", "reward", f"{bad}:judge", "--rollouts", rollouts)
    assert (ended.status, ended.err) == (1, "")
    assert "wrong: results, spread" in ended.out
    assert "IndexError" in ended.out
    assert "return messages[7].content" in ended.out


@pytest.mark.long
def test_json_says_the_same(started: tuple[Path, Path], cli: Cli) -> None:
    reward, rollouts = started
    bad = reward.with_name("bad.py")
    bad.write_text("def judge(messages, ground_truth):\n    return 1.0\n")
    ended = cli("check", "reward", f"{bad}:judge", "--rollouts", rollouts, "--json", "--limit", 8)
    told = json.loads(ended.out)
    assert ended.status == 1
    assert (told["ok"], told["rollouts"], told["tasks"]) == (False, 8, 2)
    assert {f["name"] for f in told["findings"] if f["verdict"] == "wrong"} == {"spread", "empty"}


def test_arguments_and_the_sandbox_can_be_given(started: tuple[Path, Path], cli: Cli) -> None:
    reward, rollouts = started
    options = ["--kwargs", "price_per_call=0.5", "--timeout-s", 10, "--memory-mb", 128, "--tier", "basic", "--json"]
    told = json.loads(cli("check", "reward", reward, "--rollouts", rollouts, *options).out)
    spread = next(f for f in told["findings"] if f["name"] == "spread")
    assert spread["figures"]["min"] == -0.5
    assert "requested basic" in told["sandbox"]


@pytest.mark.long
def test_shaping_rewards_can_skip_the_gold_check(started: tuple[Path, Path], cli: Cli) -> None:
    _, rollouts = started
    reference = "toolwise.rewards.library.shaping:length_reward"
    options = ["--rollouts", rollouts, "--kwargs", "low_words=3", "--json", "--no-gold"]
    told = json.loads(cli("check", "reward", reference, *options).out)
    assert {f["name"] for f in told["findings"]} == {"results", "determinism", "speed", "spread", "steps"}


def test_a_run_is_checked_by_its_folder(tiny_run: Path, cli: Cli) -> None:
    """The demo's reward is good, but the untrained model may leave groups without spread."""
    ended = cli("check", "reward", "toolwise.demo.reward:small_world_reward", "--rollouts", tiny_run, "--json")
    told = json.loads(ended.out)
    verdicts = {f["name"]: f["verdict"] for f in told["findings"]}
    assert told["rollouts"] == 8
    for name in ("results", "determinism", "steps", "gold", "empty"):
        assert verdicts[name] == "ok", told


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "no file": (["check", "reward", "HERE/mine.py", "--rollouts", "HERE/gone.jsonl"], ["gone.jsonl", "no such file"]),
    "no reward": (["check", "reward", "HERE/gone.py:judge", "--rollouts", "HERE/mine_rollouts.jsonl"], ["gone.py"]),
    "no value": (
        ["check", "reward", "HERE/mine.py", "--rollouts", "HERE/mine_rollouts.jsonl", "--kwargs", "price"],
        ["--kwargs 'price'", "name=value"],
    ),
    "no such argument": (
        ["check", "reward", "HERE/mine.py", "--rollouts", "HERE/mine_rollouts.jsonl", "--kwargs", "prise=1"],
        ["takes no argument 'prise'"],
    ),
    "no such tier": (
        ["check", "reward", "HERE/mine.py", "--rollouts", "HERE/mine_rollouts.jsonl", "--tier", "strict"],
        ["tier", "'strict'"],
    ),
    "no such permission": (
        ["check", "reward", "HERE/mine.py", "--rollouts", "HERE/mine_rollouts.jsonl", "--allow", "internet"],
        ["permissions", "'internet'"],
    ),
    "a form without a place": (
        ["check", "reward", "HERE/mine.py", "--rollouts", "HERE/mine_rollouts.jsonl", "--gold-template", "Answer"],
        ["--gold-template 'Answer'", "ground truth with {}"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(name: str, started: tuple[Path, Path], tmp_path: Path, cli: Cli) -> None:
    arguments, words = MISTAKES[name]
    ended = cli(*(str(one).replace("HERE", str(tmp_path)) for one in arguments))
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1
    for word in words:
        assert word in ended.err


@pytest.mark.long
def test_what_it_prints_is_shown(started: tuple[Path, Path], cli: Cli) -> None:
    reward, rollouts = started
    loud = reward.with_name("loud.py")
    loud.write_text(
        f"from {reward.stem} import {reward.stem} as quiet\n"
        "def judge(messages, ground_truth):\n"
        "    print('\\x1b[31mtruth', ground_truth)\n    return quiet(messages, ground_truth)\n"
    )
    ended = cli("check", "reward", f"{loud}:judge", "--rollouts", rollouts)
    assert ended.status == 0, ended.out
    assert "output of the reward:\n  [step 0, task-0/rollout-0] \\x1b[31mtruth 425\n" in ended.out
    told = json.loads(cli("check", "reward", f"{loud}:judge", "--rollouts", rollouts, "--limit", 4, "--json").out)
    assert len(told["printed"]) == 4
    assert told["printed_more"] == 0


def test_a_reward_of_trl_is_told_what_to_write(started: tuple[Path, Path], cli: Cli) -> None:
    reward, rollouts = started
    reward.write_text("def judge(completions, **kwargs):\n    return [0.0]\n")
    ended = cli("check", "reward", f"{reward}:judge", "--rollouts", rollouts)
    assert ended.status == 2
    assert "def judge(messages, ground_truth, **kwargs)" in ended.err
