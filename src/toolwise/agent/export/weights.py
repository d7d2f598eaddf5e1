"""The weights of an exported model, in the number format that was asked for."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.serialization.json_text import json_text

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Names of torch's, and those that safetensors has for them."""


def saved_dtype(folder: Path) -> str:
    """What most of the weights in `folder` are saved in."""
    from safetensors import safe_open

    names = {short: long for long, short in DTYPES.items()}
    count: Counter[str] = Counter()
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as weights:
            count.update(weights.get_slice(name).get_dtype() for name in weights.keys())  # noqa: SIM118
    if not count:
        raise ModelError(f"{folder} has no *.safetensors: there are no weights to export")
    kind = count.most_common(1)[0][0]
    if kind not in names:
        raise ModelError(f"the weights in {folder} are {kind}: only {', '.join(DTYPES)} can be exported")
    return names[kind]


def convert(folder: Path, dtype: str) -> None:
    """All weights in `folder` to `dtype`, in place, and its config.json to say so; integers stay as they are."""
    if dtype not in DTYPES:
        raise ModelError(f"--dtype is {dtype!r}: use one of {', '.join(DTYPES)}")
    sizes = [_convert_file(file, dtype) for file in _weight_files(folder)]
    for index in folder.glob("*.safetensors.index.json"):
        told = json.loads(index.read_bytes())
        told.setdefault("metadata", {})["total_size"] = sum(sizes)
        index.write_text(json_text(told, indent=2) + "\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_bytes())
    _set_config_dtype(config, dtype)
    (folder / "config.json").write_text(json_text(config, indent=2) + "\n", encoding="utf-8")


def _weight_files(folder: Path) -> list[Path]:
    """The model's; a router's head beside it stays in fp32 whatever the model is in."""
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name != "router.safetensors"]


def _convert_file(file: Path, dtype: str) -> int:
    """One file after the other: a model may be larger than memory. Gives the bytes of its weights."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    wanted: torch.dtype = getattr(torch, dtype)
    tensors: dict[str, Any] = {}
    with safe_open(file, framework="pt") as weights:
        metadata = weights.metadata() or {"format": "pt"}
        for name in weights.keys():  # noqa: SIM118
            found = weights.get_tensor(name)
            turned = found.to(wanted) if found.is_floating_point() else found
            if (turned.isinf() & found.isfinite()).any():
                most = float(found[found.isfinite()].abs().max())
                raise ModelError(f"{name} holds {most:.4g}, which {dtype} cannot: use --dtype bfloat16")
            tensors[name] = turned
    aside = file.with_name(f"{file.name}.new")
    save_file(tensors, aside, metadata=metadata)
    shutil.copymode(file, aside)  # safetensors makes files that nobody else may read
    aside.replace(file)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _set_config_dtype(config: dict[str, Any], dtype: str) -> None:
    """Under the name it has there; the parts of a larger model say it each for themselves."""
    for name in [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]:
        config[name] = dtype
    for part in config.values():
        if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys():
            _set_config_dtype(part, dtype)
