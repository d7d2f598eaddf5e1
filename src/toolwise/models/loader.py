"""Loads models from a folder, from a hub by name, or the small one that ships with the package."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolwise.errors import CheckpointError, ModelError
from toolwise.models.adapters import add_adapters, find_base
from toolwise.models.folder import first_line, is_adapters, locate, read_eos_ids, read_template
from toolwise.models.remote_code import check_hub_kernels, remote_code_error, warn_remote_code
from toolwise.rollout.chat_tokenizer import ChatTokenizer

_loading = threading.RLock()
"""Held while transformers builds a model: meanwhile it changes torch for all threads."""


def load_weights(model: Any, folder: Path) -> None:
    """Load what `save_pretrained` wrote into `model`, in place."""
    with _loading:
        saved = type(model).from_pretrained(folder, dtype=model.dtype, use_safetensors=True, trust_remote_code=False)
    try:
        model.load_state_dict(saved.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError(f"{folder} holds a different model from the run's: {reason}") from error


def load_model(
    path: str,
    *,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    revision: str = "",
    base: str = "",
    chat_template: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, ChatTokenizer]:
    """Load a model, ready for generation and training, and its tokenizer; `resolve_dtype` says what "auto" is. A folder
    of LoRA adapters loads as their base model with the adapters merged in; `base` is where that is.

    Python code in the folder runs only with `trust_remote_code`, in this process and with all its permissions.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    location = locate(path, revision)
    weights = str(find_base(Path(location), base)) if is_adapters(Path(location)) else location
    if trust_remote_code:
        warn_remote_code(path, weights)
    else:
        check_hub_kernels(path, weights)
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    with _loading, explained(path, weights):
        tokenizer = _load_tokenizer(location, trust_remote_code)
        model, report = _load(weights, getattr(torch, dtype), trust_remote_code)
        model = model.to(device)
        if weights != location:
            model = add_adapters(model, Path(location))
    prepare_attention(model)
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would initialise them at random and continue
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"the model {path!r} lacks the weights {missing[0]}{more}: its folder is damaged")
    return model.eval(), _chat(tokenizer, weights, chat_template, template_kwargs)


def resolve_device(device: str) -> str:
    """ "auto" is a GPU if there is one."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def resolve_dtype(dtype: str, device: str) -> str:
    """ "auto" is bfloat16 on a GPU, where float32 is many times slower, and float32 on a CPU, where bfloat16 is."""
    if dtype == "auto":
        return "float32" if resolve_device(device).startswith("cpu") else "bfloat16"
    return dtype


def prepare_attention(model: Any) -> None:
    """Choose an implementation of attention that leaves nothing out."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # others leave out the cap of Gemma 2, depending on the version


def load_chat(
    path: str,
    *,
    trust_remote_code: bool = False,
    revision: str = "",
    base: str = "",
    chat_template: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatTokenizer:
    """The tokenizer of a model, with its chat template, without its weights."""
    location = locate(path, revision)
    with explained(path, location):
        tokenizer = _load_tokenizer(location, trust_remote_code)
    if is_adapters(Path(location)):
        location = str(find_base(Path(location), base, verified=False))
    return _chat(tokenizer, location, chat_template, template_kwargs)


def _chat(
    tokenizer: Any, location: str, chat_template: Path | None, template_kwargs: Mapping[str, Any] | None
) -> ChatTokenizer:
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return ChatTokenizer(tokenizer, template_kwargs=template_kwargs, eos_ids=read_eos_ids(Path(location)))


@contextmanager
def explained(path: str, location: str) -> Iterator[None]:
    """Turn the many exceptions of transformers into one that names the model and the reason."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as fault:
        if not isinstance(fault, Exception) and type(fault).__name__ != "PanicException":  # raised by Rust libraries
            raise
        if "trust_remote_code" in str(fault):
            raise remote_code_error(path, location) from fault
        raise ModelError(f"the model {path!r} cannot be loaded: {first_line(fault)}") from fault


def _load_tokenizer(location: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)


def _load(location: str, dtype: Any, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Always passes `trust_remote_code`: without it, transformers asks on standard input."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        location, dtype=dtype, use_safetensors=True, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    return model, report
