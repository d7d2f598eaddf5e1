"""The tool-call format of a run: a built-in one by name, or a user's parser, whose errors become typed faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolwise.config.imports import did_you_mean, load_reference
from toolwise.errors import ConfigError, PolicyError
from toolwise.messages import ToolCall
from toolwise.protocols import ToolCallParser
from toolwise.rollout.parsers import PARSERS, RENDERERS, ParsedReply, open_stream, parse_for_tools
from toolwise.rollout.parsers.json_calls import is_storable
from toolwise.rollout.parsers.stream import CallStream
from toolwise.rollout.parsers.xml_calls import Tools
from toolwise.untrusted.bounds import MAX_CALLS, MAX_OBSERVATION_CHARS
from toolwise.untrusted.user_code import call_part_within, call_user_code, describe_at

EXAMPLE_CALL = ToolCall(id="call_0", name="function-name", arguments={"argument-name": "value"})
"""Describes a format to a model."""
PARSE_LIMIT_S = 5.0
"""Time limit of a user's parser for one reply: every episode waits for it."""
_TRIAL_CALL = ToolCall(id="call_0", name="look_up", arguments={"word": "nile"})


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are read from text and, if `render` is not None, written."""

    name: str
    parse: Callable[[str], ParsedReply]
    render: Callable[[str, Sequence[ToolCall]], str] | None = None

    def stream(self, thought_open: bool | None = None, tools: Tools = None) -> CallStream:
        """Reads a reply piece by piece; a user's parser reads it at its end."""
        if PARSERS.get(self.name) is self.parse:
            return open_stream(self.name, thought_open, tools)
        return CallStream(self.parse)

    def parse_for(self, text: str, tools: Tools) -> ParsedReply:
        """`parse`, with the types in the tools' schemas where the format writes none."""
        return parse_for_tools(self.parse, text, tools)


ParserSpec = str | ToolCallParser | Callable[..., Any] | CallFormat


def find_format(source: ParserSpec) -> CallFormat:
    """`source` is a built-in name, a reference, a parse function, or a `ToolCallParser` or its class."""
    if isinstance(source, CallFormat):
        return source
    if isinstance(source, str) and source in PARSERS:
        writes_calls = source != "action"
        return CallFormat(source, PARSERS[source], RENDERERS.get(source) if writes_calls else None)
    if isinstance(source, str) and ":" not in source:
        hint = did_you_mean(source, PARSERS) or f"; choose one of {', '.join(sorted(PARSERS))}"
        raise ConfigError(f"there is no tool parser {source!r}{hint}, or give path/to/file.py:name")
    return _user_format(source)


def _user_format(source: Any) -> CallFormat:
    name = source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__qualname__)
    where, name = f"rollout.tool_parser: {name}", name.rpartition("/")[2]  # the name is exported, the path is not
    parser = load_reference(source, what="rollout.tool_parser") if isinstance(source, str) else source
    if isinstance(parser, type):
        try:
            parser = call_user_code(parser)
        except Exception as fault:
            raise ConfigError(f"{where} could not be created without arguments: {describe_at(fault)}") from fault
    if not isinstance(parser, ToolCallParser) and callable(parser):
        return CallFormat(name, partial(_parse, where, parser))
    if not isinstance(parser, ToolCallParser):
        raise ConfigError(f"{where} is not a parser: give a function of the text, or a toolwise.ToolCallParser")
    parse, render = partial(_parse, where, parser.parse), partial(_render, where, parser.render)
    written = _call(where, parser.render, "", [_TRIAL_CALL])
    if written is None:
        return CallFormat(name, parse)
    _, calls = parse(render("", [_TRIAL_CALL]))
    if [(call.name, call.arguments) for call in calls] != [(_TRIAL_CALL.name, _TRIAL_CALL.arguments)]:
        raise ConfigError(f"{where}: parse does not read what render wrote for a call: {written!r:.80}")
    return CallFormat(name, parse, render)


def _parse(where: str, parse: Callable[[str], Any], text: str) -> ParsedReply:
    reply = _call(where, parse, text)
    content, calls = reply if isinstance(reply, tuple) and len(reply) == 2 else (None, None)
    if (
        not isinstance(content, str)
        or not isinstance(calls, list)
        or not all(isinstance(call, ToolCall) for call in calls)
    ):
        raise PolicyError(f"{where} returned {reply!r:.80}: return the text and a list of toolwise.ToolCall")
    if len(calls) > MAX_CALLS:
        raise PolicyError(f"{where} returned {len(calls):,} calls for one reply: return at most {MAX_CALLS:,}")
    if len(content) > MAX_OBSERVATION_CHARS:
        raise PolicyError(f"{where} returned {len(content):,} characters for a reply of {len(text):,}")
    for call in calls:
        if not isinstance(call.arguments, str) and not is_storable(call.arguments):
            raise PolicyError(f"{where} returned a call of {call.name!r:.80} whose arguments cannot be written as JSON")
    if text.strip() and not content.strip() and not calls:
        raise PolicyError(f"{where} lost a reply: it returned neither text nor calls for {text!r:.80}")
    return content, calls


def _render(where: str, render: Callable[..., Any], content: str, calls: Sequence[ToolCall]) -> str:
    text = _call(where, render, content, calls)
    if not isinstance(text, str):
        raise PolicyError(f"{where}: render returned {text!r:.80}: return text")
    return text


def _call(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call_part_within(PARSE_LIMIT_S, function, *arguments)
    except Exception as fault:
        raise PolicyError(f"{where} failed: {describe_at(fault)}") from fault
