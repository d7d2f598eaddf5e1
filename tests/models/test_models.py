"""Loading models: a folder, a hub name, or the built-in one; and the errors for anything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolwise.errors import ModelError
from toolwise.messages import Message
from toolwise.models import BUILTIN, load_model, locate
from toolwise.rollout.chat_tokenizer import ChatTokenizer

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))


def test_the_model_that_ships_loads_ready_to_use() -> None:
    model, chat = load_model("builtin:small", device="cpu")
    assert isinstance(chat, ChatTokenizer)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    assert model.config.vocab_size >= len(chat.tokenizer)
    ids = chat.start([Message(role="user", content="What is 3 + 4?")])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits
    assert torch.isfinite(logits).all()
    assert chat.pad_id != chat.end_id


def test_two_loads_share_nothing() -> None:
    one, two = load_model("builtin:small", device="cpu")[0], load_model("builtin:small", device="cpu")[0]
    with torch.no_grad():
        next(one.parameters()).zero_()
    assert next(two.parameters()).abs().sum() > 0


def test_a_folder_and_the_built_in_it_was_copied_from_are_the_same_model(folder: Path) -> None:
    one, two = load_model(str(folder), device="cpu")[0], load_model("builtin:small", device="cpu")[0]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_model_loads_in_the_precision_asked_for(folder: Path) -> None:
    model, _ = load_model(str(folder), device="cpu", dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16


def test_places(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("builtin:small") == str(BUILTIN / "small")
    assert locate(str(folder)) == str(folder)
    monkeypatch.chdir(tmp_path)
    assert locate("mine") == "mine"


@pytest.mark.parametrize("path", ["./nothing", "/nowhere/at/all", "~/nothing-here", "nothing", "a/b/c", ".."])
def test_what_looks_like_a_folder_must_be_one(path: str) -> None:
    with pytest.raises(ModelError):
        locate(path)


def test_an_unknown_built_in_is_told_with_what_there_is() -> None:
    with pytest.raises(ModelError, match="no built-in model 'big'; available: builtin:small"):
        locate("builtin:big")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", r"has no \*.safetensors"),
    ],
)
def test_a_folder_without_what_a_model_needs(folder: Path, missing: str, said: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelError, match=said):
        locate(str(folder))


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        locate(str(folder))


def test_a_damaged_configuration(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [', encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        load_model(str(folder), device="cpu")


def test_damaged_weights_are_told_in_one_line(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_model_without_a_chat_template_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ModelError, match="no chat template"):
        load_model(str(folder), device="cpu")


def test_a_device_that_is_not_there_is_told_in_one_line() -> None:
    with pytest.raises(ModelError, match="cannot be loaded") as caught:
        load_model("builtin:small", device="quantum")
    assert "\n" not in str(caught.value)


def test_weights_that_are_missing_are_told_and_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder), device="cpu")


def test_a_template_of_ones_own_replaces_the_models(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ greeting }}{% endif %}",
        encoding="utf-8",
    )
    _, chat = load_model(str(folder), device="cpu", chat_template=template, template_kwargs={"greeting": "assistant: "})
    text = chat.tokenizer.decode(chat.start([Message(role="user", content="hm")]))
    assert text == "<|user|>user: hm<|end|><|assistant|>assistant: "
    with pytest.raises(ModelError, match="does not read greting"):
        load_model(str(folder), device="cpu", chat_template=template, template_kwargs={"greting": "hi"})
    with pytest.raises(ModelError, match=r"model\.chat_template: there is no file"):
        load_model(str(folder), device="cpu", chat_template=tmp_path / "none.jinja")


def test_the_models_own_settings_name_more_stop_tokens(folder: Path) -> None:
    _, plain = load_model(str(folder), device="cpu")
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    other = plain.tokenizer.convert_tokens_to_ids("<|user|>")
    settings["eos_token_id"] = [plain.end_id, other]
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    _, chat = load_model(str(folder), device="cpu")
    assert (chat.end_id, set(chat.stop_ids)) == (plain.end_id, {plain.end_id, other})
