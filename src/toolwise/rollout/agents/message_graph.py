"""The conversations of one session as a graph of messages, in which sampled tokens are never tokenised again.

An outside agent sends the whole conversation with every call. The graph finds the longest part of it that ends in a
reply that was sampled here, and continues that reply's tokens. What the client changed (an edited reply, dropped
thoughts, a compacted history) or never had (a sub-agent) starts a branch, whose tokens share what the messages share.

Two messages are the same if they say the same: clients write null for empty text, arguments in another spelling and
other ids of calls, and drop fields they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from toolwise.messages import Message, Prefix
from toolwise.rollout.chat_tokenizer import ChatTokenizer, Tools
from toolwise.rollout.tokens import OnChange, TokenBuffer
from toolwise.types.tokens import Alignment

Origin = Literal["first", "continued", "branched", "edited", "unrelated"]
"""How a call relates to earlier ones. first: there is none. continued: of the latest reply of a conversation. branched:
of a reply that another call has continued already. edited: a sampled reply came back changed. unrelated: it has no
sampled reply."""


def message_key(message: Message) -> str:
    """Equal for messages that say the same. Ids of calls count only where a result refers to one."""
    calls = [[call.name, _same_numbers(call.arguments)] for call in message.tool_calls or ()]
    fields = [message.role, message.content or "", calls, message.reasoning_content or "", message.name or ""]
    reference = message.tool_call_id if message.role == "tool" else None
    return json.dumps([*fields, reference], sort_keys=True)


def _same_numbers(value: Any) -> Any:
    """JSON has one kind of number: a client may send 1.0 back as 1."""
    if isinstance(value, dict):
        return {key: _same_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(slots=True)
class SampledReply:
    """A reply that was sampled here: the conversation up to it, and the tokens."""

    history: Prefix[Message]
    """All messages up to and including the reply."""
    tokens: TokenBuffer
    shared_history: list[Message]
    """What `history` is a prefix of; the first call that continues the reply appends to it."""
    continued: bool = False


@dataclass(slots=True)
class _Node:
    """One message after the messages above it."""

    children: dict[str, _Node] = field(default_factory=dict)
    reply: SampledReply | None = None


@dataclass(slots=True)
class GraphTurn:
    """One call: what the model sees. `MessageGraph.add` completes it with what was sampled."""

    history: list[Message]
    """The conversation, a list that only this turn extends."""
    prompt_ids: Prefix[int]
    origin: Origin
    tools_key: str
    tokens: TokenBuffer
    parent: SampledReply | None
    """The reply that it continues."""


class MessageGraph:
    """All conversations of one session. Calls may overlap."""

    def __init__(self, chat: ChatTokenizer, *, on_change: OnChange = "append") -> None:
        self.chat, self.on_change = chat, on_change
        self._roots: dict[str, _Node] = {}

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> GraphTurn:
        """The tokens of a call with these messages. Complete it with `add`, or give it up with `discard`."""
        tools_key = json.dumps(tools or None, sort_keys=True)
        parent, rest, edited = self._find(messages, tools_key)
        if parent is None:
            tokens = TokenBuffer(self.chat, on_change=self.on_change)
            prompt_ids = tokens.prompt(rest, tools)
            origin: Origin = "edited" if edited else "unrelated" if self._roots else "first"
            return GraphTurn(rest, prompt_ids, origin, tools_key, tokens, None)
        shares = not parent.continued
        tokens = parent.tokens.fork(share=shares)
        prompt_ids = tokens.prompt([*parent.history, *rest], tools)
        history = parent.shared_history if shares else list(parent.history)
        history.extend(rest)
        parent.continued = True
        origin = "edited" if edited else "continued" if shares else "branched"
        return GraphTurn(history, prompt_ids, origin, tools_key, tokens, parent)

    def add(self, turn: GraphTurn, sampled: Sequence[int], reply: Message, *, closed: bool) -> Alignment:
        """Record the reply to `turn`. `closed`: its last token ended the turn. "forked" if it starts a branch."""
        alignment = turn.tokens.add(sampled, closed=closed)
        turn.history.append(reply)
        node = self._roots.setdefault(turn.tools_key, _Node())
        for message in turn.history:
            node = node.children.setdefault(message_key(message), _Node())
        node.reply = SampledReply(Prefix(turn.history), turn.tokens, turn.history)
        return alignment if turn.origin in ("first", "continued") else "forked"

    def discard(self, turn: GraphTurn) -> None:
        """Nothing was sampled for `turn`: another call may take its place."""
        if turn.parent is not None and turn.history is turn.parent.shared_history:
            del turn.history[len(turn.parent.history) :]
            turn.parent.continued = False

    def _find(self, messages: Sequence[Message], tools_key: str) -> tuple[SampledReply | None, list[Message], bool]:
        """The last sampled reply in `messages` that came back as it was sent, the messages after it, and whether a
        sampled reply came back changed."""
        node: _Node | None = self._roots.get(tools_key)
        last: SampledReply | None = None
        depth, edited = 0, False
        call_ids: dict[str, str] = {}
        resolved: list[Message] = []
        for message in messages:
            message = _with_call_id(message, call_ids)
            resolved.append(message)
            if node is None:
                continue
            child = node.children.get(message_key(message))
            if child is None and message.role == "assistant":
                edited = any(sibling.reply is not None for sibling in node.children.values())
            node = child
            if node is not None and node.reply is not None:
                last, depth = node.reply, len(resolved)
                call_ids |= _renamed_calls(message, last.history[-1])
        return last, resolved[depth:], edited


def _renamed_calls(received: Message, sampled: Message) -> dict[str, str]:
    """The id that the client uses for each call of a sampled reply, and ours."""
    pairs = zip(received.tool_calls or (), sampled.tool_calls or (), strict=True)
    return {theirs.id: ours.id for theirs, ours in pairs if theirs.id}


def _with_call_id(message: Message, call_ids: dict[str, str]) -> Message:
    if message.role != "tool" or message.tool_call_id not in call_ids:
        return message
    return message.model_copy(update={"tool_call_id": call_ids[message.tool_call_id]})
