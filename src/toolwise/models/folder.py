"""Where a model is, and whether what lies there can be one: found out before any of it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.models.sizes import check_sizes

BUILTIN = Path(__file__).parent
MAX_CONFIG_BYTES = 20_000_000
"""Of config.json and the small files beside it; the largest that are published have one hundredth of it."""
MAX_TOKENIZER_BYTES = 500_000_000
MAX_TEMPLATE_BYTES = 1_000_000


def locate(path: str) -> str:
    """Where a model is. What looks like a folder must be one; anything else is left to the hub."""
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        folder = BUILTIN / name
        if not (folder / "config.json").is_file():
            known = ", ".join(f"builtin:{p.parent.name}" for p in sorted(BUILTIN.glob("*/config.json")))
            raise ModelError(f"there is no built-in model {name!r}; there is: {known}")
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
    """Refuse what is no model, or one whose files say what no model can be."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is no model folder in Hugging Face's form")
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str) and "auto_map" not in config:
        raise ModelError(f"{folder / 'config.json'} has no model_type: it does not say what kind of model it is")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        raise ModelError(
            f"{folder} has no *.safetensors: save the model with save_pretrained (pickled weights are refused)"
        )
    check_sizes(config, folder / "config.json", _tensor_shapes(folder))
    _check_tokenizer(folder)


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file of a model's folder."""
    _check_file_size(path, max_bytes)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise ModelError(f"{path} is not JSON ({_first_line(fault)}): the model folder is damaged") from fault
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object: the model folder is damaged")
    return value


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, from the heads of the files alone."""
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
        raise ModelError(f"{path} has {size} bytes, more than the {max_bytes} that such a file may have: it is damaged")


def _first_line(fault: BaseException) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0]
