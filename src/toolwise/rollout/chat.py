"""From messages to tokens, once each: a conversation only ever grows, and nothing sampled is tokenised again.

`ChatTokenizer.start` renders a prompt; `follow` renders what stands between one assistant turn and the next, in
context, so that the newline a template puts after its end-of-turn token is not lost and no earlier turn is rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.errors import ModelError
from toolwise.messages import Message

_REPLY = "\u2042reply\u2042"
_PROBE = [Message(role="user", content="question"), Message(role="assistant", content=_REPLY)]


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
        self._check()

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """A whole prompt, up to where the assistant begins to write."""
        return self.encode(self._render(messages, tools, begin_reply=True))

    def follow(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """What comes after an assistant's end-of-turn token: `messages` and the beginning of the next reply."""
        rest = self._after_reply(self._render([*_PROBE, *messages], tools, begin_reply=True))
        # The end-of-turn token is encoded too and then left off: it may swallow the white space after it, and some
        # tokenizers put a space before whatever comes first.
        return self.encode(self.end_text + rest)[1:]

    def _check(self) -> None:
        """Find out now, and not in the middle of a rollout, that a template cannot hold a conversation."""
        from jinja2 import TemplateError

        if self.encode(self.end_text) != [self.end_id]:
            raise ModelError(f"the tokenizer does not read its own eos token {self.end_text!r} as one token")
        try:
            text = self._render(_PROBE, None, begin_reply=False)
        except TemplateError as fault:
            raise ModelError(f"the chat template fails on a question and a reply: {fault}") from fault
        self._after_reply(text)

    def _after_reply(self, text: str) -> str:
        """What a template writes after the probe's reply and the end-of-turn token that closes it."""
        reply = text.partition(_REPLY)[2]
        between, end, rest = reply.partition(self.end_text)
        if not end or any(token in between for token in self._special):
            raise ModelError(
                f"the chat template does not end an assistant turn with the eos token {self.end_text!r}: set eos_token "
                "to the token that does, or use a template that ends turns with it"
            )
        return rest

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
        outside = message.role in ("user", "tool")
        content = message.content or ""
        plain: dict[str, Any] = {"role": message.role, "content": self.defuse(content) if outside else content}
        if message.tool_calls:
            plain["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            plain["tool_call_id"] = self.defuse(message.tool_call_id)
        if message.name is not None:
            plain["name"] = self.defuse(message.name)
        return plain

    def defuse(self, text: str) -> str:
        """Control tokens inside text from outside are broken up, so that they stay text."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text
