"""Chat templates as published models ship them, read from TRL's package, over the tokenizer that ships with Toolwise.

Each template gets the control tokens it names as special tokens, as its own tokenizer has them.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from toolwise.models import BUILTIN
from toolwise.rollout.chat_tokenizer import ChatTokenizer

TOKENS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "deepseek": ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    "diffusion_gemma": ("<eos>", "<bos>"),
    "gemma": ("<eos>", "<bos>"),
    "glm": ("<|endoftext|>", None),
    "gptoss": ("<|return|>", "<|startoftext|>"),
    "idefics": ("<end_of_utterance>", "<|begin_of_text|>"),
    "lfm2": ("<|im_end|>", "<|startoftext|>"),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>"),
    "llava": ("</s>", "<s>"),
    "muse": ("<|eot|>", None),
    "nemotron": ("<|im_end|>", None),
    "phi3": ("<|endoftext|>", "<s>"),
    "qwen": ("<|im_end|>", None),
    "smolvlm": ("<end_of_utterance>", "<|im_start|>"),
}
"""eos and bos of the tokenizers, by the start of a template's name."""
STOPS = {
    "diffusion_gemma": {"<eos>", "<turn|>", "<|tool_response>"},
    "gemma4_v2": {"<eos>", "<turn|>"},
    "gemma4": {"<eos>", "<turn|>", "<|tool_response>"},
    "gemma": {"<eos>", "<end_of_turn>"},
    "glm": {"<|endoftext|>", "<|user|>", "<|observation|>"},
    "gptoss": {"<|return|>", "<|call|>"},
    "phi3": {"<|endoftext|>", "<|end|>"},
}
"""Where generation must stop, if that is not eos alone: found in the models' own generation settings and formats."""
_CONTROL = re.compile(
    r"<\|[^<>|\s'\"{}]+\|>|<｜[^<>\s'\"{}]+?｜>|<(?:start|end)_of_[a-z]+>|<(?:bos|eos)>|</?s>|\[/?[A-Z_]+\]"
    r"|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"
)


def _folder() -> Path:
    """Without importing TRL, which takes seconds."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "TRL is not installed: make test installs it (pip install trl)"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def names() -> list[str]:
    """Templates as their models ship them; TRL's own variants for training end in _training."""
    return sorted(file.stem for file in _folder().glob("*.jinja") if not file.stem.endswith("_training"))


@cache
def source(name: str) -> str:
    return (_folder() / f"{name}.jinja").read_text(encoding="utf-8")


def by_prefix(table: dict[str, Any], name: str) -> Any:
    return next((value for prefix, value in table.items() if name.startswith(prefix)), None)


def expected_stops(name: str) -> set[str]:
    return by_prefix(STOPS, name) or {by_prefix(TOKENS, name)[0]}


@cache
def published(name: str) -> ChatTokenizer:
    return ChatTokenizer(tokenizer(name))


def tokenizer(name: str) -> Any:
    eos, bos = by_prefix(TOKENS, name)
    texts = {*_CONTROL.findall(source(name)), eos, *([bos] if bos else [])}
    loaded = AutoTokenizer.from_pretrained(BUILTIN / "small")
    added = [AddedToken(text, special=True, normalized=False) for text in sorted(texts)]
    loaded.add_special_tokens({"additional_special_tokens": added})
    loaded.eos_token = eos
    if bos:
        loaded.bos_token = bos
    loaded.chat_template = source(name)
    loaded.name_or_path = name
    return loaded
