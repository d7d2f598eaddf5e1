"""Whole runs that cannot learn, from their configuration to the exit status: each says why, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.api import read_config
from toolwise.demo.recipe import demo_config
from toolwise.demo.tasks import make_rows, write_rows

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]

FAST = {"validation": {"before": False}, "rollout": {"n": 2, "max_new_tokens": 8, "temperature": 2.0}}
REWARDS = """
def constant(messages, ground_truth):
    assert messages[-1].role == "assistant", "a prompt was scored"
    return 0.25

def random_reward(messages, ground_truth):
    import random
    assert messages[-1].role == "assistant", "a prompt was scored"
    return random.random()
"""


def summary_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_bytes())
    return found


def kinds_of(run: Path) -> list[str]:
    return [finding["kind"] for finding in summary_of(run)["diagnosis"]]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def set_up(folder: Path, make_config: MakeConfig, reward: str, steps: int, **sections: Any) -> Path:
    (folder / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    changes = {**FAST, "reward": {"function": f"my_rewards.py:{reward}"}, "data": {"val_limit": 1}, **sections}
    return make_config(folder, {**changes, "trainer": {"total_steps": steps, "save_every": 1}})


def test_a_run_that_cannot_learn_says_why_everywhere_and_exits_with_3(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    """Three causes at once: the answers are in a column of another name, the reward is constant, replies are cut."""
    config = set_up(tmp_path, make_config, "constant", 3, rollout={"n": 2, "max_new_tokens": 2})
    rows = [{"prompt": f"What is {n} * 7?", "answer": str(7 * n)} for n in range(11, 19)]
    write_lines(tmp_path / "train.jsonl", rows)
    run = tmp_path / "run"
    ended = cli("train", config, "--out", run)
    assert ended.status == 3, ended.err
    expected = ["no_ground_truth", "constant_reward", "replies_cut", "weights_unchanged"]
    assert kinds_of(run) == expected
    found = summary_of(run)
    assert found["updated"] is False
    assert [finding["step"] for finding in found["diagnosis"]] == [0, 3, 3, 3]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "was never updated" in page
    for kind, finding in zip(expected, found["diagnosis"], strict=True):
        assert f"WARNING {kind}\n  {finding['cause']}\n  {finding['cure']}\n" in ended.out
        assert ended.out.count(finding["cause"]) == 1
        assert f'<span class="badge">{kind}</span>' in page
    assert 'Set data.columns = { ground_truth = "answer" }' in ended.out
    assert "never updated" in ended.err
    assert json.loads((run / "diagnosis.json").read_bytes()) == found["diagnosis"]


@pytest.mark.long
def test_a_resumed_run_keeps_what_was_found(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    config, run = set_up(tmp_path, make_config, "constant", 4), tmp_path / "run"
    assert cli("train", config, "--out", run, "--set", "trainer.total_steps=3").status == 3
    (run / "summary.json").unlink()
    (run / "diagnosis.json").unlink()
    ended = cli("train", config, "--out", run, "--resume")
    assert ended.status == 3
    assert kinds_of(run) == ["constant_reward", "weights_unchanged"]
    assert [finding["step"] for finding in summary_of(run)["diagnosis"]] == [3, 4]
    assert "in 4 steps" in summary_of(run)["diagnosis"][1]["cause"]


def test_prompts_longer_than_the_context_are_told_and_never_scored(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    config, run = (
        set_up(tmp_path, make_config, "random_reward", 1, data={}, validation={"before": True}),
        tmp_path / "run",
    )
    rows = [{"prompt": "word " * 5000 + str(n), "ground_truth": n} for n in range(4)]
    long = write_lines(tmp_path / "long.jsonl", rows)
    ended = cli("train", config, "--out", run, "--set", f"data.train={long}", "--set", f"data.val={long}")
    assert ended.status == 3, ended.err
    assert kinds_of(run) == ["prompt_too_long", "weights_unchanged"]
    finding = summary_of(run)["diagnosis"][0]
    assert finding["step"] == 0
    assert "do not fit the model's" in finding["cause"]
    before = summary_of(run)["before"]
    assert (before["n"], before["prompt_too_long"]) == (4, 4)
    assert "score" not in before
    records = [json.loads(line) for line in (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    assert {(r["stop_reason"], r["score"], r["trained_on"]) for r in records} == {("prompt_too_long", None, False)}
    assert "not scored, the agent never acted" in records[0]["reason"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["stop/prompt_too_long"] == 1.0
    assert lines[1]["frac_zero_std"] == 1.0
    assert "score/mean" not in lines[1]
    # `toolwise score` does not score prompts either.
    ended = cli("score", run)
    assert ended.status == 0, ended.err
    assert "a prompt was scored" not in ended.out + ended.err


@pytest.mark.parametrize("command", ["eval", "rollout"])
def test_other_commands_do_not_score_prompts_either(
    command: str, tmp_path: Path, cli: Cli, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = set_up(tmp_path, make_config, "random_reward", 1)
    rows = [{"prompt": "word " * 5000, "answer": "4"}, {"prompt": "What is 2 + 2?", "answer": "4"}]
    data = write_lines(tmp_path / "long.jsonl", rows)
    more = ["--json"] if command == "eval" else ["--out", tmp_path / "out"]
    ended = cli(command, config, "--data", data, *more)
    assert ended.status == 0, ended.err
    said = ended.err + caplog.text
    assert "prompt_too_long: 1 of 2 rollouts" in said
    assert "no_ground_truth: ground_truth is None on all 2 evaluated rows" in said
    if command == "eval":
        figures = json.loads(ended.out)
        assert (figures["n"], figures["errors"], figures["prompt_too_long"]) == (2, 1, 1)
        assert 0 < figures["score"] < 1  # of the one that was answered
    else:
        first, second = (json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines())
        assert (first["stop_reason"], first["score"]) == ("prompt_too_long", None)
        assert second["score"] is not None


@pytest.mark.long
def test_a_rate_that_moves_no_weight_is_found(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    config, run = set_up(tmp_path, make_config, "random_reward", 1), tmp_path / "run"
    ended = cli("train", config, "--out", run, "--set", "actor.lr=1e-18")
    assert ended.status == 3, ended.err
    (finding,) = summary_of(run)["diagnosis"]
    assert "are rounded away in float32 weights" in finding["cause"]
    assert "Raise actor.lr (now 1e-18)" in finding["cure"]


def test_from_python_a_run_that_never_updated_returns_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS, encoding="utf-8")
    result = toolwise.train(
        {
            **FAST,
            "model": {"device": "cpu"},
            "data": {"batch_size": 1},
            "trainer": {"total_steps": 1, "console": False},
            "reward": {"function": f"{tmp_path / 'my_rewards.py'}:constant"},
        },
        tasks=[{"prompt": "What is 2 + 2?", "ground_truth": "4"}],
        out=tmp_path / "run",
    )
    assert result.summary["updated"] is False
    assert [finding["kind"] for finding in result.summary["diagnosis"]] == ["weights_unchanged"]
    assert "weights_unchanged: No weight of the actor has changed in 1 step" in caplog.text
    assert "was never updated" in caplog.text


@pytest.mark.long
def test_adapters_that_move_are_an_update(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    """The model's own weights stay as they are under LoRA: what counts are those that learn."""
    config, run = set_up(tmp_path, make_config, "random_reward", 1), tmp_path / "run"
    ended = cli("train", config, "--out", run, "--set", "actor.lora.rank=2")
    assert ended.status == 0, ended.err
    assert (summary_of(run)["updated"], kinds_of(run)) == (True, [])


