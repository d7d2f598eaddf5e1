"""A user's parser as the call format of a run: what is accepted, and what its errors become."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from toolwise import ToolCall, ToolCallParser
from toolwise.errors import ConfigError, PolicyError
from toolwise.rollout import call_format
from toolwise.rollout.call_format import find_format
from toolwise.rollout.parsers import PARSERS, RENDERERS


class Commas(ToolCallParser):
    """`name,key,value`"""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        if text.count(",") != 2:
            return text, []
        name, key, value = text.split(",")
        return "", [ToolCall(id="call_0", name=name, arguments={key: value})]

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        assert isinstance(calls[0].arguments, dict)
        ((key, value),) = calls[0].arguments.items()
        return f"{calls[0].name},{key},{value}"


class Reads(ToolCallParser):
    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        return text, []


class Forgets(Commas):
    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        return text, []


def plain(text: str) -> tuple[str, list[ToolCall]]:
    return text, []


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_built_in_formats_are_the_functions_in_the_tables(name: str) -> None:
    found = find_format(name)
    assert (found.name, found.parse) == (name, PARSERS[name])
    assert found.render is (None if name == "action" else RENDERERS.get(name))


@pytest.mark.parametrize(
    "source", [Commas, Commas(), f"{Path(__file__).resolve()}:Commas"], ids=["class", "object", "reference"]
)
def test_a_parser_reads_and_writes(source: Any) -> None:
    found = find_format(source)
    assert found.parse("look,at,tea")[1][0].arguments == {"at": "tea"}
    assert found.render is not None
    assert find_format(found) is found


@pytest.mark.parametrize("source", [plain, Reads])
def test_a_parser_need_not_write(source: Any) -> None:
    assert find_format(source).render is None
    assert find_format(source).parse("yes") == ("yes", [])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hermess", "no tool parser 'hermess'; did you mean 'hermes'"),
        (int, "int is not a parser"),
        (3, "int is not a parser"),
        (Forgets, r"Forgets: parse does not read what render wrote for a call: 'look_up,word,nile'"),
        (Path(__file__).name + ":Commas", "does not exist"),
    ],
)
def test_what_is_no_parser_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_format(source)


def nested(depth: int) -> dict[str, Any]:
    return reduce(lambda inner, _: {"x": inner}, range(depth), {})


def exits(text: str) -> Any:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (exits, rf"exits failed: RuntimeError: it called sys.exit\(1\) \({__file__}:\d+\)$"),
        (lambda text: text, "returned 'three words here': return the text and a list"),
        (lambda text: (None, []), "return the text and a list"),
        (lambda text: (text, [{"name": "look"}]), "a list of toolwise.ToolCall"),
        (
            lambda text: (text, [ToolCall(name="look", arguments={"x": object()})]),
            "of 'look' whose arguments cannot be",
        ),
        (lambda text: (text, [ToolCall(name="look", arguments=nested(1000))]), "cannot be written as JSON"),
        (lambda text: (text * 1_000_000, []), "returned 16,000,000 characters for a reply of 16"),
        (lambda text: (" ", []), "lost a reply: it returned neither text nor calls for 'three words here'"),
    ],
)
def test_errors_are_faults_of_the_policy(parse: Callable[[str], Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        find_format(parse).parse("three words here")
    assert "\n" not in str(caught.value)


def test_a_parser_that_does_not_return_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str) -> tuple[str, list[ToolCall]]:
        re.match("(a*)*b", "a" * 60)
        return text, []

    monkeypatch.setattr(call_format, "PARSE_LIMIT_S", 0.02)
    with pytest.raises(PolicyError, match=rf"failed: TimeLimitError: took longer than 0.02 s \({__file__}:\d+\)"):
        find_format(parse).parse("words")


def test_a_renderer_that_fails_later_is_a_fault_too() -> None:
    found = find_format(Commas)
    assert found.render is not None
    with pytest.raises(PolicyError, match="Commas failed: ValueError"):
        found.render("", [ToolCall(name="look", arguments={})])


def test_a_parser_that_finds_too_many_calls_fails() -> None:
    def parse(text: str) -> tuple[str, list[ToolCall]]:
        return text, [ToolCall(name="look")] * 100_000

    with pytest.raises(PolicyError, match=r"rollout\.tool_parser: .* returned 100,000 calls .* at most 1,000"):
        find_format(parse).parse("words")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_format_reads_in_pieces_and_for_tools(name: str) -> None:
    found = find_format(name)
    assert found.render is not None
    text = found.render("", [ToolCall(id="call_0", name="look", arguments={"at": "tea"})])
    tools = [
        {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}
    ]
    stream = found.stream(False, tools)
    stream.feed(text)
    stream.finish()
    assert stream.reply == found.parse(text) == found.parse_for(text, tools)


def test_a_users_parser_reads_a_stream_at_its_end() -> None:
    stream = find_format(Commas).stream()
    assert stream.feed("look,at,") == []
    stream.feed("tea")
    stream.finish()
    assert stream.reply is not None
    assert stream.reply[1][0].arguments == {"at": "tea"}
