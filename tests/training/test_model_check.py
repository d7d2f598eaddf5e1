"""What a run checks about its model before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError, ModelError
from toolwise.models import BUILTIN
from toolwise.tools.catalog import build_tools
from toolwise.training.model_check import check_chat, check_weights, show_prompt
from toolwise.training.rollout_setup import local_policy


def test_the_chat_is_checked_without_the_weights(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    with pytest.raises(ModelError, match="leaves out an assistant turn"):
        check_chat(RunConfig.model_validate({"model": {"path": str(folder)}}), {})


def test_the_prompt_that_is_shown_names_the_tools() -> None:
    tools = build_tools(["calculator"])
    assert "calculator" in show_prompt(check_chat(RunConfig(), tools), tools)


def test_a_tokenizer_with_more_tokens_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(5_000)])
    tokenizer.save_pretrained(folder)
    config = RunConfig.model_validate({"model": {"path": str(folder), "device": "cpu"}})
    policy = local_policy(config, config.model.path)
    with pytest.raises(ConfigError, match=r"the tokenizer has [\d,]+ tokens, the model's embeddings only"):
        check_weights(policy)
