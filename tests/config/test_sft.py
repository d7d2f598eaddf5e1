"""The configuration of `toolwise sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from setting_keys import setting_keys

from toolwise.config.loader import to_toml
from toolwise.config.schema import load_config
from toolwise.config.sft import (
    MUTABLE_SFT_SETTINGS,
    SHORT_NAMES,
    SftConfig,
    build_sft_config,
    is_sft_config,
    load_sft_config,
)
from toolwise.errors import ConfigError


def test_short_names_and_mutable_settings_exist() -> None:
    assert set(setting_keys(SftConfig)) >= {*SHORT_NAMES.values(), *MUTABLE_SFT_SETTINGS}
    assert not SHORT_NAMES.keys() & SftConfig.model_fields.keys()


def test_what_decides_which_tokens_a_step_sees_never_changes() -> None:
    decisive = {"seed", "batch_tokens", "row_tokens", "too_long", "data.train", "data.val", "data.val_fraction"}
    decisive |= {"model.path", "model.chat_template", "model.dtype", "lora.rank", "rollout.tool_prompt"}
    assert decisive <= set(setting_keys(SftConfig))
    assert not decisive & MUTABLE_SFT_SETTINGS


def test_paths_in_a_file_are_relative_to_it_and_others_are_not(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[data]\ntrain = "a.jsonl"\nval = "b.jsonl"\n')
    config = load_sft_config(file, ["data.val=c.jsonl"])
    assert (config.data.train, config.data.val) == (tmp_path / "a.jsonl", Path("c.jsonl"))


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = build_sft_config({"lr": 1e-3}, {"lora_rank": 4, "dtype": "bfloat16", "epochs": 2.0}, source="x")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert load_sft_config(file) == config
    assert is_sft_config(file)
    with pytest.raises(ConfigError, match="is a configuration of `toolwise sft`"):
        load_config(file)


def test_given_steps_replace_the_epochs_of_a_file() -> None:
    assert build_sft_config({"epochs": 3}, {"steps": 5}, source="x").epochs is None
    overridden = build_sft_config({"epochs": 3}, {}, ["steps=5"], source="x")
    assert (overridden.steps, overridden.epochs) == (5, None)


def test_given_epochs_replace_the_steps_of_a_file() -> None:
    assert build_sft_config({"steps": 5}, {"epochs": 2}, source="x").epochs == 2
    assert build_sft_config({"steps": 5}, {}, ["epochs=2"], source="x").epochs == 2


@pytest.mark.parametrize(
    ("file", "changes", "overrides"),
    [
        ({"steps": 5, "epochs": 2}, {}, []),
        ({}, {"steps": 5, "epochs": 2}, []),
        ({}, {"epochs": 2}, ["steps=5"]),
        ({"epochs": 3}, {}, ["steps=5", "epochs=2"]),
    ],
)
def test_steps_and_epochs_are_not_given_together(
    file: dict[str, Any], changes: dict[str, Any], overrides: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"x: steps = 5 and epochs = 2 are both given.*: give one of them"):
        build_sft_config(file, changes, overrides, source="x")


def test_changes_are_merged_into_tables() -> None:
    config = build_sft_config({"data": {"train": "a"}}, {"data": {"val": "b"}, "model": {"path": "m"}}, source="x")
    assert (config.data.train, config.data.val, config.model.path) == (Path("a"), Path("b"), "m")
    with pytest.raises(ConfigError, match="x: `lora` must be a table"):
        build_sft_config({"lora": 3}, {"lora_rank": 4}, source="x")


def test_only_one_kind_of_held_out_data() -> None:
    with pytest.raises(ConfigError, match="set only one of val and val_fraction"):
        build_sft_config({}, {"val": "a.jsonl", "val_fraction": 0.1}, source="x")
