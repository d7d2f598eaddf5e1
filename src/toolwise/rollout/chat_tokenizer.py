"""From messages to tokens: renders conversations with a chat template, whose control tokens no message can write.

`render` and `encode` handle a whole conversation; `encode_continuation` gives the tokens between one assistant turn and
the next, so that the newline a template puts after its end-of-turn token is not lost. `TokenBuffer` (tokens.py)
combines them turn by turn.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from toolwise.errors import ModelError, TemplateLimitError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.call_format import CallFormat, ParserSpec, find_format
from toolwise.rollout.control_tokens import ControlTokens, strip_guard_marks
from toolwise.rollout.parsers import detect_parser
from toolwise.rollout.template_limits import bound_template, budget
from toolwise.rollout.tool_prompt import ToolPrompt, ToolPromptMode, UserToolResult, choose_tool_prompt

Tools = Sequence[dict[str, Any]] | None

# Random per process, so the author of a message cannot know it; it never becomes a token.
_REPLY_MARKER = f"reply{secrets.token_hex(16)}"
_PROBE = [Message(role="user", content="question"), Message(role="assistant", content=_REPLY_MARKER)]
_TOOL_CALL_PROBE = [
    _PROBE[0],
    Message(role="assistant", content="", tool_calls=[ToolCall(id="call_0", name="tool", arguments={"x": 1})]),
    Message(role="tool", content="result", tool_call_id="call_0", name="tool"),
]
ENCODE_CACHE_SIZE = 64
_STRFTIME_CALL = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class ChatTokenizer:
    """A tokenizer with its chat template. `end_id` ends an assistant turn.

    `template_kwargs` are passed to the template (`enable_thinking`, `date_string`, …). A template that reads the clock
    sees the time at which this object was created (`now`): a prompt must not change at midnight.
    """

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, now: datetime | None = None
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template: add chat_template.jinja to the model's folder")
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no eos_token: set it to the token that ends an assistant turn")
        self.tokenizer = tokenizer
        self.name: str = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self.template_kwargs = dict(template_kwargs or {})
        self.controls = ControlTokens(tokenizer)
        self.end_id: int = tokenizer.eos_token_id
        self.end_text: str = tokenizer.eos_token
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
        self._now = now or datetime.now()
        self._templates: dict[str, Any] = {}
        self._encode_cache: dict[str, list[int]] = {}
        """The last few texts: all rollouts of a group start with the same one."""
        self._nine_letter_ids = False
        self.tool_prompt = ToolPrompt()
        self._check()
        self.set_tool_prompt()

    def find_format(self, parser: ParserSpec) -> CallFormat:
        """The format of a parser; "auto" detects it from the chat template."""
        auto = parser == "auto"
        return find_format(detect_parser(self.tokenizer.chat_template, self.controls.texts) if auto else parser)

    def set_tool_prompt(self, mode: ToolPromptMode = "auto", parser: ParserSpec = "auto") -> ToolPrompt:
        """Choose how the model sees its tools (`rollout.tool_prompt`) for the given parser."""
        self.tool_prompt = ToolPrompt()  # the bare template
        self.tool_prompt = choose_tool_prompt(
            lambda m, t: strip_guard_marks(self.render(m, t)), mode, self.find_format(parser)
        )
        return self.tool_prompt

    def start(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """A whole prompt, up to where the assistant starts to write."""
        return self.encode(self.render(messages, tools))

    def encode_continuation(
        self, messages: Sequence[Message], tools: Tools = None, *, after: Sequence[Message] = ()
    ) -> list[int]:
        """Tokens after an assistant's end-of-turn token: `messages` and the start of the next reply.

        `after` is the conversation up to and including that assistant turn. The content of the turn itself does not
        matter.
        """
        first_error: ModelError | None = None
        for context in self._contexts(after):
            try:
                rest = self._after_reply(self.render([*context, *messages], tools))
            except ModelError as fault:
                first_error = first_error or fault
            else:
                # The end-of-turn token is encoded too and then removed: it may absorb the white space after it, and
                # some tokenizers put a space before the first token.
                return self.encode(self.end_text + rest)[1:]
        assert first_error is not None
        raise first_error

    def reply(self, message: Message, tools: Tools = None) -> list[int]:
        """An assistant turn as the template writes it, including its end-of-turn token (for SFT)."""
        before = self.render(_PROBE[:1], tools)
        rendered = self.render([_PROBE[0], message], tools, generation_prompt=False)
        end = rendered.rfind(self.end_text) + len(self.end_text)
        if not rendered.startswith(before) or end < len(before):
            raise ModelError("the chat template does not put an assistant turn between its opening and the eos token")
        return self.encode(rendered[len(before) : end])

    def render(self, messages: Sequence[Message], tools: Tools = None, *, generation_prompt: bool = True) -> str:
        """The rendered text, with the marks of `ControlTokens`: for `encode` and for comparisons."""
        arranged = self.tool_prompt.arrange(messages, tools)
        if self.tool_prompt.where != "template":
            tools = None
        try:
            template_messages = [self._to_template_dict(m) for m in arranged]
            with budget(sum(len(message["content"]) for message in template_messages)):
                text: str = self.tokenizer.apply_chat_template(
                    template_messages,
                    tools=self.controls.guard_all(list(tools)) if tools else None,
                    chat_template=self._template(tools),
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self.template_kwargs,
                )
        except TemplateLimitError as fault:
            raise TemplateLimitError(f"the chat template of {self.name} is refused: {fault}") from fault
        except Exception as fault:  # a template is a program and can raise anything
            reason = " ".join(str(fault).split()) or type(fault).__name__
            roles = ", ".join(m.role for m in messages)
            raise ModelError(
                f"the chat template of {self.name} fails on a conversation of [{roles}]: {reason}"
            ) from fault
        return text

    def encode(self, text: str) -> list[int]:
        ids = self._encode_cache.get(text)
        if ids is None:
            ids = self.controls.encode(text, self.end_text)
            if len(self._encode_cache) >= ENCODE_CACHE_SIZE:
                self._encode_cache.clear()
            self._encode_cache[text] = ids
        return ids.copy()

    def decode(self, token_ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """The text of sampled tokens, tags included, without the token that ended the turn."""
        ids = list(token_ids)
        if ids and (ids[-1] == self.end_id or ids[-1] in stop_ids):
            ids.pop()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def tail(self, text: str) -> str:
        """Rendered text from its last control token on: its encoding does not depend on what comes before."""
        return text[max(0, *(text.rfind(control) for control in (self.end_text, *self._boundary_tokens))) :]

    def _check(self) -> None:
        """Fail now, not in the middle of a rollout, if the template cannot hold a conversation."""
        if self.encode(self.end_text) != [self.end_id]:
            raise ModelError(f"the tokenizer does not read its own eos token {self.end_text!r} as one token")
        self._boundary_tokens = self.controls.texts
        text = self.render(_PROBE, generation_prompt=False)
        self._after_reply(text)
        # From here on a reply may hold control tokens around its calls, but none that starts another turn.
        self._boundary_tokens = tuple(c for c in self.controls.texts if c in text and c != self.end_text)
        if not self._can_render(_TOOL_CALL_PROBE):
            self._nine_letter_ids = True
            self._nine_letter_ids = self._can_render(_TOOL_CALL_PROBE)

    def _can_render(self, messages: Sequence[Message]) -> bool:
        try:
            self.render(messages)
        except ModelError:
            return False
        return True

    def _contexts(self, after: Sequence[Message]) -> Iterator[list[Message]]:
        """Conversations that end in a reply marked so that it can be found again, most similar to `after` first.

        Templates leave out a reply's text next to its calls, or reject calls that a model did make (two at once,
        arguments that are not an object). Neither may end an episode: only the text after the reply is needed.
        """
        if after:
            before, reply = list(after[:-1]) or _PROBE[:1], after[-1]
            yield [*before, _with_reply_marker(reply)]
            if reply.tool_calls:
                yield [*before, _PROBE[1]]
                yield [_TOOL_CALL_PROBE[0], _with_reply_marker(_TOOL_CALL_PROBE[1])]
        yield _PROBE

    def _after_reply(self, text: str) -> str:
        """What a template writes after the marked reply and its end-of-turn token."""
        _, marker, after = text.rpartition(_REPLY_MARKER)
        between, end, rest = after.partition(self.end_text)
        if not marker or not end or any(token in between for token in self._boundary_tokens):
            raise ModelError(
                f"the chat template of {self.name} does not end an assistant turn with the eos token "
                f"{self.end_text!r}: set eos_token to the token that does, or use a template that ends turns with it"
            )
        return rest

    def _template(self, tools: Tools) -> Any:
        """The template in use, with the clock frozen and limits on what it may compute."""
        source: str = self.tokenizer.get_chat_template(tools=list(tools) if tools else None)
        if source not in self._templates:
            frozen = _STRFTIME_CALL.sub(lambda m: f'"{self._now.strftime(m.group(2))}"', source)
            self._templates[source] = bound_template(frozen)
        return self._templates[source]

    def _to_template_dict(self, message: Message) -> dict[str, Any]:
        """The dictionary that templates expect: arguments as objects, and no text that could become a control token."""
        guard, from_tool = self.controls.guard, message.role == "tool" or isinstance(message, UserToolResult)
        converted: dict[str, Any] = {"role": message.role, "content": guard(message.content or "", tags=from_tool)}
        if message.tool_calls:
            converted["tool_calls"] = [
                {
                    "id": self._call_id(c.id),
                    "type": "function",
                    "function": {"name": guard(c.name), "arguments": self.controls.guard_all(c.arguments)},
                }
                for c in message.tool_calls
            ]
        if message.reasoning_content is not None:
            converted["reasoning_content"] = guard(message.reasoning_content)
        if message.tool_call_id is not None:
            converted["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.name is not None:
            converted["name"] = guard(message.name)
        return converted

    def _call_id(self, call_id: str) -> str:
        """Mistral's templates require nine letters and digits; others accept any id."""
        if self._nine_letter_ids:
            return "".join(c for c in call_id if c.isascii() and c.isalnum())[-9:].rjust(9, "0")
        return self.controls.guard(call_id)


def _with_reply_marker(reply: Message) -> Message:
    """The reply with the marker as its text and as the name of its last call: every template writes one of the two."""
    calls = list(reply.tool_calls or ())
    calls[-1:] = [call.model_copy(update={"name": _REPLY_MARKER}) for call in calls[-1:]]
    return reply.model_copy(update={"content": _REPLY_MARKER, "tool_calls": calls or None})
