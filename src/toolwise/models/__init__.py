"""Loading models: a folder, a hub name, or the small one that ships with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.rollout.chat import ChatTokenizer

BUILTIN = Path(__file__).parent


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
        _check_folder(folder)
        return str(folder)
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model.path: there is no folder {path!r}; give a folder, owner/name on a hub, or builtin:small"
        )
    return path


def _check_folder(folder: Path) -> None:
    from safetensors import SafetensorError, safe_open

    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} has no config.json: it is no model folder in Hugging Face's form")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ModelError(f"{config} is not JSON ({fault}): the model folder is damaged") from fault
    if not [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        raise ModelError(
            f"{folder} has no *.safetensors: save the model with save_pretrained (pickled weights are refused)"
        )
    for weights in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(weights, framework="np"):
                continue
        except (SafetensorError, OSError) as fault:
            raise ModelError(f"{weights} cannot be loaded ({fault}): it is damaged, copy the model again") from fault
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json: save the tokenizer beside the model")


def load_model(path: str, *, device: str = "auto", dtype: str = "float32") -> tuple[Any, ChatTokenizer]:
    """The model, ready to generate and to be trained, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    place = locate(path)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
        model, told = AutoModelForCausalLM.from_pretrained(
            place, dtype=getattr(torch, dtype), use_safetensors=True, output_loading_info=True
        )
        model = model.to(device)
    except Exception as fault:  # transformers raises all sorts; the person needs the folder and the reason
        reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
        raise ModelError(f"the model {path!r} cannot be loaded: {reason}") from fault
    missing = sorted(told["missing_keys"])
    if missing:  # transformers would make them up at random and go on
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the model {path!r} lacks the weights {missing[0]}{more}: its folder is damaged")
    return model.eval(), ChatTokenizer(tokenizer)
