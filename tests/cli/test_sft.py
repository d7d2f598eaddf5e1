"""`toolwise sft`: conversations in, a model out that reproduces them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUESTION, ANSWER = "What is the password?", "Answer: swordfish"


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, cli: Callable[..., Any]) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("sft")
    row = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 4, encoding="utf-8")
    sizes = ("--steps", 25, "--lr", 3e-3, "--batch-tokens", 256, "--row-tokens", 128)
    ended = cli("sft", folder / "chats.jsonl", "--out", folder / "taught", *sizes)
    assert ended.status == 0, ended.err
    return folder / "taught", ended.out


def test_the_loss_falls_and_is_told(taught: tuple[Path, str]) -> None:
    folder, told = taught
    found = re.search(r"loss (\S+) → (\S+) over 25 steps", told)
    assert found is not None
    assert float(found[2]) < 0.2 * float(found[1])
    assert str(folder) in told


def test_the_model_loads_and_says_what_it_was_taught(taught: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = taught
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    said = model.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True).strip() == ANSWER


def test_a_run_can_begin_with_it(
    taught: tuple[Path, str], tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    ended = cli("train", make_config(tmp_path), "--dry-run", "--set", f"model.path={taught[0]}")
    assert ended.status == 0, ended.err


def test_an_option_out_of_range_is_refused(tmp_path: Path, cli: Callable[..., Any]) -> None:
    ended = cli("sft", tmp_path / "chats.jsonl", "--out", tmp_path / "taught", "--steps", 0)
    assert ended.status == 2
    assert "--steps" in ended.err
