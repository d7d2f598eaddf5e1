"""Locates a model and validates its folder before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.models.hub import download
from toolwise.models.sizes import check_sizes

BUILTIN = Path(__file__).parent
MAX_CONFIG_BYTES = 20_000_000
"""Limit for config.json and the small files beside it; the largest published ones have a hundredth of this."""
MAX_TOKENIZER_BYTES = 500_000_000
MAX_TEMPLATE_BYTES = 1_000_000
OTHER_HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")
"""Ends of the names of models that cannot generate."""


def locate(path: str, revision: str = "") -> str:
    """The checked folder of a model. A path that looks like a folder must be one; anything else is the name of a
    repository on a hub, which is downloaded unless it is in the local cache."""
    if path.startswith("builtin:"):
        name = path.removeprefix("builtin:")
        folder = BUILTIN / name
        if not (folder / "config.json").is_file():
            known = ", ".join(f"builtin:{p.parent.name}" for p in sorted(BUILTIN.glob("*/config.json")))
            raise ModelError(f"there is no built-in model {name!r}; available: {known}")
        return str(folder)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if revision:
            raise ModelError(f"model.revision is {revision!r}, but {path} is a folder, which has none: remove it")
        check_folder(folder)
        return str(folder)
    if not is_hub_name(path):
        raise ModelError(
            f"model.path: there is no folder {path!r}; give a folder, owner/name on a hub, or builtin:small"
        )
    folder = download(path, revision)
    check_folder(folder)
    return str(folder)


def is_hub_name(path: str) -> bool:
    """Whether a path that is not a folder names a repository on a hub."""
    return not Path(path).is_absolute() and not path.startswith((".", "~", "builtin:")) and path.count("/") == 1


def is_adapters(folder: Path) -> bool:
    """Whether a folder holds LoRA adapters without their base model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def check_folder(folder: Path) -> None:
    """Raise ModelError if the folder is not a model, or if its files describe an impossible one."""
    if is_adapters(folder):
        return _check_adapters(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is not a model folder in Hugging Face format")
    config = read_json_object(folder / "config.json")
    if not isinstance(config.get("model_type"), str) and "auto_map" not in config:
        raise ModelError(f"{folder / 'config.json'} has no model_type: it does not say what kind of model it is")
    _check_kind(folder, config)
    if not [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        raise ModelError(
            f"{folder} has no *.safetensors: save the model with save_pretrained (pickled weights are refused)"
        )
    for index in folder.glob("*.safetensors.index.json"):
        shards = read_json_object(index).get("weight_map")
        files = {str(file) for file in shards.values()} if isinstance(shards, dict) else set()
        odd = sorted(file for file in files if not re.fullmatch(r"[\w.-]{1,200}\.safetensors", file, re.ASCII))
        if odd:
            raise ModelError(f"{index} names {odd[0]!r:.80}, which is not a *.safetensors file in its folder")
        missing = sorted(file for file in files if not (folder / file).is_file())
        if missing:
            raise ModelError(f"{folder} lacks {missing[0]}, which {index.name} names: copy the whole model again")
    check_sizes(config, folder / "config.json", _tensor_shapes(folder))
    return _check_tokenizer(folder)


def _check_adapters(folder: Path) -> None:
    if read_json_object(folder / "adapter_config.json").get("peft_type") != "LORA":
        raise ModelError(f"{folder} holds adapters that are not LoRA: merge them into their model and save that")
    if not (folder / "adapter_model.safetensors").is_file():
        raise ModelError(f"{folder} has no adapter_model.safetensors: copy the adapters again")
    _tensor_shapes(folder)
    _check_tokenizer(folder)


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    named = config.get("architectures")
    architectures = [str(name) for name in (named if isinstance(named, list) else [named])]
    kind = next((name for name in architectures if name.endswith(OTHER_HEADS)), "")
    if config.get("is_encoder_decoder"):
        kind = "an encoder-decoder model"
    if kind:
        raise ModelError(f"{folder} holds {kind}: Toolwise trains decoder-only language models (…ForCausalLM)")


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


def read_eos_ids(folder: Path) -> list[Any]:
    """Where the model's own settings stop generation: anything, though it should be ids that the tokenizer has."""
    for file in ("generation_config.json", "config.json"):
        ids = read_json_object(folder / file).get("eos_token_id") if (folder / file).is_file() else None
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []


def read_template(path: Path) -> str:
    """A chat template given by the user (`model.chat_template`)."""
    if not path.is_file():
        raise ModelError(f"model.chat_template: there is no file {path}; give a Jinja template, such as chat.jinja")
    _check_file_size(path, MAX_TEMPLATE_BYTES)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as fault:
        raise ModelError(f"model.chat_template: {path} is not UTF-8 text ({fault}): save it as UTF-8") from fault
    if not text.strip():
        raise ModelError(f"model.chat_template: {path} is empty: give a Jinja template")
    return text


def _check_file_size(path: Path, max_bytes: int) -> None:
    try:
        size = path.stat().st_size
    except OSError as fault:
        raise ModelError(f"{path} cannot be read ({fault.strerror}): copy the model again") from fault
    if size > max_bytes:
        raise ModelError(f"{path} has {size} bytes, more than the limit of {max_bytes} for such a file: it is damaged")


def first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
