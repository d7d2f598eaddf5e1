"""Where an assistant turn ends: found by rendering replies with and without a message after them.

Models end their turns in different ways, and `eos_token` alone does not tell. What `find_turn_ends` tells apart:

    reply<|im_end|>\\n<|im_start|>user …       one token closes every message (ChatML, Llama 3, Gemma, Phi)
    reply<|END_RESPONSE|><|END_OF_TURN|>…     several tokens close it; the last one that stops generation counts
    reply<|user|>\\n …                         nothing closes it: the model writes the opening of the next message (GLM)
    reply<|end|><|start|>user …               another token than the one the model stops with, `<|return|>` (gpt-oss)
    call<tool_call|><|tool_response>…         calls end differently from text (Gemma 4, gpt-oss)
    call</tool_call><tool_call>call…          special tokens that are tags of the call format end nothing
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolwise.errors import ModelError
from toolwise.messages import Message, ToolCall

# Random per process, so the author of a message cannot know them; they never become tokens.
REPLY_MARKER, NEXT_MARKER = (f"{name}{secrets.token_hex(16)}" for name in ("reply", "next"))
QUESTION = Message(role="user", content="question")
REPLY = Message(role="assistant", content=REPLY_MARKER)
_CALL = ToolCall(id="call_0", name="tool", arguments={"x": REPLY_MARKER})
CALL = Message(role="assistant", content="", tool_calls=[_CALL])
_FIRST_CALL = ToolCall(id="call_1", name="tool", arguments={"x": NEXT_MARKER})
_TWO_CALLS = Message(role="assistant", content="", tool_calls=[_FIRST_CALL, _CALL])
_NEXT_USER = Message(role="user", content=NEXT_MARKER)
RESULT = Message(role="tool", content=NEXT_MARKER, tool_call_id="call_0", name="tool")

Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether the next reply is opened) -> the rendered text"""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """Control tokens around the end of an assistant turn, as text."""

    stops: tuple[str, ...]
    """Generation stops at any of these."""
    ends: tuple[str, ...]
    """Close a reply in a conversation that goes on; empty if only the next message's opening ends a reply."""
    openings: tuple[str, ...]
    """Open the message after a reply."""
    closers: frozenset[str]
    """Stand between a reply and its end, and are not part of the reply."""

    def split(self, text: str, stop: str | None) -> tuple[str, str]:
        """The end of a reply and what follows it, in the `text` after a reply. `stop`: the token that was sampled."""
        end = _first_of(text, (*self.ends, *([stop] if stop else ())))
        opening = _first_of(text, self.openings)
        if end is not None and (opening is None or end.start() <= opening.start()):
            opens = end[0] in self.openings and end[0] != stop  # not sampled, so it is still to be written
            return ("", text[end.start() :]) if opens else (end[0], text[end.end() :])
        if opening is None:
            raise ModelError("the chat template does not end an assistant turn in this conversation")
        return "", text[opening.start() :]


def after_reply(text: str) -> str:
    """What a template writes after the marked reply."""
    _, marker, after = text.rpartition(REPLY_MARKER)
    if not marker:
        raise ModelError("the chat template leaves out an assistant turn")
    return after


def find_turn_ends(render: Render, controls: Sequence[str], stops: Sequence[str], *, name: str) -> TurnEnds:
    """`controls`: texts of all control tokens; `stops`: those the model's own settings name; `name`: for errors."""
    found_stops, ends, openings = list(stops), list[str](), list[str]()
    closers: set[str] = set()
    for reply, following in ((REPLY, _NEXT_USER), (CALL, RESULT)):
        try:
            last = after_reply(render([QUESTION, reply], False))
            followed = after_reply(render([QUESTION, reply, following], True))
        except ModelError:
            if reply is REPLY:
                raise
            continue  # calls are then written as text: see `ToolPrompt`
        if reply is CALL:
            within = _between_calls(render, controls) - set(found_stops)
            controls = [token for token in controls if token not in within]
        followed = followed.partition(NEXT_MARKER)[0]
        length = next((i for i, pair in enumerate(zip(last, followed, strict=False)) if len(set(pair)) > 1), len(last))
        shared = _all_of(last[: min(length, len(followed))], controls)
        own = _all_of(last, controls)
        if shared:
            end = next((token for token in shared if token in found_stops), shared[-1])
            ends.append(end)
            found_stops.append(end)
            closers |= set(shared[: shared.index(end)]) if reply is REPLY else set()
        elif own:
            ends += _all_of(followed, controls)[:1]
            found_stops += [] if any(token in found_stops for token in own) else own[:1]
        rest = followed.partition(ends[-1])[2] if own and ends else followed
        opening = [token for token in _all_of(rest, controls)[:1] if not own or rest.lstrip().startswith(token)]
        if own and not opening and ends and ends[-1] != ends[0]:  # it also opens the result (Gemma 4)
            opening = ends[-1:]
        openings += opening
        found_stops += [] if own else opening
    if not ends and not openings:
        raise ModelError(
            f"the chat template of {name} does not end an assistant turn with a control token: use a template that "
            "does (model.chat_template), and a tokenizer that has the token"
        )
    stop_texts, end_texts, opening_texts = (tuple(dict.fromkeys(texts)) for texts in (found_stops, ends, openings))
    return TurnEnds(stop_texts, end_texts, opening_texts, frozenset(closers))


def _between_calls(render: Render, controls: Sequence[str]) -> set[str]:
    """Control tokens between two calls of one turn: tags of the format, which do not end the turn."""
    try:
        text = render([QUESTION, _TWO_CALLS], False)
    except ModelError:  # one call per turn
        return set()
    before, _, _ = text.rpartition(REPLY_MARKER)
    _, marker, between = before.rpartition(NEXT_MARKER)
    return set(_all_of(between, controls)) if marker else set()


def mark_reply(reply: Message) -> Message:
    """The reply with the marker as the argument of its last call, or as its text if it has none.

    Not as both: a template may write a reply's text after the results of its calls (Gemma 4).
    """
    if not reply.tool_calls:
        return reply.model_copy(update={"content": REPLY_MARKER})
    *calls, last = reply.tool_calls
    marked = last.model_copy(update={"arguments": {"x": REPLY_MARKER}})
    return reply.model_copy(update={"content": "", "tool_calls": [*calls, marked]})


def _all_of(text: str, tokens: Sequence[str]) -> list[str]:
    return _pattern(tokens).findall(text) if tokens else []


def _first_of(text: str, tokens: Sequence[str]) -> re.Match[str] | None:
    return _pattern(tokens).search(text) if tokens else None


def _pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