# Faults.


def unknown_tokens(folder: Path, make_config: MakeConfig, steps: int) -> Path:
    """Prompts of token ids that the model does not have: the policy fails on each."""
    config = set_up(folder, make_config, "random_reward", steps, data={"batch_size": 4, "val_limit": 1})
    rows = [{"prompt": f"What is {n} * 7?", "prompt_ids": [10**6], "ground_truth": "7"} for n in range(8)]
    write_lines(folder / "train.jsonl", rows)
    return config


def test_a_run_that_fails_too_often_stops_with_a_checkpoint(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    config, run = unknown_tokens(tmp_path, make_config, 6), tmp_path / "run"
    ended = cli("train", config, "--out", run, "--set", "faults.window=16")
    assert ended.status == 2, ended.err
    line = "the policy failed in 16 of the latest 16 rollouts, more than faults.policy = 0.5 allows; the last one, "
    assert ended.err.count(line) == 1
    assert "prompt_ids contain ids outside the model's" in ended.err
    assert "Traceback" not in ended.err
    found = summary_of(run)
    assert (found["steps"], found["interrupted"]) == (2, False)
    assert found["stopped"].startswith(line)
    assert (found["faults"]["policy"], found["faults"]["rollouts"]) == (16, 16)
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == "step-000002"
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (last["faults/policy"], last["faults/rollouts"]) == (8.0, 8.0)
    assert "faults 8" in ended.out
    assert "faults: policy 16 of 16" in (run / "report.html").read_text(encoding="utf-8")
    ended = cli("resume", run, "--set", "faults.policy=1", "--set", "trainer.total_steps=3")
    assert ended.status == 3, ended.err
    assert "faults: policy 24 of 24" in ended.out
    assert summary_of(run)["stopped"] is None


def test_a_short_run_in_which_all_fails_says_so(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    config, run = unknown_tokens(tmp_path, make_config, 2), tmp_path / "run"
    ended = cli("train", config, "--out", run)
    assert ended.status == 3, ended.err
    assert "faults: policy 16 of 16" in ended.out
    assert summary_of(run)["faults"]["policy"] == 16


# Routers.


def routed(folder: Path, make_config: MakeConfig, **sections: Any) -> Path:
    router = {"enable": True, "wording": "silent", "budgets": [{"limit": 0.5}]}
    changes: dict[str, Any] = {"rollout": {"n": 3, "max_new_tokens": 4}, "router": router, **sections}
    return set_up(folder, make_config, "random_reward", 1, **changes)


def test_a_router_without_a_choice_is_told_at_the_start(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    config, run = routed(tmp_path, make_config), tmp_path / "run"
    ended = cli("train", config, "--out", run, "--set", 'router.families={calculator="OTHER", search="OTHER"}')
    finding = summary_of(run)["diagnosis"][0]
    assert (finding["kind"], finding["step"]) == ("one_family", 0)
    assert f"WARNING one_family\n  {finding['cause']}" in ended.out


@pytest.mark.parametrize("world", [{"tools": []}, {"multi_turn": {"enable": False}}])
def test_a_router_in_a_world_without_tools_is_refused(
    world: dict[str, Any], tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    config = routed(tmp_path, make_config, **world)
    for row_file in ("train.jsonl", "heldout.jsonl"):
        write_lines(tmp_path / row_file, [{"prompt": "What is 2 + 2?", "ground_truth": "4"}] * 4)
    ended = cli("train", config, "--out", tmp_path / "run")
    assert ended.status == 2
    assert ended.err.startswith("toolwise: router.enable is true")
    assert len(ended.err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


# Health.


@pytest.mark.long
def test_the_demo_s_recipe_raises_no_alarm(tmp_path: Path) -> None:
    """Its first steps, with fewer tasks each: enough for every symptom of the first steps to be looked for."""
    rows = tmp_path / "tasks"
    write_rows(rows / "train.jsonl", 60, seed=0, split="train")
    write_rows(rows / "heldout.jsonl", 4, seed=0, split="heldout")
    small = ["data.batch_size=4", "validation.before=false", "trainer.total_steps=3", "trainer.console=false"]
    result = toolwise.train(read_config(demo_config(tmp_path, 0), small), out=tmp_path / "run")
    assert result.summary["diagnosis"] == []
    assert result.summary["updated"] is True
    assert not (tmp_path / "run" / "diagnosis.json").exists()
    assert "Diagnosis" not in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_rows_of_the_small_world_have_their_truth_where_it_belongs() -> None:
    assert all(row["reward_model"]["ground_truth"] is not None for row in make_rows(8, seed=0, split="train"))
