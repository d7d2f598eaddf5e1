"""Conversion of weights: values are rounded, nothing else changes, overflow is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from toolwise.agent.export.weights import convert, saved_dtype
from toolwise.errors import ModelError


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
