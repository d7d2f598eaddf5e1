"""The model card's snippet, executed verbatim, prompts the model as in training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selection import quick_first

from toolwise.agent.export import export_model
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.tools.catalog import build_tools, read_tools, write_tools
from toolwise.training.checkpoint import save

PLAIN = "{% for m in messages %}{{ '<|' + m.role + '|>' + (m.content or '') + '<|end|>' }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
ALTERNATING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
TEMPLATES = {"template": None, "system": PLAIN, "user": ALTERNATING}


@pytest.fixture
def export(trained: Path, tmp_path: Path) -> Callable[..., Path]:
    """An export of a model that was trained with tools, with another chat template where one is given."""

    def make(template: str | None, *tools: str) -> Path:
        def write(folder: Path) -> None:
            shutil.copytree(trained / "checkpoints" / "step-000010" / "model", folder, dirs_exist_ok=True)
            write_tools(folder, build_tools(tools))
            if template is not None:
                (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

        run = tmp_path / "run"
        run.mkdir()
        shutil.copyfile(trained / "config.toml", run / "config.toml")
        save(run / "checkpoints", 1, {"a": {}}, extra_files={"model": write})
        return export_model(run, tmp_path / "out").out

    return make


def run_snippet(card: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(compile(card.partition("```python\n")[2].partition("```")[0], "README.md", "exec"), space)
    return space


@pytest.mark.parametrize("where", quick_first(TEMPLATES, ["system"]))
def test_the_snippet_tells_the_model_of_its_tools_as_in_training(
    where: str, export: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = export(TEMPLATES[where], "calculator", "search")
    monkeypatch.chdir(out)
    card = (out / "README.md").read_text(encoding="utf-8")
    space = run_snippet(card)
    assert capsys.readouterr().out.strip()
    _, chat = load_model(str(out), device="cpu", dtype="float32")
    prompt = chat.set_tool_prompt()
    assert prompt.where == where
    told = chat.start([Message(role="user", content="What is 3 + 4?")], list(read_tools(out).values()))
    assert space["prompt"]["input_ids"][0].tolist() == told
    assert "calculator" in space["tokenizer"].decode(told)
    assert prompt.describe()[1:] in card
    assert (out / "tool_prompt.txt").exists() is (where != "template")


def test_a_model_without_tools_is_told_of_none(
    export: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = export(None)
    monkeypatch.chdir(out)
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "tools.json" not in card
    run_snippet(card)
    assert capsys.readouterr().out.strip()
