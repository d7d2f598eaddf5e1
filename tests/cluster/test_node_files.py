"""The settings of a run and the files they name, on another node."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from toolwise.cluster import node_files
from toolwise.cluster.node_files import pack_settings, unpack_settings
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.models import BUILTIN

PACKAGE = Path(node_files.__file__).parents[1]
REMOTE_CODE = [*(PACKAGE / "cluster").glob("*_worker.py"), *(PACKAGE / "learner").glob("*.py")]


def config(folder: Path) -> RunConfig:
    (folder / "reward.py").write_text("import helper\ndef score(messages, ground_truth): return helper.ONE\n")
    (folder / "helper.py").write_text("ONE = 1.0\n")
    (folder / "tasks.jsonl").write_text("{}\n")
    settings = {"data": {"train": folder / "tasks.jsonl"}, "reward": {"function": f"{folder / 'reward.py'}:score"}}
    return RunConfig.model_validate({**settings, "trainer": {"total_steps": 7}})


def test_code_arrives_with_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    there = tmp_path / "there"
    settings, files = pack_settings(config(tmp_path / "here"))
    received = unpack_settings({**settings, **files}, there)
    file = Path(received.reward.function.rpartition(":")[0])
    assert file.is_relative_to(there)
    assert (file.parent / "helper.py").read_text() == "ONE = 1.0\n"
    assert received.reward.function.endswith(":score")


def test_tasks_and_trackers_stay(tmp_path: Path) -> None:
    settings, files = pack_settings(config(tmp_path))
    assert not any("tasks.jsonl" in name for name in files)
    assert b"callbacks" not in settings["settings"]


def test_other_processes_get_every_setting_that_they_read(tmp_path: Path) -> None:
    changed = {
        "trainer": {
            "total_steps": 7,
            "mode": "async",
            "max_staleness": 3,
            "several_stale_updates": True,
            "keep_cache": True,
        },
        "actor": {"lr": 0.1, "lr_schedule": "linear", "warmup_steps": 2, "policy_loss_kwargs": {"a": None, "b": 1}},
        "algorithm": {"kl": "loss", "kl_coef": 0.3},
        "critic": {"lr": 0.2},
    }
    sent = RunConfig.model_validate({"data": {"train": tmp_path / "tasks.jsonl"}, "seed": 5, **changed})
    received = unpack_settings(pack_settings(sent)[0], tmp_path)
    source = "".join(path.read_text() for path in REMOTE_CODE)
    read = {name for name in re.findall(r"\bconfig\.(\w+)", source) if name in RunConfig.model_fields}
    assert {"actor", "algorithm", "critic", "rollout", "seed", "trainer"} <= read
    for name in read - {"trainer"}:
        assert getattr(received, name) == getattr(sent, name), name
    fields = set(re.findall(r"\bconfig\.trainer\.(\w+)", source))
    assert fields >= {"total_steps", "allowed_staleness", "keep_cache"}
    for name in fields:
        assert getattr(received.trainer, name) == getattr(sent.trainer, name), name


SECRET, NOTES = "home/.ssh/id_ed25519", "home/notes.txt"


@pytest.mark.parametrize(
    "section", [{"env": {"kwargs": {"root": "HOME"}}}, {"reward": {"sandbox": {"read": ["HOME"]}}}], ids=["env", "read"]
)
def test_folders_of_other_settings_stay(
    section: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_home(tmp_path)
    code = {"algorithm": {"adv_estimator": f"{tmp_path / 'home/code.py'}:f"}}
    own = json.loads(json.dumps({**section, **code}).replace("HOME", str(tmp_path / "home")))
    sent = RunConfig.model_validate(own)
    settings, files = pack_settings(sent)
    assert list(files) == [f"file:{tmp_path / 'home/code.py'}"]
    assert "is not sent to other nodes" in caplog.text
    received = unpack_settings({**settings, **files}, tmp_path / "there")
    assert (received.env, received.reward) == (sent.env, sent.reward)
    assert received.algorithm != sent.algorithm


def test_documents_travel_without_hidden_files(tmp_path: Path) -> None:
    write_home(tmp_path)
    tool = {"name": "search", "folder": str(tmp_path / "home")}
    settings, files = pack_settings(RunConfig.model_validate({"tools": [tool]}))
    assert f"file:{tmp_path / NOTES}" in files
    assert f"file:{tmp_path / SECRET}" not in files
    [received] = unpack_settings({**settings, **files}, tmp_path / "there").tools
    assert isinstance(received, dict)
    assert (tmp_path / "there") in Path(received["folder"]).parents


@pytest.mark.parametrize("given", [False, True], ids=["beside the adapters", "model.base"])
def test_adapters_travel_with_their_base_model(tmp_path: Path, given: bool) -> None:
    here = tmp_path / "here"
    shutil.copytree(BUILTIN / "small", here / "agent")
    shutil.move(here / "agent" / "model.safetensors", here / "agent" / "adapter_model.safetensors")
    base = shutil.copytree(BUILTIN / "small", here / ("elsewhere" if given else "base"))
    (here / "agent" / "config.json").unlink()
    adapters = {"peft_type": "LORA", "base_model_name_or_path": "base"}
    (here / "agent" / "adapter_config.json").write_text(json.dumps(adapters))
    model = {"path": str(here / "agent"), "base": str(base) if given else ""}
    settings, files = pack_settings(RunConfig.model_validate({"model": model}))
    received = unpack_settings({**settings, **files}, tmp_path / "there").model
    for path, file in ((received.path, "adapter_model.safetensors"), (received.base, "model.safetensors")):
        assert Path(path).is_relative_to(tmp_path / "there")
        assert (Path(path) / file).is_file()


def write_home(folder: Path) -> None:
    (folder / SECRET).parent.mkdir(parents=True)
    for name in (SECRET, NOTES, "home/code.py"):
        (folder / name).write_text("x = 1\n")


def test_too_many_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_files, "MAX_OTHER_BYTES", 10)
    with pytest.raises(ConfigError, match="too much to send"):
        pack_settings(config(tmp_path))


def test_a_file_cannot_be_written_outside_of_the_folder(tmp_path: Path) -> None:
    settings, _ = pack_settings(config(tmp_path))
    with pytest.raises(ConfigError, match="outside"):
        unpack_settings({**settings, "file:/../../evil.py": b"x"}, tmp_path / "there")


def test_a_node_with_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, files = pack_settings(config(tmp_path))
    monkeypatch.setattr(node_files, "code_hash", lambda: "another")
    with pytest.raises(ConfigError, match="other source code of toolwise"):
        unpack_settings({**settings, **files}, tmp_path / "there")


def test_programs_stay(tmp_path: Path) -> None:
    """Their files alone would not run elsewhere: an interpreter needs its libraries."""
    script = tmp_path / "agent.js"
    script.write_text("")
    sent = RunConfig.model_validate(
        {"data": {"train": tmp_path / "tasks.jsonl"}, "agent": {"command": [sys.executable, str(script)]}}
    )
    settings, files = pack_settings(sent)
    assert [Path(name).name for name in files] == ["agent.js"]
    received = unpack_settings({**settings, **files}, tmp_path / "there").agent.command
    assert received[0] == sys.executable
    assert Path(received[1]).is_relative_to(tmp_path / "there")
