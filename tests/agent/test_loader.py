"""Loading a router from an export, a checkpoint or a run, and errors where there is none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from toolwise.agent.agent import RoutedAgent
from toolwise.agent.documents import read_documents
from toolwise.agent.export import export_model
from toolwise.agent.loader import load_router
from toolwise.agent.sources import find_router
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, inference_settings, load_config
from toolwise.errors import CheckpointError, ConfigError, DataError
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.training import checkpoint


@pytest.fixture
def run_folder(routed: Path, tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('tools = ["calculator"]\n[router]\nenable = true\nwording = "silent"\n')

    def fill(folder: Path) -> None:
        shutil.copytree(routed, folder, dirs_exist_ok=True)

    checkpoint.save(tmp_path / "checkpoints", 4, {"progress": {"step": 4}}, extra_files={"model": fill})
    return tmp_path


def test_a_run_a_checkpoint_and_its_model_all_lead_to_the_same(run_folder: Path) -> None:
    step = run_folder / "checkpoints" / "step-000004"
    for source in (run_folder, step, step / "model"):
        config, model = find_router(source, ["seed=5"])
        assert model.resolve() == (step / "model").resolve()
        assert (config.tools, config.seed) == (["calculator"], 5)


def test_a_runs_own_tools_are_used_unless_others_are_given(run_folder: Path) -> None:
    assert list(load_router(run_folder).tools) == ["calculator"]
    assert list(load_router(run_folder, tools=["search"]).tools) == ["search"]


def test_documents_become_what_search_searches(routed: Path) -> None:
    entries = ["calculator", {"name": "search", "k": 2}]
    tool = load_router(routed, tools=entries, documents=["Alder has 12 mills."]).tools["search"]
    assert isinstance(tool, SearchTool)
    assert (tool.config["documents"], tool.config["k"]) == (["Alder has 12 mills."], 2)
    with pytest.raises(ConfigError, match="--tools search"):
        load_router(routed, tools=["calculator"], documents=["x"])


def test_a_folder_without_a_router_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="or an exported model with a router"):
        find_router(tmp_path)
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        find_router(tmp_path)
    (tmp_path / "router.json").write_text("{")
    with pytest.raises(CheckpointError, match="export the model again"):
        find_router(tmp_path)


def test_a_run_without_a_router_is_told_how_to_get_one(run_folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.toml").write_text("")

    def fill(folder: Path) -> None:
        shutil.copytree(run_folder / "checkpoints/step-000004/model", folder, dirs_exist_ok=True)
        for name in ("router.json", "router.safetensors"):
            (folder / name).unlink()

    checkpoint.save(plain / "checkpoints", 1, {"progress": {}}, extra_files={"model": fill})
    with pytest.raises(CheckpointError, match=r"router\.enable=true"):
        load_router(plain)


def test_documents_are_lines_or_rows(tmp_path: Path) -> None:
    text = tmp_path / "d.txt"
    text.write_text("Alder has 12 mills.\n\n  Brenna has 7 wells. \n")
    assert read_documents(text) == ["Alder has 12 mills.", "Brenna has 7 wells."]
    rows = tmp_path / "d.jsonl"
    rows.write_text('{"title": "A", "text": "x", "more": 1}\n{"text": "y"}\n')
    assert read_documents(rows) == [{"title": "A", "text": "x"}, {"text": "y"}]


@pytest.mark.parametrize(("name", "content"), [("d.txt", "\n \n"), ("d.jsonl", '{"body": "x"}\n'), ("d.md", None)])
def test_bad_documents_are_refused(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=name):
        read_documents(tmp_path / name)


OWN = """
tools = ["calculator", "search"]
[data]
system_prompt = "Be brief."
[rollout]
max_new_tokens = 16
stop = ["END"]
tool_prompt = "system"
tool_parser = "qwen"
temperature = 0.5
[multi_turn]
max_turns = 2
[router]
enable = true
wording = "silent"
"""


def test_an_exported_agent_rolls_out_as_its_run_did(run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "config.toml").write_text(OWN)
    out = export_model(run_folder, tmp_path / "exported").out
    loaded = load_router(out, tools=["calculator", "search"])
    for name in INFERENCE_FIELDS:
        assert getattr(loaded.config, name) == getattr(load_config(run_folder / "config.toml"), name)
    assert (loaded.policy.sampling.max_new_tokens, loaded.policy.chat.tool_prompt.where) == (16, "system")
    told = RoutedAgent(loaded).scheduler.max_episode_steps
    assert told == 2
    for question, system in (
        ("How many?", "Be brief."),
        ([{"role": "user", "content": "How many?"}], "Be brief."),
        ([{"role": "system", "content": "Be long."}, {"role": "user", "content": "How many?"}], "Be long."),
    ):
        prompt = RoutedAgent(loaded).ask(question, route="answer").rollout.task.prompt
        assert [(m.role, m.content) for m in prompt] == [("system", system), ("user", "How many?")]
    assert find_router(out, ["rollout.max_new_tokens=8"])[0].rollout.max_new_tokens == 8


def test_an_export_with_other_settings_of_the_router_keeps_them(run_folder: Path, tmp_path: Path) -> None:
    out = export_model(run_folder, tmp_path / "exported", overrides=["router.max_cost=3"]).out
    assert find_router(out)[0].router.max_cost == 3


def test_an_export_brings_the_wording_of_its_router(run_folder: Path, tmp_path: Path) -> None:
    file = run_folder / "mine.toml"
    file.write_text("")
    (run_folder / "config.toml").write_text(OWN.replace('"silent"', '"mine.toml"'))
    out = export_model(run_folder, tmp_path / "exported").out
    file.unlink()
    assert find_router(out)[0].router.wording == str(out / "wording.toml")
    assert str(run_folder) not in (out / "router.json").read_text()


def test_a_folder_cannot_choose_the_parser_or_the_router(routed: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(routed, tmp_path / "routed")
    metadata = json.loads((folder / "router.json").read_text())
    metadata["router"] |= {"name": "os:system", "kwargs": {"command": "true"}}
    (folder / "router.json").write_text(json.dumps(metadata))
    assert find_router(folder)[0].router.name == ""
    config = RunConfig.model_validate({"rollout": {"tool_parser": "/home/me/mine.py:parse"}})
    metadata |= inference_settings(config)
    assert metadata["rollout"]["tool_parser"] == "mine.py:parse"
    (folder / "router.json").write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match=r"trained with the tool parser mine.py:parse, .* give the parser with --set"):
        find_router(folder)
    assert find_router(folder, ["rollout.tool_parser=my.py:parse"])[0].rollout.tool_parser == "my.py:parse"


def test_an_export_of_an_earlier_version_loads_with_defaults(routed: Path) -> None:
    assert json.loads((routed / "router.json").read_text()).keys().isdisjoint(INFERENCE_FIELDS)
    assert find_router(routed)[0].rollout == RunConfig().rollout


def test_no_path_of_the_machine_is_exported(tmp_path: Path) -> None:
    (tmp_path / "turn.json").write_text("{}")
    config = RunConfig.model_validate({"rollout": {"grammar": {"json_schema": str(tmp_path / "turn.json")}}})
    assert str(tmp_path) not in json.dumps(inference_settings(config))


def test_an_exported_folder_cannot_name_a_program_to_start(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    vllm = {"command": ["touch", str(ran)]}
    metadata = {"router": {"enable": True}, "rollout": {"engine": "vllm", "vllm": vllm, "temperature": 0.5}}
    (tmp_path / "router.json").write_text(json.dumps(metadata), encoding="utf-8")
    config, _ = find_router(tmp_path)
    assert config.rollout.engine == "toolwise"
    assert config.rollout.vllm.command == ["vllm", "serve"]
    assert config.rollout.temperature == 0.5
    assert not ran.exists()
