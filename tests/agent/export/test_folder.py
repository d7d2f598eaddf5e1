"""Export: plain transformers loads the folder and generates the same; it is complete or absent."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from toolwise.agent.export import export_model
from toolwise.agent.export.dtype import convert, saved_dtype
from toolwise.agent.loader import load_parts
from toolwise.agent.sources import find_checkpoint, find_run
from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError, ModelError
from toolwise.training.checkpoint import save

SAY = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
said = []
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    dtype = AutoConfig.from_pretrained(folder).dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # not every CPU multiplies bfloat16
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    asked = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    told = model.generate(**asked, max_new_tokens=12, do_sample=False)[0].tolist()
    said.append([str(dtype), told])
assert "toolwise" not in sys.modules
print(json.dumps(said))
"""


def say(*folders: Path) -> list[list[object]]:
    """Outputs of plain transformers, in a process without toolwise."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-I", "-c", SAY, *map(str, folders)], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found: list[list[object]] = json.loads(ended.stdout)
    return found


@pytest.mark.long
def test_plain_transformers_generates_the_same(trained: Path, tmp_path: Path) -> None:
    plain = export_model(trained, tmp_path / "deep" / "plain").out
    half = export_model(trained, tmp_path / "half", dtype="bfloat16").out
    inside = trained / "checkpoints" / "step-000010" / "model"
    saved, exported, rounded = say(inside, plain, half)
    assert exported == saved
    assert (saved[0], rounded[0]) == ("torch.float32", "torch.bfloat16")
    assert rounded[1] == saved[1]


def test_all_files_are_present_and_readable(trained: Path, tmp_path: Path) -> None:
    out = export_model(trained, tmp_path / "out", dtype="float16").out
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "agent.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len({stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_latest_is_exported_or_the_best_or_the_one_named(trained: Path, tmp_path: Path) -> None:
    assert find_checkpoint(trained).step == 10
    assert find_checkpoint(trained, best="score").step == 5
    assert find_checkpoint(trained, best="-cost").step == 0
    named = trained / "checkpoints" / "step-000000"
    assert (find_run(named, ""), find_checkpoint(named).step) == (trained.resolve(), 0)
    done = export_model(trained, tmp_path / "out", best="score")
    assert (done.step, done.dtype) == (5, "float32")
    assert "| steps | 5 of" in (done.out / "README.md").read_text(encoding="utf-8")


def test_nothing_is_overwritten(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    for name in ("file", "full"):
        with pytest.raises(ConfigError, match=f"{name} already exists: choose another --out"):
            export_model(trained, tmp_path / name)
    assert (tmp_path / "full" / "notes").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert (export_model(trained, tmp_path / "empty").out / "config.json").is_file()


def test_a_folder_without_a_run_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.toml: give a run, "):
        export_model(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="is a single checkpoint: give its run"):
        find_checkpoint(trained / "checkpoints" / "step-000005", best="score")
    with pytest.raises(CheckpointError, match="was validated for 'correct': available: cost, score"):
        find_checkpoint(trained, best="correct")
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
        find_checkpoint(tmp_path)


def test_a_damaged_checkpoint_is_not_skipped_silently(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "checkpoints" / "step-000010" / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-000010.*config\.json has 2 bytes"):
        export_model(run, tmp_path / "out")
    assert export_model(run / "checkpoints" / "step-000005", tmp_path / "out").step == 5


def test_a_model_that_does_not_load_is_not_left_behind(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))

    def write_half(folder: Path) -> None:
        shutil.copytree(trained / "checkpoints" / "step-000010" / "model", folder, dirs_exist_ok=True)
        (folder / "tokenizer.json").write_text("{")

    save(run / "checkpoints", 11, {"a": {}}, extra_files={"model": write_half})
    with pytest.raises(ModelError, match="the exported model does not load") as caught:
        export_model(run, tmp_path / "out")
    assert "\n" not in str(caught.value)
    save(run / "checkpoints", 12, {"a": {}})
    with pytest.raises(CheckpointError, match="has no model to export"):
        export_model(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_generation_config_is_made_where_there_is_none(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))

    def write_without(folder: Path) -> None:
        shutil.copytree(trained / "checkpoints" / "step-000010" / "model", folder, dirs_exist_ok=True)
        (folder / "generation_config.json").unlink()

    save(run / "checkpoints", 11, {"a": {}}, extra_files={"model": write_without})
    out = export_model(run, tmp_path / "out").out
    assert json.loads((out / "generation_config.json").read_bytes())["eos_token_id"] == 2033


def test_a_checkpoint_that_its_run_prunes_meanwhile_is_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    copy = shutil.copyfile

    def prune_first(source: Path, target: Path) -> None:
        shutil.rmtree(run / "checkpoints" / "step-000010", ignore_errors=True)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", prune_first)
    with pytest.raises(CheckpointError, match="was removed by its run while it was being read: try again"):
        export_model(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_disk_that_is_full_is_one_line_and_leaves_nothing(trained: Path, tmp_path: Path, dtype: str | None) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(
            ModelError, match=rf"^cannot write {tmp_path}/out: File too large; nothing was left behind$"
        ):
            export_model(trained, tmp_path / "out", dtype=dtype)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def make(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "by": "me"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_values_are_rounded_and_integers_left_alone(tmp_path: Path, dtype: str) -> None:
    tensors = {"w": torch.randn(4, 3), "b": torch.randn(3).double(), "n": torch.arange(3)}
    make(tmp_path, tensors, dtype="float32", text_config={"torch_dtype": "float32", "layers": 2})
    convert(tmp_path, dtype)
    found = load_file(tmp_path / "model.safetensors")
    wanted = getattr(torch, dtype)
    assert {name: tensor.dtype for name, tensor in found.items()} == {"w": wanted, "b": wanted, "n": torch.int64}
    for name in ("w", "b"):
        assert torch.equal(found[name], tensors[name].to(wanted))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "llama",
        "dtype": dtype,
        "text_config": {"torch_dtype": dtype, "layers": 2},
    }
    assert saved_dtype(tmp_path) == dtype
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_overflow_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    make(tmp_path, {"layer.weight": torch.tensor([1.0, -70_000.0])})
    with pytest.raises(
        ModelError, match=r"layer\.weight contains 7e\+04, which overflows float16: use --dtype bfloat16"
    ):
        convert(tmp_path, "float16")


def test_infinite_values_may_stay_infinite(tmp_path: Path) -> None:
    make(tmp_path, {"mask": torch.tensor([0.0, float("-inf")])})
    convert(tmp_path, "float16")
    assert load_file(tmp_path / "model.safetensors")["mask"].tolist() == [0.0, float("-inf")]


def test_the_index_of_several_files_has_the_new_size(tmp_path: Path) -> None:
    make(tmp_path, {"a": torch.ones(10)})
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(5)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"metadata": {"total_size": 60}, "weight_map": {"a": "…", "b": "…"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(tmp_path, "bfloat16")
    told = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert told == {"metadata": {"total_size": 30}, "weight_map": {"a": "…", "b": "…"}}


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        saved_dtype(tmp_path)
    make(tmp_path, {"w": torch.ones(2, dtype=torch.int8)})
    with pytest.raises(ModelError, match="are I8: only float32, bfloat16, float16"):
        saved_dtype(tmp_path)
    with pytest.raises(ModelError, match="--dtype is 'int8': use one of float32"):
        convert(tmp_path, "int8")


def test_a_run_without_adapters_has_none_to_export(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapters, since actor\.lora\.rank is 0: export its model without"):
        export_model(trained, tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


def test_an_agent_of_one_s_own_is_not_part_of_the_export(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    save(run / "checkpoints", 1, {"a": {}}, extra_files={"model": partial(copy_model, trained)})
    config = RunConfig.model_validate({"agent": {"run": "/somewhere/mine.py:run"}, "reward": {"function": "agent"}})
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    out = export_model(run, tmp_path / "out").out
    assert "the loop and the tools of your own agent are not part of it" in caplog.text
    for source in (out, run):
        caplog.clear()
        load_parts(source)
        assert caplog.text.count("was trained inside an agent of its own") == 1


def copy_model(run: Path, folder: Path) -> None:
    shutil.copytree(run / "checkpoints" / "step-000010" / "model", folder, dirs_exist_ok=True)


def test_an_export_into_what_it_comes_from_is_refused(trained: Path, tmp_path: Path) -> None:
    agent = export_model(trained, tmp_path / "agent").out
    for source, out in ((agent, agent / "sub"), (trained, trained / "checkpoints" / "mine")):
        with pytest.raises(ConfigError, match="which must stay as it is: choose another --out"):
            export_model(source, out)
        assert not out.exists()


def test_settings_of_a_router_that_the_run_does_not_have_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.max_cost=3: this agent has no router"):
        export_model(trained, tmp_path / "out", overrides=["router.max_cost=3"])
    assert not (tmp_path / "out").exists()
