"""Folders whose files describe impossible models: a one-line error, before memory or time is spent."""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import ModelError
from toolwise.models import BUILTIN, load_model
from toolwise.models.sizes import check_sizes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))


def refused(folder: Path) -> str:
    """The error: one line, immediately, and without using memory."""
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), device="cpu")
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB; the first load imports torch
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_size −1": ({"hidden_size": -1}, "hidden_size is -1, not a whole number"),
    "hidden_size 0": ({"hidden_size": 0}, "hidden_size is 0"),
    "hidden_size 10^12": ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
    "hidden_size of 400 digits": ({"hidden_size": 10**400}, "hidden_size is 1000"),
    "hidden_size 10^6": ({"hidden_size": 10**6}, "more than all the weights in the folder"),
    "hidden_size in words": ({"hidden_size": "many"}, "hidden_size is 'many'"),
    "hidden_size true": ({"hidden_size": True}, "hidden_size is True"),
    "hidden_size in a list": ({"hidden_size": [64, "x"]}, "hidden_size is 'x'"),
    "hidden_size NaN": ({"hidden_size": float("nan")}, "hidden_size is nan"),
    "hidden_size in an object": ({"hidden_size": {}}, "hidden_size is {}"),
    "vocab_size 10^12": ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    "vocab_size 10^8": ({"vocab_size": 10**8}, "more than all the weights in the folder"),
    "intermediate_size 10^7": ({"intermediate_size": 10**7}, "more than all the weights in the folder"),
    "10^9 layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "3,000 layers": ({"num_hidden_layers": 3_000}, "3000 layers but only"),
    "layers 1.5": ({"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
    "heads that do not divide": ({"num_attention_heads": 7, "head_dim": None}, "not divisible by 7 heads"),
    "key heads that do not divide": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "not divisible by 3 key-value heads",
    ),
    "10^9 heads": ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000"),
    "head_dim 10^9": ({"head_dim": 10**9}, "head_dim is 1000000000"),
    "rms_norm_eps NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "rms_norm_eps in words": ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    "rope_theta without end": ({"rope_theta": float("inf")}, "rope_theta is inf"),
    "a context of 10^15": ({"max_position_embeddings": 10**15}, "max_position_embeddings is"),
    "a part of a model": ({"text_config": {"vocab_size": -1}}, "text_config.vocab_size is -1"),
    "no kind": ({"model_type": None}, "has no model_type"),
    "a kind that is a number": ({"model_type": 7}, "has no model_type"),
    "a kind that nobody knows": ({"model_type": "none-such"}, "cannot be loaded"),
    "an activation that nobody knows": ({"hidden_act": "none-such"}, "cannot be loaded"),
    "a number format that nobody knows": ({"dtype": "float9"}, "cannot be loaded"),
}


@pytest.mark.parametrize(("changes", "said"), ABSURD.values(), ids=ABSURD)
def test_absurd_sizes(folder: Path, changes: dict[str, Any], said: str) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    assert said in refused(folder)


DAMAGED = {
    "a list": "[]",
    "a word": '"llama"',
    "nothing": "",
    "100,000 brackets": "[" * 100_000,
    "100,000 objects": '{"a":' * 100_000,
    "zero bytes": "\x00" * 100,
}


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_damaged_settings(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    assert name in refused(folder)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("config.json", 1 << 30),
        ("tokenizer_config.json", 1 << 30),
        ("tokenizer.json", 1 << 33),
        ("chat_template.jinja", 1 << 24),
    ],
)
def test_files_of_gigabytes_are_not_read(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)  # sparse: takes no disk space
    assert f"{name} has {size} bytes" in refused(folder)


TOKENIZERS = {
    "nothing": "",
    "an empty object": "{}",
    "a list": "[]",
    "100,000 brackets": "[" * 100_000,
    "a model that nobody knows": '{"version": "1.0", "model": {"type": "None", "vocab": {}}}',
    "merges of tokens that are not there": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}',
    "a vocabulary of words": '{"model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}',
    "an id of 2^70": '{"model": {"type": "BPE", "vocab": {"a": 1180591620717411303424}, "merges": []}}',
    "a negative id": '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
}


@pytest.mark.parametrize("text", TOKENIZERS.values(), ids=TOKENIZERS)
def test_damaged_tokenizers(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    assert "cannot be loaded" in refused(folder)


def test_weights_of_few_bits_and_parts_without_sizes_are_let_through() -> None:
    packed = {"embed": (1000, 2), "head": (1000, 2)}
    check_sizes({"vocab_size": 1000, "hidden_size": 64, "time_step_limit": [0.0, float("inf")]}, "x", packed)
    check_sizes({"quantization_config": {"bits": 4}, "num_key_value_heads": [4, 2]}, "x", packed)
    check_sizes({"hidden_size": 8192, "vocab_size": 256_000, "num_hidden_layers": 126}, "owner/name", None)
