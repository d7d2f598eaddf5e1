"""Checkpoints are agent folders: they hold what their agent needs, and share documents with each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.agent.export import export_model
from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.models import locate
from toolwise.tools.catalog import build_tools, read_tools, write_tools
from toolwise.training import checkpoint
from toolwise.training.agent_files import AgentFiles
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE, verify_agent
from toolwise.training.checkpoint.file_entry import FileEntry

SUM = "What is 4321 - 1234?"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two checkpoints, with a tool in a module of its own and documents."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "my_tools.py").write_text('def shout(text: str) -> str:\n    """Shout."""\n    return text\n')
    (mine / "facts.txt").write_text("Alder has 12 mills.\n" * 100)
    tools = ["calculator", {"name": "search", "file": str(mine / "facts.txt")}, f"{mine}/my_tools.py:shout"]
    config = RunConfig.model_validate({"name": "mine", "tools": tools, "rollout": {"max_new_tokens": 48}})
    out = tmp_path / "run"
    save_steps(out, config, 1, 2)
    (out / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return out


def save_steps(out: Path, config: RunConfig, *steps: int) -> None:
    """As one process of the run does."""
    agent, built = AgentFiles(config, out), build_tools(config.tools)

    def fill(folder: Path) -> None:
        shutil.copytree(locate("builtin:small"), folder, dirs_exist_ok=True)
        write_tools(folder, built)
        agent.write(folder, step)

    for step in steps:
        model = {"model": fill}
        known = agent.entries("model")
        checkpoint.save(out / "checkpoints", step, {"a": {}}, extra_files=model, known_files=known)


def test_a_checkpoint_elsewhere_answers_like_its_run(tiny_run: Path, tmp_path: Path) -> None:
    short = ["rollout.max_new_tokens=48"]
    last = sorted((tiny_run / "checkpoints").iterdir())[-1]
    moved = shutil.copytree(last, tmp_path / "elsewhere" / last.name)
    for source in (moved, moved / "model", shutil.copytree(last / "model", tmp_path / "model")):
        agent, trained = toolwise.load(source, overrides=short), toolwise.load(tiny_run, overrides=short)
        assert list(agent.tools) == list(trained.tools) != []
        before, after = trained.ask(SUM), agent.ask(SUM)
        assert (before.text, before.calls, before.cost) == (after.text, after.calls, after.cost)
        for section in ("rollout", "multi_turn"):
            names = json.loads((moved / "model" / AGENT_FILE).read_text())["settings"][section]
            own, runs = (getattr(each.config, section).model_dump() for each in (agent, trained))
            assert {name: own[name] for name in names} == {name: runs[name] for name in names}


def test_checkpoints_share_documents_and_stand_alone(run: Path, tmp_path: Path) -> None:
    steps = sorted((run / "checkpoints").iterdir())
    for name, kept in (("documents/0/facts.txt", 1), ("code/1/my_tools.py", 2)):
        assert len({(step / "model" / name).stat().st_ino for step in steps}) == kept
    moved = shutil.copytree(steps[-1], tmp_path / "moved")
    shutil.rmtree(run)
    shutil.rmtree(tmp_path / "mine")
    assert verify_agent(moved / "model").step == 2
    assert checkpoint.load(moved).step == 2
    with pytest.raises(ConfigError, match="brings code"):
        toolwise.load(moved)
    agent = toolwise.load(moved, trust_code=True)
    assert list(agent.tools) == ["calculator", "search", "shout"]
    assert agent.ask(SUM).text == "Answer: 3087"
    (moved / "model" / "code/1/my_tools.py").write_text("x")
    with pytest.raises(CheckpointError, match=r"my_tools\.py is not what was exported"):
        toolwise.load(moved, trust_code=True)


def test_files_that_checkpoints_share_are_read_once_for_their_checksums(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = FileEntry.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(FileEntry, "of", classmethod(lambda cls, file: read.append(file.name) or real(cls, file)))
    save_steps(
        run, RunConfig.model_validate({"tools": [{"name": "search", "file": f"{run.parent}/mine/facts.txt"}]}), 3, 4, 5
    )
    assert (read.count("facts.txt"), read.count("model.safetensors")) == (2, 3)


def test_code_that_is_edited_in_one_checkpoint_damages_no_other(run: Path) -> None:
    first, second = sorted((run / "checkpoints").iterdir())
    (first / "model" / "code/1/my_tools.py").write_text("# edited")
    with pytest.raises(CheckpointError):
        checkpoint.load(first)
    assert checkpoint.load(second).step == 2


def test_an_export_with_other_tools_has_nothing_of_those_of_its_run(run: Path, tmp_path: Path) -> None:
    out = export_model(run, tmp_path / "out", overrides=['tools=["calculator"]']).out
    assert not (out / "code").exists()
    assert not (out / "documents").exists()
    assert list(read_tools(out)) == list(toolwise.load(out).tools) == ["calculator"]
    whole = export_model(run, tmp_path / "whole").out
    assert sorted(path.name for path in whole.glob("*/*/*")) == ["facts.txt", "my_tools.py"]


def test_code_that_changed_between_two_processes_leaves_earlier_checkpoints_as_they_were(run: Path) -> None:
    (run.parent / "mine" / "my_tools.py").write_text('def shout(text: str) -> str:\n    """Other."""\n    return ""\n')
    save_steps(run, RunConfig.model_validate({"tools": [f"{run.parent}/mine/my_tools.py:shout"]}), 3)
    older, newer = (run / f"checkpoints/step-00000{step}/model/code" for step in (2, 3))
    assert "Shout." in (older / "1/my_tools.py").read_text()
    assert "Other." in (newer / "0/my_tools.py").read_text()
    assert not (newer.parent / "documents").exists()
    for step in (2, 3):
        checkpoint.load(run / f"checkpoints/step-00000{step}")


def test_within_its_run_a_checkpoint_follows_the_run(run: Path) -> None:
    """Its settings may have been changed since, and its code is the user's own."""
    text = (run / "config.toml").read_text().replace("max_new_tokens = 48", "max_new_tokens = 32")
    (run / "config.toml").write_text(text)
    agent = toolwise.load(run / "checkpoints" / "step-000001")
    assert (agent.config.rollout.max_new_tokens, list(agent.tools)) == (32, ["calculator", "search", "shout"])


