"""`toolwise rollout`: rollouts from the model, a script or a server, stored in the format of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import load_config
from toolwise.demo.tasks import write_rows
from toolwise.serve import ServedModel, Server, build_app
from toolwise.training.rollout_setup import local_policy

Cli = Callable[..., Any]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_rows(tmp_path / "tasks.jsonl", 6, seed=0, split="train")
    file = tmp_path / "run.toml"
    file.write_text(
        'tools = ["calculator", "search"]\n[data]\ntrain = "tasks.jsonl"\n[model]\ndevice = "cpu"\n'
        "[rollout]\nmax_new_tokens = 24\n[multi_turn]\nmax_turns = 2\n"
        '[reward]\nfunction = "toolwise.demo.reward:small_world_reward"\n'
    )
    return file


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_model_s_own_rollouts_are_shown_and_written(cli: Cli, config: Path, tmp_path: Path) -> None:
    ended = cli("rollout", config, "-n", 2, "--per-task", 2, "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    found = records(tmp_path / "out")
    assert [r["rollout_id"].rsplit("/", 1)[1] for r in found] == ["0", "1", "0", "1"]
    assert len({r["task_id"] for r in found}) == 2
    assert all(isinstance(r["score"], float) for r in found)
    assert "score/mean" in ended.out
    assert (tmp_path / "out" / "rollouts.tokens.parquet").is_file()


def test_a_script_stands_in_for_the_model(cli: Cli, config: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text(json.dumps([CALL, "Answer: 42"]))
    ended = cli(
        "rollout",
        config,
        "-n",
        3,
        "--policy",
        "scripted",
        "--script",
        tmp_path / "script.json",
        "--out",
        tmp_path / "o",
    )
    assert ended.status == 0, ended.err
    found = records(tmp_path / "o")
    assert [r["calls"] for r in found] == [{"calculator": 1}] * 3
    assert {r["messages"][-1]["content"] for r in found} == {"Answer: 42"}
    assert "calculator" in ended.out


def test_a_server_answers_as_the_model_would(cli: Cli, config: Path, tmp_path: Path) -> None:
    own = local_policy(load_config(config), "builtin:small")
    with Server(build_app(ServedModel.of(own, "small"))) as server:
        there = ("--policy", "openai", "--base-url", server.url, "--model", "small")
        ended = cli("rollout", config, "-n", 2, "--greedy", *there, "--out", tmp_path / "served")
    assert ended.status == 0, ended.err
    assert cli("rollout", config, "-n", 2, "--greedy", "--out", tmp_path / "local").status == 0
    served, here = records(tmp_path / "served"), records(tmp_path / "local")
    assert [r["messages"][-1]["content"] for r in served] == [r["messages"][-1]["content"] for r in here]
    assert [r["calls"] for r in served] == [r["calls"] for r in here]


def test_without_a_reward_there_is_no_score(cli: Cli, config: Path, tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('["Answer: 1"]')
    given = ("--policy", "scripted", "--script", tmp_path / "script.json", "--set", 'reward.function=""')
    ended = cli("rollout", config, "-n", 1, *given, "--out", tmp_path / "o")
    assert ended.status == 0, ended.err
    assert records(tmp_path / "o")[0]["score"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--policy", "openai"), "--base-url"),
        (("--policy", "openai", "--base-url", "http://x/v1", "--model", "m", "--api-key-env", "NO_SUCH"), "NO_SUCH"),
        (("--policy", "scripted"), "--script FILE"),
        (
            ("--policy", "scripted", "--set", 'rollout.grammar.regex="a+"'),
            "works only with --policy local",
        ),
        (("--set", "data.train=missing.jsonl"), "missing.jsonl"),
        (("--set", 'tools=["calculator"]'), "search"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, config: Path, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    ended = cli("rollout", config, *arguments, "--out", tmp_path / "o")
    assert ended.status == 2
    assert told in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_a_run_s_folder_is_rolled_out_with_its_latest_weights(cli: Cli, tiny_run: Path, tmp_path: Path) -> None:
    ended = cli("rollout", tiny_run, "-n", 4, "--greedy", "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    scores = [record["score"] for record in records(tmp_path / "out")]
    summary = json.loads((tiny_run / "summary.json").read_bytes())
    assert sum(scores) / 4 == pytest.approx(summary["after"]["score"])
    (tmp_path / "script.json").write_text(json.dumps(["Answer: 1"]))
    scripted = ["--policy", "scripted", "--script", tmp_path / "script.json"]
    ended = cli("rollout", tiny_run, "-n", 1, *scripted, "--out", tmp_path / "scripted")
    assert ended.status == 0, ended.err


def test_a_model_is_not_rolled_out_without_the_tools_it_was_trained_with(
    cli: Cli, tiny_run: Path, config: Path, tmp_path: Path
) -> None:
    (model,) = tiny_run.glob("checkpoints/step-000002/model")
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "What is 2 + 2?", "ground_truth": "4"}\n')
    fewer = ("--set", 'tools=["calculator"]', "--data", plain, "--out", tmp_path / "out")
    for source in ((tiny_run,), (config, "--model", model), (config, "--set", f"model.path={model}")):
        ended = cli("rollout", *source, *fewer)
        assert ended.status == 2
        (line,) = ended.err.strip().splitlines()
        assert "was trained with the tools calculator, search; missing here: search" in line
        assert "multi_turn.enable=false" in line
        assert not (tmp_path / "out").exists()
    for number, on_purpose in enumerate((("--set", "multi_turn.enable=false"), ("--policy", "scripted"))):
        (tmp_path / "script.json").write_text('["Answer: 1"]')
        given = (*fewer[:-1], tmp_path / f"out{number}", "--script", tmp_path / "script.json", "-n", 1)
        ended = cli("rollout", tiny_run, *given, *on_purpose)
        assert ended.status == 0, ended.err
