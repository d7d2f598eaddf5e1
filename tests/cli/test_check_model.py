"""`toolwise check model` as a user types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from toolwise.cli import app
from toolwise.models import BUILTIN

TOOL = '''
def look_up(word: str) -> str:
    """Looks up a word.

    Args:
        word: The word.
    """
    return word
'''


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", "model", *map(str, arguments)])
    return result.exit_code, result.output


def findings(*arguments: object) -> dict[str, Any]:
    status, output = run(*arguments, "--json")
    assert status == 0, output
    return {finding["name"]: finding for finding in json.loads(output)["findings"]}


def test_the_model_that_ships_passes_with_a_tool(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TOOL, encoding="utf-8")
    status, output = run("builtin:small", "--tools", tmp_path / "mine.py:look_up")
    assert status == 0, output
    assert "Tools: look_up(word)" in output  # the prompt
    assert "Multiply 12 by 7." in output
    assert "no problems found" in output


def test_it_says_what_ends_a_turn_which_parser_and_why_and_which_engine_path(tmp_path: Path) -> None:
    found = findings("builtin:small")
    assert found["turn end"]["says"].startswith("generation stops at <|end|>")
    assert found["parser"]["says"] == "hermes: the chat template has <tool_call>"
    assert found["engine"]["says"].startswith("toolwise-fast")
    assert "look_up" in found["round trip"]["says"]
    assert {f["verdict"] for f in found.values()} == {"ok"}


def test_memory_depends_on_the_settings() -> None:
    full, adapters = (
        findings("builtin:small", *more)["memory"]["says"] for more in ((), ("--set", "actor.lora.rank=4"))
    )
    assert "optimizer states" in full
    assert full != adapters


def test_a_parser_that_cannot_read_the_models_calls_is_a_warning() -> None:
    found = findings("builtin:small", "--set", "rollout.tool_parser=gpt_oss")["round trip"]
    assert found["verdict"] == "warning"
    assert "does not read a call" in found["says"]
    assert "rollout.tool_parser" in found["cure"]
    status, output = run("builtin:small", "--no-weights", "--set", "rollout.tool_parser=gpt_oss")
    assert status == 0
    assert "no problems found" not in output
    assert output.strip().endswith("warning: round trip")


def test_a_model_that_cannot_work_is_wrong_with_a_cure(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUILTIN / "small", tmp_path / "mine"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(5_000)])
    tokenizer.save_pretrained(folder)
    status, output = run(folder)
    assert status == 1
    assert output.strip().endswith("wrong: model")
    assert "resize its embeddings" in " ".join(output.split())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.template_kwargs.enable_thinkin=true"], "does not read enable_thinkin"),
        (["rollout.tool_parser=hermse"], "did you mean 'hermes'"),
        (["model.revision=v1"], "is a folder, which has none"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(settings: list[str], said: str, tmp_path: Path) -> None:
    folder = shutil.copytree(BUILTIN / "small", tmp_path / "mine")
    result = CliRunner().invoke(app, ["check", "model", str(folder), *(x for s in settings for x in ("--set", s))])
    assert result.exit_code != 0
    assert said in result.output + str(result.exception)