def test_an_amended_checkpoint_stays_an_agent(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints" / "step-000002"
    checkpoint.amend(step, {"model/note.json": b"{}"})
    moved = shutil.copytree(step, tmp_path / "moved")
    assert "note.json" in verify_agent(moved / "model").files
    assert "note.json" not in verify_agent(run / "checkpoints/step-000001/model").files


def test_a_checkpoint_of_an_earlier_version_needs_its_run(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        shutil.copytree(locate("builtin:small"), folder, dirs_exist_ok=True)

    run = tmp_path / "run"
    checkpoint.save(run / "checkpoints", 1, {"a": {}}, extra_files={"model": fill})
    (run / "config.toml").write_text('tools = ["calculator"]\n', encoding="utf-8")
    assert list(toolwise.load(run / "checkpoints" / "step-000001").tools) == ["calculator"]
    moved = shutil.copytree(run / "checkpoints" / "step-000001", tmp_path / "step-000001")
    with pytest.raises(CheckpointError, match="is not in the folder of its run") as told:
        toolwise.load(moved)
    assert "\n" not in str(told.value)


def test_commands_take_a_checkpoint_that_was_moved(run: Path, tmp_path: Path, cli: Any) -> None:
    moved = shutil.copytree(run / "checkpoints" / "step-000002", tmp_path / "moved")
    shutil.rmtree(run)
    told = cli("run", moved, SUM, "--trust-code")
    assert (told.status, "Answer: 3087" in told.out) == (0, True), told.err
    told = cli("export", moved, "--out", tmp_path / "out")
    assert told.status == 0, told.err
    assert verify_agent(tmp_path / "out").step == 2
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": SUM, "ground_truth": "3087"}) + "\n")
    reward = ("--set", "reward.function=toolwise.demo.reward:small_world_reward")
    told = cli("eval", moved, "--data", tmp_path / "tasks.jsonl", "--json", "--trust-code", *reward)
    assert told.status == 0, told.err
