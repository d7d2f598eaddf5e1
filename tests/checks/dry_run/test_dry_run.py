"""`toolwise train CONFIG --dry-run`: its output, the problems it finds, and that it changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import RunConfig, load_config

REWARDS = """
def text(messages, ground_truth):
    return "good"

def broken(messages, ground_truth):
    raise KeyError("no such answer")

def unsure(messages, ground_truth):
    return {"is_score_valid": False, "reason": "cannot tell"}

def constant(messages, ground_truth):
    return 1.0
"""
TOOLS = """
def search(query: str, documents: list[str] = ()) -> str:
    '''Searches.'''
    raise RuntimeError("the index is gone")
"""


@pytest.fixture
def dry_run(tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]) -> Callable[..., Any]:
    """`dry_run({"rollout": {"n": 3}})`: how the command ends with a tiny configuration and these changes."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "tools.py").write_text(TOOLS)

    def run(changes: dict[str, Any] | None = None, *arguments: object) -> Any:
        return cli("train", make_config(tmp_path, changes), "--dry-run", *arguments)

    return run


def shown_toml(text: str) -> list[str]:
    lines = text.partition("differ from the defaults\n")[2].splitlines()
    return lines[: next(number for number, line in enumerate(lines) if " training tasks, " in line)]


def shown_settings(text: str) -> dict[str, Any]:
    return tomllib.loads("\n".join(shown_toml(text)))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any], make_config: Callable[..., Path]) -> str:
    """What a dry run shows."""
    config = make_config(tmp_path_factory.mktemp("shown"), {"trainer": {"total_steps": 1000}})
    ended = cli("train", config, "--dry-run", "--set", "rollout.n=3")
    assert (ended.status, ended.err) == (0, "")
    told = shown_settings(ended.out)
    assert RunConfig.model_validate(told) == load_config(config, ["rollout.n=3"])
    return str(ended.out)


@pytest.mark.long
def test_it_shows_the_settings_that_differ_and_no_others(shown: str) -> None:
    settings = shown_settings(shown)
    assert settings["rollout"] == {"n": 3, "max_new_tokens": 32}
    assert "critic" not in settings
    assert len(shown.splitlines()) - len(shown_toml(shown)) < 45


def test_it_shows_two_tasks_with_their_replies_scores_and_endings(shown: str) -> None:
    assert "Task 1 of 2" in shown
    assert "Task 2 of 2" in shown
    assert re.search(r"^  user    \S", shown, re.MULTILINE)
    assert re.search(r"^  (says|calls) +\S", shown, re.MULTILINE)
    assert len(re.findall(r"^  score -?\d.*, stop reason \w+$", shown, re.MULTILINE)) == 2


def test_it_estimates_memory_and_time_and_says_from_what(shown: str) -> None:
    assert re.search(r"memory  about \d.* of \d.* on cpu", shown)
    for part in ("weights 8.7 MB", "gradients 8.7 MB", "optimizer states 17 MB", "KV cache"):
        assert part in shown
    assert re.search(r"time    .*\d.*: 1000 steps of 2 tasks × 3 rollouts", shown)
    assert "from 2 tasks × 3 rollouts: low if" in shown


