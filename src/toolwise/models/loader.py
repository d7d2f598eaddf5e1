"""Loads models from a folder, from a hub by name, or the small one that ships with the package."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from toolwise.errors import ModelError
from toolwise.models.folder import first_line, locate
from toolwise.models.remote_code import check_hub_kernels, remote_code_error, warn_remote_code
from toolwise.models.sizes import check_sizes
from toolwise.rollout.chat_tokenizer import ChatTokenizer


def load_model(
    path: str, *, device: str = "auto", dtype: str = "float32", trust_remote_code: bool = False
) -> tuple[Any, ChatTokenizer]:
    """Load a model, ready for generation and training, and its tokenizer.

    Python code in the folder runs only with `trust_remote_code`, in this process and with all its permissions.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    location = locate(path)
    if trust_remote_code:
        warn_remote_code(path, location)
    elif Path(location).is_dir():
        check_hub_kernels(path, location)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, tokenizer, report = _load(location, getattr(torch, dtype), trust_remote_code)
        model = model.to(device)
    except ModelError:
        raise
    except BaseException as fault:  # transformers raises many types; the user needs the folder and the reason
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":  # raised by Rust libraries
            raise
        if "trust_remote_code" in str(fault):
            raise remote_code_error(path, location) from fault
        raise ModelError(f"the model {path!r} cannot be loaded: {first_line(fault)}") from fault
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would initialise them at random and continue
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the model {path!r} lacks the weights {missing[0]}{more}: its folder is damaged")
    return model.eval(), ChatTokenizer(tokenizer)


def _load(location: str, dtype: Any, trust_remote_code: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Always passes `trust_remote_code`: without it, transformers asks on standard input."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

    if not Path(location).is_dir():
        with suppress(OSError):  # missing, or adapters only: from_pretrained reports it, or finds their base model
            check_sizes(PretrainedConfig.get_config_dict(location)[0], location, None)
    tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
    model, report = AutoModelForCausalLM.from_pretrained(
        location, dtype=dtype, use_safetensors=True, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    return model, tokenizer, report
