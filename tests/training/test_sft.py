"""Supervised fine-tuning from files: the saved model, and errors that name the bad row."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_world_teacher import conversations

from toolwise.data.files import write_rows
from toolwise.errors import ConfigError, DataError, MissingExtraError
from toolwise.models import load_model
from toolwise.training.sft import read_conversation, train_sft

torch.set_num_threads(1)
FEW: dict[str, Any] = {"steps": 2, "batch_tokens": 256, "row_tokens": 256}


def talk(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[place % 2], "content": text} for place, text in enumerate(turns)]}


def test_a_trained_model_can_be_loaded_and_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "talks.jsonl"
    write_rows(conversations(6, seed=1), file)
    figures = train_sft("builtin:small", file, tmp_path / "out", FEW)
    assert figures["first_loss"] > 0.0
    assert set(figures) == {"first_loss", "loss", "grad_norm", "tokens"}
    taught, chat = load_model(str(tmp_path / "out"), device="cpu")
    start, _ = load_model("builtin:small", device="cpu")
    pairs = list(zip(taught.parameters(), start.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all(torch.isfinite(a).all() for a, _ in pairs)
    assert chat.start(read_conversation(file, 0, talk("hello", "x"))[0][:1])


def test_two_conversations_are_learned(tmp_path: Path) -> None:
    talks = [talk("Who are you?", "Toolwise."), talk("And who am I?", "The reader.")]
    settings = {"steps": 40, "batch_tokens": 128, "row_tokens": 128, "lr": 1e-3}
    figures = train_sft("builtin:small", talks, tmp_path / "out", settings)
    assert figures["loss"] < 0.2 * figures["first_loss"]


def test_settings_are_left_alone(tmp_path: Path) -> None:
    settings = {**FEW, "progress": False}
    train_sft("builtin:small", [talk("a", "b")], tmp_path / "out", settings)
    assert settings == {**FEW, "progress": False}


def test_parquet_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "talks.parquet"
    write_rows([talk("a", "b"), talk("c", "d", "e", "f")], file)
    assert train_sft("builtin:small", file, tmp_path / "out", FEW)["tokens"] > 0


def test_a_folder_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        train_sft("builtin:small", [talk("a", "b")], tmp_path / "out", FEW)
    with pytest.raises(ConfigError, match="not an empty folder"):
        train_sft("builtin:small", [talk("a", "b")], tmp_path / "out" / "mine.txt", FEW)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"step": 3}, "sft: unknown key `step` .did you mean `steps`"),
        ({"steps": 0}, "`steps` must be greater than 0, got 0"),
        ({"row_tokens": 0}, "`row_tokens` must be greater than or equal to 2, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_sft("builtin:small", [talk("a", "b")], tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_missing_conversations_are_reported_immediately(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no conversations"):
        train_sft("builtin:small", [], tmp_path / "out", FEW)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "field messages: expected a list"),
        ({"messages": []}, "field messages: expected a list"),
        ({"messages": "hello"}, "field messages: expected a list"),
        ({"messages": ["hello"]}, r"field messages\[0\]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "b"}]}, r"field messages\[1\]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, r"field messages\[1\]\.content"),
        ({"messages": [{"role": "user", "content": "only a question"}]}, "field messages: .*no assistant message"),
        ({"prompt": None, "response": None}, r"field messages\[0\]\.content"),
        (talk("a", "b") | {"tools": ["calculator"]}, "field tools"),
        (talk("a", "b") | {"tools": "calculator"}, "field tools"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    file = tmp_path / "talks.jsonl"
    file.write_text(f"{json.dumps(talk('a', 'b'))}\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(DataError, match=rf"talks\.jsonl: row 1 .*{said}") as caught:
        train_sft("builtin:small", file, tmp_path / "out", FEW)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_conversation_without_assistant_tokens_in_range_is_named(tmp_path: Path) -> None:
    long = talk("word " * 200, "b")
    with pytest.raises(DataError, match=r"row 1 .*no assistant tokens within row_tokens = 64"):
        train_sft("builtin:small", [talk("a", "b"), long], tmp_path / "out", {**FEW, "row_tokens": 64})


def test_a_prompt_with_a_response_is_a_conversation() -> None:
    messages, tools = read_conversation(Path("x"), 0, {"prompt": "hello", "response": "hi"})
    assert [(m.role, m.content) for m in messages] == [("user", "hello"), ("assistant", "hi")]
    assert tools is None
    given = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    messages, _ = read_conversation(Path("x"), 0, {"prompt": given, "response": "hi"})
    assert [m.role for m in messages] == ["system", "user", "assistant"]
    assert len(given) == 2


def test_tools_are_passed_on() -> None:
    [row] = conversations(1, seed=3)
    messages, tools = read_conversation(Path("x"), 0, row)
    assert (tools or []) == row["tools"]
    assert messages[0].role == "user"


def test_adapters_without_peft_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'toolwise\[peft\]'"):
        train_sft("builtin:small", [talk("a", "b")], tmp_path / "out", {**FEW, "lora_rank": 4})
    assert not (tmp_path / "out").exists()


def test_adapters_are_trained_and_merged_into_a_plain_model(tmp_path: Path) -> None:
    settings = {"steps": 40, "batch_tokens": 128, "row_tokens": 128, "lr": 1e-2, "lora_rank": 8}
    figures = train_sft("builtin:small", [talk("Who are you?", "Toolwise.")], tmp_path / "out", settings)
    assert figures["loss"] < 0.5 * figures["first_loss"]
    taught, _ = load_model(str(tmp_path / "out"), device="cpu")
    start, _ = load_model("builtin:small", device="cpu")
    moved = {
        n for (n, a), b in zip(taught.named_parameters(), start.parameters(), strict=True) if not torch.equal(a, b)
    }
    assert moved
    assert not any("embed" in name or "norm" in name or "lora" in name for name in moved)


def test_a_rank_below_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`lora_rank` must be greater than or equal to 0, got -1"):
        train_sft("builtin:small", [talk("a", "b")], tmp_path / "out", {**FEW, "lora_rank": -1})
