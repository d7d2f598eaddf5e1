"""Agents by name, from a cache laid out as the hub's client lays it out: blobs, and snapshots that link to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolwise
from toolwise.agent.agent import Agent
from toolwise.agent.export import export_model
from toolwise.agent.sources import find_agent, find_router, is_model, local_source
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError, ModelError
from toolwise.models import locate
from toolwise.training.agent_bundle import write_bundle
from toolwise.training.checkpoint.agent_manifest import write_manifest

NAME = "owner/agent"
SUM = "What is 4321 - 1234?"
CODE = 'from words import ENDING\n\ndef shout(text: str) -> str:\n    """Say it loudly."""\n    return text + ENDING\n'


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts a folder into the cache of a machine without a network, under NAME; returns the snapshot's folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "hub" / "models--owner--agent"

    def put(folder: Path, ref: str = "main", commit: str = "1" * 40) -> Path:
        snapshot = repository / "snapshots" / commit
        for path in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            blob = repository / "blobs" / f"{commit[0]}{len(list((repository / 'blobs').glob('*')))}"
            blob.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, blob)
            link = snapshot / path.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit, encoding="utf-8")
        return snapshot

    return put


def write_agent(folder: Path, model: Path, settings: dict[str, Any]) -> Path:
    shutil.copytree(model, folder)
    config = RunConfig.model_validate({"rollout": {"max_new_tokens": 48}} | settings)
    write_manifest(folder, "mine", 3, write_bundle(config, folder))
    return folder


@pytest.fixture
def own_agent(tmp_path: Path) -> Path:
    """An agent with a tool in a module that imports another, and with a folder of documents."""
    (tmp_path / "mine" / "texts").mkdir(parents=True)
    (tmp_path / "mine" / "words.py").write_text('ENDING = "!"\n')
    (tmp_path / "mine" / "my_tools.py").write_text(CODE)
    (tmp_path / "mine" / "texts" / "facts.md").write_text("Alder has 12 mills.\n")
    search = {"name": "search", "folder": str(tmp_path / "mine" / "texts")}
    settings = {"tools": ["calculator", search, f"{tmp_path}/mine/my_tools.py:shout"]}
    agent = write_agent(tmp_path / "written", Path(locate("builtin:small")), settings)
    shutil.rmtree(tmp_path / "mine")
    return agent


def test_a_name_on_the_hub_is_an_agent_with_its_tools(own_agent: Path, publish: Callable[..., Path]) -> None:
    publish(own_agent)
    with pytest.raises(ConfigError, match=r"brings code .*: the tool code/1/my_tools\.py:shout; read it"):
        toolwise.load(NAME)
    assert list(toolwise.load(NAME, tools=["calculator"]).tools) == ["calculator"]
    agent = toolwise.load(NAME, trust_code=True)
    assert list(agent.tools) == ["calculator", "search", "shout"]
    assert agent.config.rollout.max_new_tokens == 48
    assert agent.ask(SUM).text == toolwise.load(own_agent, trust_code=True).ask(SUM).text == "Answer: 3087"
    assert call(agent, "shout", "so") == "so!"
    assert "12 mills" in call(agent, "search", "mills of Alder")


def call(agent: Agent, name: str, text: str) -> str:
    from toolwise.concurrency.deadlines import run_async

    async def use() -> str:
        tool = agent.tools[name]
        instance = await tool.create()
        (argument,) = tool.tool_schema.function.parameters["properties"]
        response, *_ = await tool.execute(instance, {argument: text})
        await tool.release(instance)
        return str(getattr(response, "text", response))

    return run_async(use())


def test_a_routed_agent_on_the_hub_keeps_its_router(
    make_routed: Any, tmp_path: Path, publish: Callable[..., Path]
) -> None:
    wording = tmp_path / "mine.toml"
    wording.write_text("")
    routed = make_routed(bias=[0.0, -1.0, 2.0], eval_mode="argmax")
    metadata = json.loads((routed / "router.json").read_text())
    shutil.copyfile(wording, routed / "wording.toml")
    metadata["router"]["wording"] = "wording.toml"
    (routed / "router.json").write_text(json.dumps(metadata))
    snapshot = publish(write_agent(tmp_path / "agent", routed, {"tools": ["calculator"]}))
    config, model = find_router(Path(NAME))
    assert model == snapshot
    assert Path(config.router.wording).is_file()
    agent = toolwise.load(NAME)
    assert agent.has_router
    assert agent.ask(SUM).route == "CALCULATE-FAMILY"


def test_a_revision_chooses_the_agent(tmp_path: Path, publish: Callable[..., Path]) -> None:
    small = Path(locate("builtin:small"))
    publish(write_agent(tmp_path / "a", small, {"tools": ["calculator"]}))
    older = write_agent(tmp_path / "b", small, {"tools": ["search"]})
    snapshot = publish(older, "v1", "2" * 40)
    assert find_agent(NAME)[0].tools == ["calculator"]
    config, model = find_agent(NAME, ["model.revision=v1"])
    assert (config.tools, model) == (["search"], str(snapshot))
    with pytest.raises(ModelError, match=r"at revision 'v2' is not in the local cache"):
        find_agent(NAME, ["model.revision=v2"])


def test_a_model_without_agent_json_stays_a_plain_model(publish: Callable[..., Path]) -> None:
    publish(Path(locate("builtin:small")))
    assert local_source(NAME) == NAME
    config, model = find_agent(NAME)
    assert (config.model.path, model, config.tools) == (NAME, NAME, [])
    assert toolwise.load(NAME, tools=["calculator"], overrides=["rollout.max_new_tokens=48"]).ask(SUM).text


def test_a_damaged_snapshot_is_refused(own_agent: Path, publish: Callable[..., Path]) -> None:
    (publish(own_agent) / "code/1/words.py").unlink()
    with pytest.raises(CheckpointError, match=r"words\.py is missing"):
        toolwise.load(NAME, trust_code=True)


def test_a_folder_comes_before_the_hub(tmp_path: Path, publish: Callable[..., Path]) -> None:
    small = Path(locate("builtin:small"))
    publish(write_agent(tmp_path / "a", small, {"tools": ["calculator"]}))
    write_agent(tmp_path / NAME, small, {"tools": ["search"]})
    assert local_source(NAME) == NAME
    assert find_agent(NAME)[0].tools == ["search"]


def test_commands_take_a_name(tmp_path: Path, publish: Callable[..., Path], cli: Any) -> None:
    publish(write_agent(tmp_path / "a", Path(locate("builtin:small")), {"tools": ["calculator"]}))
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": SUM, "ground_truth": "3087"}) + "\n")
    assert is_model(Path(NAME))
    assert not is_model(Path("configs/run.toml"))
    told = cli("run", NAME, SUM)
    assert (told.status, "Answer: 3087" in told.out) == (0, True), told.err
    data = ("--data", tmp_path / "tasks.jsonl")
    told = cli("rollout", NAME, *data, "--out", tmp_path / "rollouts", "--greedy")
    assert told.status == 0, told.err
    assert "calculator" in (tmp_path / "rollouts" / "rollouts.jsonl").read_text()
    told = cli("eval", NAME, *data, "--budgets", "0,1")
    assert "is in the hub's cache, where nothing is written" in told.err


def test_the_mistyped_name_of_a_run_is_not_looked_up_on_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").touch()
    for load in (toolwise.load, lambda name: export_model(Path(name), tmp_path / "out")):
        with pytest.raises(CheckpointError, match="there is no run 'frist' in runs; did you mean 'first'"):
            load("runs/frist")
