"""An export of the adapters alone is an agent too, which names its base model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolwise
from toolwise.agent.export import export_model
from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.errors import ToolwiseError
from toolwise.learner.lora import Adapters
from toolwise.models import BUILTIN, load_model
from toolwise.tools.catalog import build_tools, write_tools
from toolwise.training.checkpoint import save

SETTINGS: dict[str, Any] = {
    "tools": ["calculator"],
    "rollout": {"max_new_tokens": 48},
    "actor": {"lora": {"rank": 2}},
}


@pytest.fixture
def lora_run(tmp_path: Path) -> Path:
    """A run whose adapters have changed the model that ships, with a tool."""
    config = RunConfig.model_validate(SETTINGS)
    model, chat = load_model("builtin:small", device="cpu")
    adapters = Adapters(model, config.actor.lora)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.01, generator=torch.Generator().manual_seed(1))

    def fill(folder: Path) -> None:
        adapters.save_merged(folder)
        chat.tokenizer.save_pretrained(folder)
        write_tools(folder, build_tools(["calculator"]))

    run = tmp_path / "run"
    state = {"actor": {"adapters": adapters.state_dict()}}
    save(run / "checkpoints", 3, state, extra_files={"model": fill})
    (run / "config.toml").write_text(to_toml(config), encoding="utf-8")
    (run / "metrics.jsonl").write_text("", encoding="utf-8")
    return run


def test_exported_adapters_are_an_agent_with_their_base_model(lora_run: Path, tmp_path: Path, cli: Any) -> None:
    out = export_model(lora_run, tmp_path / "out", adapters=True).out
    assert not (out / "config.json").exists()
    question = "What is 4321 - 1234?"
    trained, agent = toolwise.load(lora_run), toolwise.load(out)
    assert list(agent.tools) == ["calculator"]
    before, after = trained.ask(question), agent.ask(question)
    assert (before.text, dict(before.calls)) == (after.text, dict(after.calls))
    assert [step.raw_policy_output for step in before.rollout.steps] == [
        step.raw_policy_output for step in after.rollout.steps
    ]
    assert agent.config.rollout.max_new_tokens == 48
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "toolwise run ." in card
    assert "model.base=FOLDER" in card
    assert "PeftModel.from_pretrained" in card
    record = json.loads((out / "base_model.json").read_text())
    assert (record["name"], list(record["files"])) == ("builtin:small", ["model.safetensors"])
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": question, "ground_truth": "3087"}) + "\n")
    reward = ("--set", "reward.function=toolwise.demo.reward:small_world_reward")
    told = cli("eval", out, "--data", tmp_path / "tasks.jsonl", "--json", *reward)
    assert told.status == 0, told.err
    assert json.loads(told.out)["n"] == 1
    record["files"]["model.safetensors"]["sha256"] = "0" * 64
    (out / "base_model.json").write_text(json.dumps(record))
    with pytest.raises(ToolwiseError, match=r"base_model\.json is not what was exported"):
        toolwise.load(out)


def test_adapters_whose_base_model_has_changed_are_not_exported(lora_run: Path, tmp_path: Path) -> None:
    base = shutil.copytree(BUILTIN / "small", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    changed = SETTINGS | {"model": {"path": str(base)}}
    (lora_run / "config.toml").write_text(to_toml(RunConfig.model_validate(changed)), encoding="utf-8")
    with pytest.raises(ToolwiseError, match="has the base model changed since the run"):
        export_model(lora_run, tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()
