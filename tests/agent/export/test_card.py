"""The model card is complete and does not reveal folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toolwise.agent.export.card import model_card
from toolwise.config.schema import RunConfig, load_config
from toolwise.training.checkpoint import load


def card_of(run: Path, step: int, **changes: Any) -> str:
    config = load_config(run / "config.toml").model_dump()
    for section, values in changes.items():
        config[section] = {**config[section], **values} if isinstance(values, dict) else values
    found = load(run / "checkpoints" / f"step-{step:06d}")
    return model_card(RunConfig.model_validate(config), found, run, dtype="bfloat16", saved_in="float32")


def test_base_model_data_and_settings(trained: Path) -> None:
    card = card_of(trained, 10)
    for line in (
        "# tiny ¦ run",
        "| base model | `builtin:small` |",
        "| training data | `train.jsonl` |",
        "| held-out data | `heldout.jsonl` |",
        "| tools | `calculator`, `mine.py:look_up` |",
        "| reward | `judge.py:judge` |",
        "| advantage estimator | `grpo` |",
        "| steps | 10 of 2 tasks × 4 rollouts, up to 10 turns |",
        "| learning rate | 3e-05 |",
        "| seed | 7 |",
        "| weights | bfloat16, converted from float32 |",
        "| made with | toolwise 0.9.9 |",
    ):
        assert line in card.splitlines()
    assert "somewhere" not in card
    assert "policy loss" not in card
    assert "## Licence" in card


def test_an_estimator_and_a_loss_of_one_s_own_are_named_without_their_folder(trained: Path) -> None:
    mine = {
        "algorithm": {"adv_estimator": "/somewhere/mine.py:Best"},
        "actor": {"policy_loss": "/somewhere/mine.py:Gspo"},
    }
    card = card_of(trained, 10, **mine)
    assert "| advantage estimator | `mine.py:Best` |\n" in card
    assert "| policy loss | `mine.py:Gspo` |\n" in card
    assert "somewhere" not in card


def test_metrics_are_those_up_to_the_checkpoint(trained: Path) -> None:
    assert "| | before | after step 10 |\n|---|---:|---:|\n| score | 0.25 | 0.5 |" in card_of(trained, 10)
    earlier = card_of(trained, 5)
    assert "| | before | after step 5 |" in earlier
    assert "| score | 0.25 | 0.75 |\n| lookup/score | 0.125 | – |" in earlier
    assert "lookup/cost" not in earlier
    assert "| score | 0.25 | – |" in card_of(trained, 0)


def test_a_run_without_validation_says_so(trained: Path, tmp_path: Path) -> None:
    config = load_config(trained / "config.toml")
    found = load(trained / "checkpoints" / "step-000010")
    card = model_card(config, found, tmp_path, dtype="float32", saved_in="float32")
    assert "The run was not validated on held-out tasks." in card
    assert "| weights | float32 |" in card


def test_the_front_matter_is_valid(trained: Path) -> None:
    head = yaml.safe_load(card_of(trained, 10).split("---\n")[1])
    assert head["library_name"] == "transformers"
    assert "base_model" not in head
    assert "license" not in head
    named = card_of(trained, 10, model={"path": "owner/model-1.5B"})
    assert yaml.safe_load(named.split("---\n")[1])["base_model"] == "owner/model-1.5B"
    assert "| base model | `owner/model-1.5B` |" in named
    assert "| base model | `taught` |" in card_of(trained, 10, model={"path": "/somewhere/private/taught"})


def test_several_rewards_and_objects_given_in_python(trained: Path) -> None:
    parts = [{"function": "toolwise.rewards.library.rlla:rlla", "weight": 0.5}, {"function": "a/b.py:c"}]
    both = card_of(trained, 10, reward={"function": "", "parts": parts, "combine": "normalize"})
    assert (
        "| reward | 0.5 × `toolwise.rewards.library.rlla:rlla` + 1 × `b.py:c`, each normalised in its group |" in both
    )
    python = card_of(trained, 10, reward={"function": ""}, data={"train": None, "val": None}, tools=[])
    assert "| reward | given in Python |" in python
    assert "| training data | given in Python |" in python
    assert "| tools |" not in python
    assert "| held-out data |" not in python


def test_adapters_that_were_merged_are_named(trained: Path) -> None:
    assert "| LoRA |" not in card_of(trained, 10)
    card = card_of(trained, 10, actor={"lora": {"rank": 8, "alpha": 16.0}})
    assert "| LoRA | adapters of rank 8 (alpha 16), merged into the weights |" in card


def test_a_model_of_an_agent_of_one_s_own_says_so(trained: Path) -> None:
    own = {"agent": {"run": "/somewhere/mine.py:run"}, "tools": []}
    card = card_of(trained, 10, **own)
    assert "| agent | `mine.py:run` |\n" in card
    assert "trained inside an agent with a loop and tools of its own, which are not part of this folder" in card
    assert "inside an agent" not in card_of(trained, 10)
