"""The weights of an exported model: their dtype, and their conversion to another."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.routing.head import ROUTER_WEIGHTS_FILE
from toolwise.serialization.json_text import json_text

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""torch's name -> safetensors' name"""


def saved_dtype(folder: Path) -> str:
    """The dtype of most of the weights in `folder`."""
    from safetensors import safe_open

    names = {short: long for long, short in DTYPES.items()}
    count: Counter[str] = Counter()
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            count.update(weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118
    if not count:
        raise ModelError(f"{folder} has no *.safetensors files: there are no weights to export")
    dtype = count.most_common(1)[0][0]
    if dtype not in names:
        raise ModelError(f"the weights in {folder} are {dtype}: only {', '.join(DTYPES)} can be exported")
    return names[dtype]


def convert(folder: Path, dtype: str) -> None:
    """Converts all weights in `folder` in place, and updates config.json; integer tensors stay as they are."""
    if dtype not in DTYPES:
        raise ModelError(f"--dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    sizes = [_convert_file(file, dtype) for file in weight_files(folder)]
    for index in folder.glob("*.safetensors.index.json"):
        record = json.loads(index.read_bytes())
        record.setdefault("metadata", {})["total_size"] = sum(sizes)
        index.write_text(json_text(record, indent=2) + "\n", encoding="utf-8")
    if (folder / "config.json").is_file():  # adapters have none
        config = json.loads((folder / "config.json").read_bytes())
        _set_config_dtype(config, dtype)
        (folder / "config.json").write_text(json_text(config, indent=2) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """The model's files; a router head next to it stays in fp32."""
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != ROUTER_WEIGHTS_FILE]


def _convert_file(file: Path, dtype: str) -> int:
    """Converts one file (a model may be larger than memory) and returns the size of its weights in bytes."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch_dtype: torch.dtype = getattr(torch, dtype)
    tensors: dict[str, Any] = {}
    with safe_open(file, framework="pt") as weights:
        metadata = weights.metadata() or {"format": "pt"}
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            converted = tensor.to(torch_dtype) if tensor.is_floating_point() else tensor
            if (converted.isinf() & tensor.isfinite()).any():
                largest = float(tensor[tensor.isfinite()].abs().max())
                raise ModelError(f"{name} contains {largest:.4g}, which overflows {dtype}: use --dtype bfloat16")
            tensors[name] = converted
    temporary = file.with_name(f"{file.name}.new")
    save_file(tensors, temporary, metadata=metadata)
    shutil.copymode(file, temporary)  # safetensors creates files that only their owner can read
    temporary.replace(file)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _set_config_dtype(config: dict[str, Any], dtype: str) -> None:
    """Under the key it already has; the parts of a composite model each have their own."""
    for name in [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]:
        config[name] = dtype
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys():
            _set_config_dtype(part, dtype)
