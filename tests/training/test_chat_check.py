"""What a check of a chat template and a parser says when they do not fit together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from toolwise.errors import ModelError, PolicyError
from toolwise.messages import ToolCall
from toolwise.rollout.call_format import CallFormat
from toolwise.training import chat_check

Render = Callable[[str, Sequence[ToolCall]], str]


def form(parse: Callable[[str], Any], render: Render | None = lambda content, calls: "@call") -> CallFormat:
    return CallFormat("mine", parse, render)


def chat(reply: str | Exception = "@call", *, calls_as_text: bool = False) -> Any:
    def write(message: Any, tools: Any) -> str:
        if isinstance(reply, Exception):
            raise reply
        return reply

    return SimpleNamespace(
        tool_prompt=SimpleNamespace(calls_as_text=calls_as_text), reply=write, decode=lambda ids: ids
    )


def fails(text: str) -> Any:
    raise PolicyError(f"cannot read {text}")


@pytest.mark.parametrize(("where", "usable"), [("nowhere", True), ("template", False)])
@pytest.mark.parametrize("tools", [{}, {"look": None}])
def test_a_prompt_that_cannot_show_tools_is_wrong_only_with_tools(where: str, usable: bool, tools: Any) -> None:
    prompt = SimpleNamespace(where=where, usable=usable, describe=lambda: "tools are not shown")
    finding = chat_check._tool_prompt(SimpleNamespace(tool_prompt=prompt), tools)  # type: ignore[arg-type]
    assert (finding.verdict, finding.says) == ("wrong" if tools else "warning", "tools are not shown")


@pytest.mark.parametrize(
    ("model", "parser", "says"),
    [
        (chat(), form(fails), "does not write a call that can be read: cannot read @call"),
        (
            chat(),
            form(lambda text: (text, [])),
            "the parser mine does not read a call as the conversation shows it: '@call'",
        ),
        (chat(calls_as_text=True), form(fails, lambda content, calls: "@text"), "cannot read @text"),
        (chat(ModelError("a thought")), form(fails), "cannot read @call"),
        (chat(ModelError("a thought")), CallFormat("auto", fails), "can be read: a thought"),
    ],
)
def test_a_call_that_does_not_come_back_is_a_warning(model: Any, parser: CallFormat, says: str) -> None:
    finding = chat_check._round_trip(model, parser)
    assert finding.verdict == "warning"
    assert says in finding.says


def test_a_parser_that_does_not_write_calls_is_not_tried() -> None:
    assert chat_check._round_trip(chat(), form(fails, None)).verdict == "skipped"


def test_text_that_becomes_a_control_token_is_wrong() -> None:
    controls = SimpleNamespace(texts=["<end>"], ids=frozenset({7}))
    tokenizer = SimpleNamespace(unk_token_id=None, convert_ids_to_tokens=lambda ids: ["<end>" for _ in ids])
    model = SimpleNamespace(
        controls=controls,
        tokenizer=tokenizer,
        start=lambda messages: [1, 7, 7] if messages[0].content == "<end>" else [1, 7],
    )
    finding = chat_check._control_tokens(model)  # type: ignore[arg-type]
    assert (finding.verdict, finding.says) == ("wrong", "text of a message becomes a control token: <end>")
