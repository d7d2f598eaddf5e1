"""Exporting an agent folder or a plain model again: a copy that answers alike, or with other settings."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from trained_router import routed_folder

import toolwise
from toolwise.agent.export import export_model
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.models import locate
from toolwise.tools.catalog import build_tools, read_tools, write_tools
from toolwise.training.agent_bundle import OWN_AGENT, write_bundle
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE, read_settings, verify_agent, write_manifest

SUM = "What is 4321 - 1234?"


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """With a tool in a module of its own, and documents."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_tools.py").write_text('def shout(text: str) -> str:\n    """Shout."""\n    return text\n')
    (tmp_path / "mine" / "facts.txt").write_text("Alder has 12 mills.\n")
    search = {"name": "search", "file": str(tmp_path / "mine" / "facts.txt")}
    return write_agent(tmp_path, {"tools": ["calculator", search, f"{tmp_path}/mine/my_tools.py:shout"]})


def write_agent(tmp_path: Path, settings: dict[str, Any]) -> Path:
    folder = shutil.copytree(locate("builtin:small"), tmp_path / "agent")
    config = RunConfig.model_validate({"rollout": {"max_new_tokens": 48}} | settings)
    write_tools(folder, build_tools(config.tools))
    (folder / "README.md").write_text("# Mine\n")
    (folder / "LICENSE").write_text("Mine.\n")
    write_manifest(folder, "mine", 3, write_bundle(config, folder))
    return folder


def test_a_copy_has_everything_and_runs_nothing(agent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ran").unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING):
        done = export_model(agent, tmp_path / "copy")
    assert (done.step, done.dtype) == (3, "float32")
    assert "runs with your permissions" not in caplog.text
    manifest, copied = verify_agent(agent), verify_agent(done.out)
    assert (copied.name, copied.files) == ("mine", manifest.files)
    assert copied.settings == manifest.settings
    assert (done.out / "LICENSE").read_text() == "Mine.\n"
    assert (done.out / "README.md").read_text() == "# Mine\n"
    with pytest.raises(ConfigError, match="brings code"):
        toolwise.load(done.out)
    loaded = toolwise.load(done.out, trust_code=True)
    assert list(loaded.tools) == ["calculator", "search", "shout"]
    assert loaded.ask(SUM).text == "Answer: 3087"


def test_a_copy_may_have_other_settings_and_another_dtype(agent: Path, tmp_path: Path) -> None:
    changes = ["rollout.max_new_tokens=24", "multi_turn.max_turns=2"]
    out = export_model(agent, tmp_path / "copy", dtype="bfloat16", overrides=changes).out
    loaded = toolwise.load(out, trust_code=True)
    assert (loaded.config.rollout.max_new_tokens, loaded.config.multi_turn.max_turns) == (24, 2)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    card = (out / "README.md").read_text()
    assert card.startswith("# Mine\n")
    for each in (*changes, "weights in bfloat16, converted from float32"):
        assert f"- `{each}`" in card


def test_a_copy_may_have_other_tools(agent: Path, tmp_path: Path) -> None:
    out = export_model(agent, tmp_path / "copy", overrides=['tools=["calculator"]']).out
    assert not (out / "code").exists()
    assert not (out / "documents").exists()
    assert list(read_tools(out)) == list(toolwise.load(out).tools) == ["calculator"]


@pytest.mark.parametrize("setting", ["trainer.total_steps=3", "reward.sandbox.tier=off", "rollout.engine=vllm"])
def test_settings_that_an_agent_does_not_have_are_refused(agent: Path, tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match="an agent has no such setting"):
        export_model(agent, tmp_path / "copy", overrides=[setting])
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("option", [{"best": "score"}, {"adapters": True}])
def test_what_needs_a_run_is_refused(agent: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not a run: leave --best and --adapters out"):
        export_model(agent, tmp_path / "copy", **option)


def test_a_plain_model_becomes_an_agent(tmp_path: Path) -> None:
    out = export_model(Path("builtin:small"), tmp_path / "out", overrides=['tools=["calculator"]']).out
    loaded = toolwise.load(out)
    assert loaded.ask(SUM).text == "Answer: 3087"
    assert "An agent of the model builtin:small" in (out / "README.md").read_text()


def test_a_routed_agent_keeps_its_router_with_other_settings(tmp_path: Path) -> None:
    routed = routed_folder(tmp_path / "routed", bias=[0.0, -1.0, 2.0], eval_mode="argmax")
    write_manifest(routed, "routed", 1, write_bundle(RunConfig.model_validate({"tools": ["calculator"]}), routed))
    changes = ["router.max_cost=3", "rollout.max_new_tokens=48"]
    out = export_model(routed, tmp_path / "out", overrides=changes).out
    loaded = toolwise.load(out)
    assert (loaded.config.router.max_cost, loaded.config.router.eval_mode) == (3, "argmax")
    assert loaded.ask(SUM).route == "CALCULATE-FAMILY"


@pytest.mark.parametrize("change", ["router.max_cost=3", "router = {max_cost = 3}"])
def test_settings_of_a_router_that_is_not_there_are_refused(agent: Path, tmp_path: Path, change: str) -> None:
    with pytest.raises(ConfigError, match="this agent has no router, so the setting has no effect"):
        export_model(agent, tmp_path / "copy", overrides=[change])
    assert not (tmp_path / "copy").exists()


def test_what_was_given_in_python_stays_missing(agent: Path, tmp_path: Path) -> None:
    settings = read_settings(agent) | {OWN_AGENT: True}
    settings["tools"] = ["calculator", "given in Python: look_up"]
    shutil.rmtree(agent / "code")
    shutil.rmtree(agent / "documents")
    write_manifest(agent, "mine", 3, settings)
    out = export_model(agent, tmp_path / "copy").out
    copied = json.loads((out / AGENT_FILE).read_text())["settings"]
    assert copied["tools"] == ["calculator", "given in Python: look_up"]
    assert copied[OWN_AGENT]