@pytest.mark.long
def test_it_writes_nothing_and_leaves_no_process(tmp_path: Path, make_config: Callable[..., Path]) -> None:
    config = make_config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    marker = f"TOOLWISE_TEST_MARKER={tmp_path}"
    ended = subprocess.run(
        [sys.executable, "-m", "toolwise", "train", str(config), "--dry-run", "--out", str(tmp_path / "run")],
        env={**os.environ, "TOOLWISE_TEST_MARKER": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.index("loading the model builtin:small …") < ended.stdout.index("Task 1 of 2")
    assert sorted(tmp_path.rglob("*")) == before
    assert processes_with(marker) == []


def processes_with(marker: str) -> list[str]:
    """Processes that inherited an environment variable."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environ.read_bytes().split(b"\0"):
                found.append(environ.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("text", "rewards.py:text failed on 4 of 4 rollouts: bad_type"),
        ("broken", "exception: KeyError: 'no such answer'"),
        pytest.param("unsure", "gave no valid score for any of 4 rollouts: cannot tell", marks=pytest.mark.long),
    ],
)
def test_a_reward_that_cannot_score_fails_it(dry_run: Callable[..., Any], function: str, said: str) -> None:
    ended = dry_run({"reward": {"function": f"rewards.py:{function}"}})
    assert ended.status == 1
    assert said in ended.err
    assert "dry run failed" in ended.err
    assert "passed" not in ended.out


@pytest.mark.long
def test_the_traceback_of_the_reward_is_shown(dry_run: Callable[..., Any]) -> None:
    ended = dry_run({"reward": {"function": "rewards.py:broken"}})
    assert 'raise KeyError("no such answer")' in ended.err


def test_a_tool_that_fails_on_every_call_fails_it(dry_run: Callable[..., Any]) -> None:
    ended = dry_run({"tools": ["calculator", "tools.py:search"], "rollout": {"n": 4}})
    assert ended.status == 1
    assert re.search(r"the tool search failed on every call \(\d+\): search failed: RuntimeError: the index", ended.err)


def test_prompts_that_do_not_fit_the_context_fail_it(dry_run: Callable[..., Any]) -> None:
    ended = dry_run({"rollout": {"max_new_tokens": 4_095}})
    assert ended.status == 1
    assert "do not fit the model's" in ended.err
    refused = dry_run({"rollout": {"max_new_tokens": 100_000}})  # before anything is loaded
    assert refused.status == 2
    assert "no prompt fits" in refused.err


def test_a_template_that_fails_on_the_prompt_fails_it(tmp_path: Path, dry_run: Callable[..., Any]) -> None:
    from toolwise.models import BUILTIN

    shutil.copytree(BUILTIN / "small", tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    refusal = "{%- if '?' in messages[-1].content %}{{ raise_exception('no questions') }}{%- endif %}"
    template.write_text(refusal + template.read_text())
    ended = dry_run({"model": {"path": str(tmp_path / "model")}})
    assert ended.status == 1
    assert "no questions" in ended.err


@pytest.mark.long
def test_a_constant_reward_is_noted(dry_run: Callable[..., Any]) -> None:
    ended = dry_run({"reward": {"function": "rewards.py:constant"}})
    assert ended.status == 0
    assert "note: all 4 rollouts scored 1: equal scores give no training signal" in ended.out


@pytest.mark.long
def test_cut_replies_are_noted(dry_run: Callable[..., Any]) -> None:
    ended = dry_run({"rollout": {"max_new_tokens": 2}})
    assert "replies were cut off at rollout.max_new_tokens = 2 tokens" in ended.out


def test_it_works_without_held_out_tasks_and_with_one_task(tmp_path: Path, cli: Callable[..., Any]) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "What is 2 + 3?", "ground_truth": "5"}\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "run.toml").write_text(
        '[data]\ntrain = "one.jsonl"\nbatch_size = 1\n[rollout]\nn = 2\nmax_new_tokens = 16\n'
        '[reward]\nfunction = "rewards.py:constant"\n'
    )
    ended = cli("train", tmp_path / "run.toml", "--dry-run")
    assert ended.status == 0, ended.err
    assert "Task 1 of 1" in ended.out


@pytest.mark.parametrize(
    "changes",
    [
        {"router": {"enable": True}, "rollout": {"n": 6, "max_new_tokens": 24}},
        pytest.param({"actor": {"lora": {"rank": 2}}}, marks=pytest.mark.long),
        pytest.param({"router": {"enable": True, "train_actor": False}, "rollout": {"n": 6}}, marks=pytest.mark.long),
        pytest.param({"algorithm": {"adv_estimator": "gae", "kl": "loss"}}, marks=pytest.mark.long),
        pytest.param({"algorithm": {"rlvcr": {"enable": True}, "adv_estimator": "rlvcr"}}, marks=pytest.mark.long),
        pytest.param({"rollout": {"engine": "transformers", "n": 2}}, marks=pytest.mark.long),
    ],
    ids=["router", "LoRA", "router alone", "critic and reference", "thinking levels", "transformers"],
)
def test_it_takes_every_kind_of_run(dry_run: Callable[..., Any], changes: dict[str, Any]) -> None:
    ended = dry_run(changes)
    assert ended.status == 0, ended.err
    assert "dry run passed" in ended.out


def test_what_will_keep_the_run_from_learning_is_noted(tmp_path: Path, dry_run: Callable[..., Any]) -> None:
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = dry_run({"data": {"train": str(tmp_path / "answers.jsonl")}, "reward": {"function": "rewards.py:constant"}})
    assert "note: no_ground_truth: " in ended.out
