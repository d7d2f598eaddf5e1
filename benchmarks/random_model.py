"""Writes a model folder with random weights of one of the shapes, and a tokenizer whose tokens are a few letters each.

A random model samples all of its vocabulary, so every entry of the tokenizer is text: a stream then has as much to say
as that of a trained model.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from shapes import GROUPED_1_6B, SHAPES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STAND_IN = SHAPES["0.1m"] | {"vocab_size": SHAPES["1.6b"]["vocab_size"]}
"""Hardly any model, with the tokenizer of a larger one."""
MODELS = SHAPES | {"1.6b": GROUPED_1_6B, "stand-in": STAND_IN}
CONTROL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|' + message.role + '|>' + (message.content or '') + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
MAX_CONTEXT = 8192


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `vocabulary` tokens: bytes, then words of two to four letters, then words after a space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [
        ("".join(letters[:-1]), letters[-1]) for size in (2, 3, 4) for letters in product(ascii_lowercase, repeat=size)
    ]
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level BPE writes a space
    room = vocabulary - len(alphabet) - len(CONTROL)
    merges = [(space, letter) for letter in ascii_lowercase] + words
    merges = merges[: max(0, room)]
    entries = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(entries)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
        extra_special_tokens=CONTROL[2:],
    )


def make_folder(folder: Path, shape: str, device: str, dtype: str) -> None:
    settings: dict[str, Any] = dict(MODELS[shape])
    tokenizer = make_tokenizer(settings["vocab_size"])
    assert len(tokenizer) == settings["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        **settings,
        max_position_embeddings=MAX_CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
