"""Folders with adapters alone: they load with their base model, and with no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolwise.config.schema import LoraConfig
from toolwise.errors import ModelError
from toolwise.learner.lora import Adapters, write_adapters
from toolwise.models import BUILTIN, load_chat, load_model, locate
from toolwise.models.adapters import BASE_FILE, find_base, write_base
from toolwise.models.merged_weights import merged_copy

IDS = torch.tensor([[5, 6, 7, 8, 9]])
LORA = LoraConfig(rank=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Adapters of a base model in the folder beside them, and the model that both together are."""
    folder = tmp_path_factory.mktemp("adapters")
    base = shutil.copytree(BUILTIN / "small", folder / "base")
    model, chat = load_model(str(base), device="cpu")
    adapters = Adapters(model, LORA)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05, generator=torch.Generator().manual_seed(1))
    out = folder / "agent"
    out.mkdir()
    write_adapters(out, LORA, adapters.state_dict(), "base")
    chat.tokenizer.save_pretrained(out)
    write_base(out, "base", "", base)
    return out, merged_copy(model)


def copied(trained: tuple[Path, Any], target: Path, *, base: bool = True) -> Path:
    if base:
        shutil.copytree(trained[0].parent / "base", target / "base")
    return shutil.copytree(trained[0], target / "agent")


def test_adapters_load_as_the_model_they_were_trained_in(trained: tuple[Path, Any]) -> None:
    folder, merged = trained
    model, chat = load_model(str(folder), device="cpu")
    assert torch.equal(model(input_ids=IDS).logits, merged(input_ids=IDS).logits)
    plain, own = load_model(str(folder.parent / "base"), device="cpu")
    assert (plain(input_ids=IDS).logits - merged(input_ids=IDS).logits).abs().max() > 1e-2
    assert not any("lora" in name for name, _ in model.named_modules())
    assert chat.stop_ids == own.stop_ids == load_chat(str(folder)).stop_ids


def test_a_base_model_that_is_not_here_is_one_line(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder = copied(trained, tmp_path, base=False)
    assert locate(str(folder)) == str(folder)
    with pytest.raises(ModelError, match=r"for the model 'base', which is not here: .* model\.base=FOLDER") as told:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(told.value)
    given = shutil.copytree(trained[0].parent / "base", tmp_path / "elsewhere")
    load_model(str(folder), device="cpu", base=str(given))


@pytest.mark.parametrize("change", ["weights", "size", "more files"])
def test_another_base_model_is_refused(trained: tuple[Path, Any], tmp_path: Path, change: str) -> None:
    folder = copied(trained, tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    weights = load_file(file)
    if change == "weights":
        weights["model.norm.weight"] += 1
    if change == "size":
        weights["extra"] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})
    if change == "more files":
        shutil.copyfile(trained[0].parent / "base" / "model.safetensors", file)
        save_file({"x": torch.zeros(1)}, tmp_path / "base" / "more.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"base is not the model that the adapters in .*agent belong to") as told:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["../base", "/etc", "sub/sub/base", ""])
def test_a_folder_does_not_choose_which_other_folder_is_read(
    trained: tuple[Path, Any], tmp_path: Path, name: str
) -> None:
    folder = copied(trained, tmp_path)
    record = json.loads((folder / BASE_FILE).read_text()) | {"name": name}
    (folder / BASE_FILE).write_text(json.dumps(record))
    with pytest.raises(ModelError, match="which is not here"):
        find_base(folder)


def test_adapters_of_others_load_with_a_warning(
    trained: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(trained, tmp_path)
    (folder / BASE_FILE).unlink()
    model, _ = load_model(str(folder), device="cpu")
    assert torch.equal(model(input_ids=IDS).logits, trained[1](input_ids=IDS).logits)
    assert "has no checksums of its base model" in caplog.text
    (folder / BASE_FILE).write_text('{"name": 3}')
    with pytest.raises(ModelError, match="does not name a base model"):
        load_model(str(folder), device="cpu")


def test_adapters_on_adapters_and_adapters_that_do_not_fit_are_refused(
    trained: tuple[Path, Any], tmp_path: Path
) -> None:
    folder = copied(trained, tmp_path)
    with pytest.raises(ModelError, match="holds adapters too"):
        find_base(folder, str(folder))
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: weight[:1] for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="do not fit their base model"):
        load_model(str(folder), device="cpu")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors"):
        locate(str(folder))


SLOW = r"((\w|\.)+)+!"


def changed(trained: tuple[Path, Any], target: Path, **fields: Any) -> Path:
    folder = copied(trained, target)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": SLOW},
        {"target_modules": [SLOW]},
        {"exclude_modules": SLOW},
        {"layers_pattern": SLOW},
        {"rank_pattern": {SLOW: 4}},
        {"alpha_pattern": {SLOW: 4}},
    ],
    ids=str,
)
def test_a_pattern_of_modules_is_refused(trained: tuple[Path, Any], tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = changed(trained, tmp_path, **fields)
    with pytest.raises(ModelError, match=f"{next(iter(fields))} is a pattern"):
        load_model(str(folder), device="cpu")


@pytest.mark.parametrize(
    "fields",
    [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"new_in_peft": 1}],
    ids=str,
)
def test_adapters_that_are_more_than_a_product_are_refused(
    trained: tuple[Path, Any], tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = changed(trained, tmp_path, **fields)
    with pytest.raises(ModelError, match=f"{next(iter(fields))} makes other adapters .*merge_and_unload"):
        load_model(str(folder), device="cpu")


def test_ranks_and_scales_of_single_layers_are_used(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder = changed(trained, tmp_path, alpha_pattern={"q_proj": 64}, use_rslora=True)
    model, _ = load_model(str(folder), device="cpu")
    assert (model(input_ids=IDS).logits - trained[1](input_ids=IDS).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", "8"), ("r", 0), ("r", True), ("lora_alpha", [16]), ("lora_dropout", {}), ("use_rslora", 1),
        ("target_modules", 5), ("target_modules", [5]), ("exclude_modules", {"q_proj": 1}),
        ("layers_to_transform", "all"), ("rank_pattern", ["q_proj"]), ("rank_pattern", {"q_proj": "4"}),
        ("alpha_pattern", 3), ("alpha_pattern", {"q_proj": None}),
        ("lora_alpha", 10**400), ("alpha_pattern", {"q_proj": 10**400}), ("lora_dropout", float("nan")),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_field_of_another_type_is_named(trained: tuple[Path, Any], tmp_path: Path, field: str, value: Any) -> None:
    folder = changed(trained, tmp_path, **{field: value})
    with pytest.raises(ModelError, match=rf"adapter_config\.json: {field} must be "):
        load_model(str(folder), device="cpu")


def test_a_revision_that_is_no_text_is_named(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder = changed(trained, tmp_path, revision=3)
    (folder / BASE_FILE).unlink()
    with pytest.raises(ModelError, match="revision must be text, not 3"):
        find_base(folder)
