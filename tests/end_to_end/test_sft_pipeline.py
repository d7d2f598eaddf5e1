"""From conversations to an exported agent with the model that ships: sft, then train on its result, then export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_world_teacher import conversations

from toolwise.data.files import write_rows

torch.set_num_threads(1)


def test_a_model_is_taught_trained_and_exported(
    tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_rows(conversations(24, seed=4), tmp_path / "chats.jsonl")
    taught, run, exported = (tmp_path / name for name in ("taught", "run", "exported"))
    sizes = ("--steps", 3, "--batch-tokens", 512, "--val-fraction", 0.2, "--val-every", 2, "--lr", 1e-4)
    ended = cli("sft", "builtin:small", tmp_path / "chats.jsonl", "--out", taught, *sizes)
    assert ended.status == 0, ended.err
    config = make_config(tmp_path, {"reward": {"sandbox": {"tier": "off"}}})
    ended = cli("train", config, "--set", f"model.path={taught}", "--set", "trainer.total_steps=1", "--out", run)
    assert ended.status == 0, ended.err
    ended = cli("export", run, "--out", exported)
    assert ended.status == 0, ended.err
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    start = AutoModelForCausalLM.from_pretrained(taught)
    gaps = [(a - b).abs().max().item() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert max(gaps) < 1e-2  # one step away from the taught model, not from another one
    assert tokenizer.chat_template
