"""The tools a model was trained with are recorded next to it, and required when it is used."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.agent.agent import RoutedAgent
from toolwise.errors import CheckpointError, ConfigError
from toolwise.tools.catalog import TOOLS_FILE, build_tools, check_recorded_tools, read_tools, write_tools
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]
QUESTION = "What is 4321 - 1234?"


def test_names_and_schemas_are_kept(tmp_path: Path) -> None:
    tools = build_tools(["calculator", "search"])
    write_tools(tmp_path, tools)
    found = read_tools(tmp_path)
    assert list(found) == ["calculator", "search"]
    assert found["search"] == tools["search"].get_openai_tool_schema().model_dump()
    check_recorded_tools(tmp_path, tools | build_tools(["python"]), "add them")


def test_what_is_missing_is_named_with_its_cure(tmp_path: Path) -> None:
    write_tools(tmp_path, build_tools(["calculator", "search"]))
    with pytest.raises(
        ConfigError, match="trained with the tools calculator, search; missing here: search; add"
    ) as told:
        check_recorded_tools(tmp_path, build_tools(["calculator"]), "add them")
    assert "\n" not in str(told.value)


def test_a_tool_that_takes_other_arguments_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def search(place: str, depth: int) -> str:
        """Look around."""
        return place * depth

    write_tools(tmp_path, build_tools(["search"]))
    with caplog.at_level(logging.WARNING):
        check_recorded_tools(tmp_path, build_tools(["search"]), "")
        assert not caplog.messages
        check_recorded_tools(tmp_path, build_tools([search]), "")
    assert "search takes other arguments" in caplog.text


def test_a_folder_of_an_older_version_says_nothing(tmp_path: Path) -> None:
    assert read_tools(tmp_path) == {}
    check_recorded_tools(tmp_path, {}, "")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1, "tools": [{}]}', '{"format": 9, "tools": []}'])
def test_a_record_that_cannot_be_read_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / TOOLS_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=TOOLS_FILE) as told:
        read_tools(tmp_path)
    assert "\n" not in str(told.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cli: Cli, make_config: MakeConfig) -> Path:
    """A run of one step with a router and two tools, and its export."""
    folder = tmp_path_factory.mktemp("trained")
    router = {"enable": True, "wording": "silent", "cost": "calls"}
    settings = {
        "router": router,
        "rollout": {"n": 6, "max_new_tokens": 48},
        "trainer": {"total_steps": 1},
        "validation": {"before": False},
        "deterministic": False,
    }
    ended = cli("train", make_config(folder, settings), "--out", folder / "run")
    assert ended.status == 0, ended.err
    ended = cli("export", folder / "run", "--out", folder / "agent")
    assert ended.status == 0, ended.err
    shutil.copytree(folder / "agent", folder / "exported")  # as earlier versions exported it: without its settings
    (folder / "exported" / AGENT_FILE).unlink()
    return folder


def test_an_export_has_its_tools(trained: Path) -> None:
    assert list(RoutedAgent.load(trained / "agent").routing.tools) == ["calculator", "search"]


@pytest.mark.long
def test_an_export_is_not_asked_without_its_tools(trained: Path, cli: Cli) -> None:
    exported = trained / "exported"
    assert list(read_tools(exported)) == ["calculator", "search"]
    ended = cli("run", exported, QUESTION)
    assert ended.status == 2
    [line] = ended.err.strip().splitlines()
    assert "missing here: calculator, search; give each with --tools NAME" in line
    ended = cli("run", exported, QUESTION, "--tools", "calculator")
    assert "missing here: search" in ended.err
    given = cli(
        "run", exported, QUESTION, "--tools", "calculator", "--tools", "search", "--route", "calculate", "--json"
    )
    assert given.status == 0, given.err
    assert json.loads(given.out)["calls"] == {"calculator": 1}
    without = cli("run", exported, QUESTION, "--tools", "none", "--json")
    assert without.status == 0, without.err
    assert json.loads(without.out)["calls"] == {}


def test_a_run_has_its_tools_and_an_agent_does_without_them_only_on_purpose(trained: Path) -> None:
    assert list(RoutedAgent.load(trained / "run").routing.tools) == ["calculator", "search"]
    with pytest.raises(ConfigError, match="missing here: calculator, search"):
        RoutedAgent.load(trained / "exported")
    assert not RoutedAgent.load(trained / "exported", tools=[]).routing.tools
    assert not RoutedAgent.load(trained / "exported", overrides=["multi_turn.enable=false"]).routing.tools
    (step,) = (trained / "run" / "checkpoints").glob("step-000001")
    with pytest.raises(ConfigError, match="missing here: search"):
        RoutedAgent.load(step, tools=["calculator"])


def test_an_export_is_not_evaluated_without_its_tools(trained: Path, cli: Cli, tmp_path: Path) -> None:
    exported, rows = trained / "exported", tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": QUESTION, "ground_truth": "3087"}) + "\n")
    reward = {"function": "toolwise.demo.reward:small_world_reward"}
    config = {"reward": reward, "rollout": {"max_new_tokens": 32}}
    with pytest.raises(ConfigError, match="missing here: calculator, search; pass them as `tools`"):
        toolwise.evaluate(exported, rows, config=config)
    assert "score" in toolwise.evaluate(exported, rows, config=config, tools=["calculator", "search"])
    assert "score" in toolwise.evaluate(exported, rows, config=config, tools=[])
    file = tmp_path / "plain.toml"
    file.write_text(f'[reward]\nfunction = "{reward["function"]}"\n[rollout]\nmax_new_tokens = 32\n')
    ended = cli("eval", file, "--model", exported, "--data", rows)
    assert ended.status == 2
    assert "missing here: calculator, search" in ended.err
    ended = cli("eval", file, "--model", exported, "--data", rows, "--set", "multi_turn.enable=false", "--json")
    assert ended.status == 0, ended.err
    ended = cli("eval", trained / "run", "--json")
    assert ended.status == 0, ended.err


def test_an_export_of_an_older_version_still_loads(trained: Path, tmp_path: Path) -> None:
    old = shutil.copytree(trained / "exported", tmp_path / "old")
    (old / TOOLS_FILE).unlink()
    assert not RoutedAgent.load(old).routing.tools
