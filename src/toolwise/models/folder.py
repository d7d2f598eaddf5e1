"""Locates a model and validates its folder before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.models.sizes import check_sizes

BUILTIN = Path(__file__).parent
MAX_CONFIG_BYTES = 20_000_000
"""Limit for config.json and the small files beside it; the largest published ones have a hundredth of this."""
MAX_TOKENIZER_BYTES = 500_000_000
MAX_TEMPLATE_BYTES = 1_000_000


def locate(path: str) -> str:
    """The folder or hub name of a model. A path that looks like a folder must be one; anything else is a hub name."""
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        folder = BUILTIN / name
        if not (folder / "config.json").is_file():
            known = ", ".join(f"builtin:{p.parent.name}" for p in sorted(BUILTIN.glob("*/config.json")))
            raise ModelError(f"there is no built-in model {name!r}; available: {known}")
        return str(folder)
    folder = Path(path).expanduser()
    if folder.is_dir():
        check_folder(folder)
        return str(folder)
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model.path: there is no folder {path!r}; give a folder, owner/name on a hub, or builtin:small"
        )
    return path


def check_folder(folder: Path) -> None:
    """Raise ModelError if the folder is not a model, or if its files describe an impossible one."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model folder in Hugging Face format")
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str) and "auto_map" not in config:
        raise ModelError(f"{folder / 'config.json'} has no model_type: it does not say what kind of model it is")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        raise ModelError(
            f"{folder} has no *.safetensors: save the model with save_pretrained (pickled weights are refused)"
        )
    check_sizes(config, folder / "config.json", _tensor_shapes(folder))
    _check_tokenizer(folder)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of a model folder."""
    _check_file_size(path, MAX_CONFIG_BYTES)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise ModelError(f"{path} is not JSON ({first_line(fault)}): the model folder is damaged") from fault
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: the model folder is damaged")
    return value


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, read from the file headers only."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as fault:
            raise ModelError(f"{file} cannot be loaded ({fault}): it is damaged, copy the model again") from fault
    return shapes


def _check_tokenizer(folder: Path) -> None:
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    if not any(file.is_file() for file in files):
        raise ModelError(f"{folder} has no tokenizer.json: save the tokenizer beside the model")
    for file in folder.glob("*.json"):
        _check_file_size(
            file, MAX_TOKENIZER_BYTES if file.name in ("tokenizer.json", "vocab.json") else MAX_CONFIG_BYTES
        )
    for file in (*folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja")):
        _check_file_size(file, MAX_TEMPLATE_BYTES)
    if files[1].is_file():
        read_json_object(files[1])


def _check_file_size(path: Path, max_bytes: int) -> None:
    size = path.stat().st_size
    if size > max_bytes:
        raise ModelError(f"{path} has {size} bytes, more than the limit of {max_bytes} for such a file: it is damaged")


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
