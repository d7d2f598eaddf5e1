"""A real pretrained model through the engine, beside transformers' `generate`: SmolLM2, if its folder is available.

TOOLWISE_SMOLLM2=FOLDER pytest -m long tests/engine/test_smollm2.py        scripts/make_smollm2.py makes the folder
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
from engine_cases import assert_forced, assert_greedy, counted, generate_all, greedily, reference

from toolwise.models import load_model

FOLDER = os.environ.get("TOOLWISE_SMOLLM2", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not FOLDER, reason="TOOLWISE_SMOLLM2 names no folder: scripts/make_smollm2.py makes it"),
]
NEW = 24
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Add 17 and 25, and say how.",
    "Name three fruits. " * 12,
    "What is the capital of Portugal?",
    "Hi",
]
WAYS: dict[str, dict[str, Any]] = {
    "all together": {},
    "in chunks": {"max_batch_tokens": 23},
    "two at a time": {"max_requests": 2},
    "short of memory": {"blocks": 40},
    "nothing shared": {"prefix_cache": False},
    "to the bit": {"deterministic": True},
    "stock": {"fused": False},
}


@cache
def asked() -> tuple[Any, list[list[int]], list[list[int]]]:
    """The model, the prompts, and the output of transformers."""
    model, chat = load_model(FOLDER, device="cpu")
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    tokenizer = chat.tokenizer
    told = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in told]
    return model, prompts, [reference(model, ids, NEW) for ids in prompts]


@pytest.mark.parametrize("way", WAYS)
def test_greedy_is_what_transformers_generates(way: str) -> None:
    model, prompts, expected = asked()
    engine = counted(model, **WAYS[way])
    found = generate_all(engine, prompts, [greedily(model, NEW)] * len(prompts))
    for ids, result, theirs in zip(prompts, found, expected, strict=True):
        assert_greedy(model, ids, list(result.token_ids), theirs)
        assert_forced(model, ids, result)
    if way == "short of memory":
        assert engine.metrics()["engine/preemptions"] > 0
