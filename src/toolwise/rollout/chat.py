"""From messages to tokens, once each: a conversation only ever grows, and nothing sampled is tokenised again.

`ChatTokenizer.start` renders a prompt; `follow` renders what stands between one assistant turn and the next, in
context, so that the newline a template puts after its end-of-turn token is not lost and no earlier turn is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.errors import ModelError
from toolwise.messages import Message

_PROBE = [Message(role="user", content="question"), Message(role="assistant", content="reply")]


class ChatTokenizer:
    """A tokenizer with its chat template. `end_id` ends an assistant turn."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template: add chat_template.jinja to the model's folder")
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer names no eos_token: set it to the token that ends an assistant turn")
        self.tokenizer = tokenizer
        self.end_id: int = tokenizer.eos_token_id
        self.end_text: str = tokenizer.eos_token
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
        self._special = sorted(tokenizer.all_special_tokens, key=len, reverse=True)

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """A whole prompt, up to where the assistant begins to write."""
        return self.encode(self._render(messages, tools, begin_reply=True))

    def follow(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """What comes after an assistant's end-of-turn token: `messages` and the beginning of the next reply."""
        head = self._render(_PROBE, tools, begin_reply=False)
        cut = head.rfind(self.end_text) + len(self.end_text)
        whole = self._render([*_PROBE, *messages], tools, begin_reply=True)
        if cut < len(self.end_text) or whole[:cut] != head[:cut]:
            raise ModelError(
                "the chat template does not end an assistant turn with the eos token, or rewrites earlier turns: "
                "multi-turn rollouts need a template that only appends"
            )
        return self.encode(whole[cut:])

    def reply(self, message: Message, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """An assistant's turn as the template writes it, its end-of-turn token included (for supervised learning)."""
        before = self._render(_PROBE[:1], tools, begin_reply=True)
        whole = self._render([_PROBE[0], message], tools, begin_reply=False)
        cut = whole.rfind(self.end_text) + len(self.end_text)
        if not whole.startswith(before) or cut < len(before):
            raise ModelError("the chat template does not put an assistant turn between its opening and the eos token")
        return self.encode(whole[len(before) : cut])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled tokens, tags kept, without the end-of-turn token."""
        ids = list(token_ids)
        if ids and ids[-1] == self.end_id:
            ids.pop()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, begin_reply: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [self._plain(m) for m in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=begin_reply,
            tokenize=False,
        )
        return text

    def _plain(self, message: Message) -> dict[str, Any]:
        """The dictionary templates expect: arguments as objects, and no control tokens smuggled in as text."""
        content = message.content or ""
        if message.role in ("user", "tool"):
            content = self.defuse(content)
        plain: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            plain["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.name is not None:
            plain["name"] = message.name
        return plain

    def defuse(self, text: str) -> str:
        """Control tokens inside text from outside are broken up, so that they stay text."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text
