"""The RLLA recipe in examples/rlla: its settings load, its intervals are right, and its commands run."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import tokenizer

from toolwise.config.schema import load_config
from toolwise.config.sft import load_sft_config
from toolwise.data.prepare import prepare_rlla
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.tokens import TokenBuffer
from toolwise.training.sft_data import read_conversations, tokenize
from toolwise.training.tasks import load_split

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "rlla"
FIXTURES = ROOT / "tests" / "fixtures"


def recipe() -> Any:
    spec = spec_from_file_location("recipe", RECIPE / "recipe.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_settings_load() -> None:
    assert load_sft_config(RECIPE / "sft.toml").steps == 70
    assert load_config(RECIPE / "grpo.toml").rollout.n == 8


def test_its_intervals_are_student_s() -> None:
    # Mean 3, deviation √2.5, five values: t(4) = 2.776 times √2.5 / √5.
    found = recipe().interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == 3.0
    assert math.isclose(found["half_width"], 2.776 * math.sqrt(0.5), rel_tol=2e-3)
    assert math.isnan(recipe().interval([1.0])["half_width"])


def test_sft_trains_on_the_tokens_of_a_rollout_that_replies_as_demonstrated(tmp_path: Path) -> None:
    demonstrations = json.loads((FIXTURES / "rlla_sft.json").read_text(encoding="utf-8"))[:12]
    source = tmp_path / "rlla_sft.json"
    source.write_text(json.dumps(demonstrations), encoding="utf-8")
    prepare_rlla(source, tmp_path / "train.parquet")
    recipe().write_conversations(source, tmp_path / "sft.jsonl")
    grpo = load_config(RECIPE / "grpo.toml", [f"data.train={tmp_path / 'train.parquet'}"])
    sft = load_sft_config(RECIPE / "sft.toml", [f"data.train={tmp_path / 'sft.jsonl'}", "row_tokens=100000"])
    stored = tokenizer("chatml")
    stored.chat_template = (FIXTURES / "templates" / "smollm2.jinja").read_text(encoding="utf-8")
    chat = ChatTokenizer(stored)
    conversations, _ = read_conversations(sft, None, None)
    taught = tokenize(sft, chat, conversations).rows
    for row, task, demonstration in zip(taught, load_split(grpo, "train"), demonstrations, strict=True):
        prompt = TokenBuffer(chat).prompt(task.prompt)
        reply = [*stored.encode(demonstration["output"], add_special_tokens=False), chat.end_id]
        assert row.ids.tolist() == [*prompt, *reply]
        assert row.loss_mask.tolist() == [False] * len(prompt) + [True] * len(reply)
    assert (len(taught), chat.end_text) == (12, "<|im_end|>")


@pytest.mark.long
def test_it_runs_from_published_rows_to_results(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(FIXTURES / "rlla_sft.json", source)
    shutil.copy(FIXTURES / "rlla_test.parquet", source / "test.parquet")
    model = ROOT / "src" / "toolwise" / "models" / "small"
    # Rewards of a model that has not seen RLLA are all equal: the length of a reply makes them differ.
    quick = [
        "--sft-set", "steps=2", "--sft-set", "batch_tokens=4096", "--set", "trainer.total_steps=1",
        "--set", "data.batch_size=2", "--set", "rollout.n=4", "--set", "rollout.max_new_tokens=48",
        "--set", "data.val_limit=4", "--set", "reward.function=toolwise.rewards.library.shaping:length_reward",
        "--set", "reward.kwargs={low_words = 40}", "--set", "algorithm.zero_std_groups=keep",
    ]  # fmt: skip
    command = [sys.executable, RECIPE / "recipe.py", source, model, "--out", tmp_path / "out", "--seeds", "0", "1"]
    done = subprocess.run([*map(str, command), *quick], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert [seed["seed"] for seed in results["seeds"]] == [0, 1]
    assert math.isfinite(results["score"]["gain"]["half_width"])
