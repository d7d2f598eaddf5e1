"""Decoding by table gives what the tokenizer gives."""

from __future__ import annotations

import random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from toolwise.rollout.byte_level import byte_level_decode


def byte_level(*added: str) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def test_any_tokens_decode_as_the_tokenizer_decodes_them() -> None:
    tokenizer, drawn = byte_level("<|end|>", "a b", "日本", "café"), random.Random(0)
    decode = byte_level_decode(tokenizer)
    assert decode is not None
    size = tokenizer.get_vocab_size()
    assert size == 260
    for _ in range(2000):
        ids = [drawn.randrange(size + 5) for _ in range(drawn.randrange(12))]
        assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_characters_of_several_tokens_are_whole() -> None:
    tokenizer = byte_level()
    decode = byte_level_decode(tokenizer)
    assert decode is not None
    text = "€ and 🦀"
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    ids = [tokenizer.token_to_id(character) for piece, _ in pieces for character in piece]
    assert decode(ids) == text
    assert decode(ids[:2]) == tokenizer.decode(ids[:2]) == "\N{REPLACEMENT CHARACTER}"


def test_other_decoders_are_left_alone() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.Metaspace()
    assert byte_level_decode(tokenizer) is None
    tokenizer.decoder = None
    assert byte_level_decode(tokenizer) is None
