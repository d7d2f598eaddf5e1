"""From messages to tokens: what a chat template writes, in context, with control tokens that only it can write.

`render` and `encode` give the template's word on a whole conversation; `encode_continuation` what stands between one
assistant turn
and the next, so that the newline a template puts after its end-of-turn token is not lost. `TokenBuffer` (tokens.py)
puts them together, turn by turn.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from toolwise.errors import ModelError, TemplateLimitError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.control_tokens import ControlTokens, strip_guard_marks
from toolwise.rollout.parsers import detect_parser
from toolwise.rollout.template_limits import bound_template, budget
from toolwise.rollout.tool_prompt import ToolPrompt, ToolPromptMode, UserToolResult, choose_tool_prompt

Tools = Sequence[dict[str, Any]] | None

# Drawn anew for each process: nobody who writes a message can know it, and it never becomes a token.
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

    `template_kwargs` are handed to the template (`enable_thinking`, `date_string`, …). A template that looks at the
    clock sees the time at which this object was made (`now`): a prompt must not change at midnight.
    """

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, now: datetime | None = None
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template: add chat_template.jinja to the model's folder")
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer names no eos_token: set it to the token that ends an assistant turn")
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
        """The last few texts: all rollouts of a group begin with the same."""
        self._nine_letter_ids = False
        self.tool_prompt = ToolPrompt()
        self._check()
        self.set_tool_prompt()

    def set_tool_prompt(self, mode: ToolPromptMode = "auto", parser: str = "auto") -> ToolPrompt:
        """Decides how the model is told of its tools (`rollout.tool_prompt`), for a run's parser."""
        if parser == "auto":
            parser = detect_parser(self.tokenizer.chat_template, self.controls.texts)
        self.tool_prompt = ToolPrompt()  # as the template has it
        self.tool_prompt = choose_tool_prompt(lambda m, t: strip_guard_marks(self.render(m, t)), mode, parser)
        return self.tool_prompt

    def start(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """A whole prompt, up to where the assistant begins to write."""
        return self.encode(self.render(messages, tools))

    def encode_continuation(
        self, messages: Sequence[Message], tools: Tools = None, *, after: Sequence[Message] = ()
    ) -> list[int]:
        """What comes after an assistant's end-of-turn token: `messages` and the beginning of the next reply.

        `after` is the conversation up to and with that assistant's turn. What the turn itself says does not matter.
        """
        refused: ModelError | None = None
        for context in self._contexts(after):
            try:
                rest = self._after_reply(self.render([*context, *messages], tools))
            except ModelError as fault:
                refused = refused or fault
            else:
                # The end-of-turn token is encoded too and then left off: it may swallow the white space after it, and
                # some tokenizers put a space before whatever comes first.
                return self.encode(self.end_text + rest)[1:]
        assert refused is not None
        raise refused

    def reply(self, message: Message, tools: Tools = None) -> list[int]:
        """An assistant's turn as the template writes it, its end-of-turn token included (for supervised learning)."""
        before = self.render(_PROBE[:1], tools)
        whole = self.render([_PROBE[0], message], tools, generation_prompt=False)
        cut = whole.rfind(self.end_text) + len(self.end_text)
        if not whole.startswith(before) or cut < len(before):
            raise ModelError("the chat template does not put an assistant turn between its opening and the eos token")
        return self.encode(whole[len(before) : cut])

    def render(self, messages: Sequence[Message], tools: Tools = None, *, generation_prompt: bool = True) -> str:
        """What the template writes, with the marks of `ControlTokens`: for `encode`, and for comparing."""
        arranged = self.tool_prompt.arrange(messages, tools)
        if self.tool_prompt.where != "template":
            tools = None
        try:
            plain = [self._to_template_dict(m) for m in arranged]
            with budget(sum(len(message["content"]) for message in plain)):
                text: str = self.tokenizer.apply_chat_template(
                    plain,
                    tools=self.controls.guard_all(list(tools)) if tools else None,
                    chat_template=self._template(tools),
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self.template_kwargs,
                )
        except TemplateLimitError as fault:
            raise TemplateLimitError(f"the chat template of {self.name} is refused: {fault}") from fault
        except Exception as fault:  # a template is a program, and can fail in any way that one can
            words = " ".join(str(fault).split()) or type(fault).__name__
            roles = ", ".join(m.role for m in messages)
            raise ModelError(
                f"the chat template of {self.name} fails on a conversation of [{roles}]: {words}"
            ) from fault
        return text

    def encode(self, text: str) -> list[int]:
        found = self._encode_cache.get(text)
        if found is None:
            found = self.controls.encode(text, self.end_text)
            if len(self._encode_cache) >= ENCODE_CACHE_SIZE:
                self._encode_cache.clear()
            self._encode_cache[text] = found
        return found.copy()

    def decode(self, token_ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """The text of sampled tokens, tags kept, without the token that ended the turn."""
        ids = list(token_ids)
        if ids and (ids[-1] == self.end_id or ids[-1] in stop_ids):
            ids.pop()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def tail(self, text: str) -> str:
        """Rendered text from its last control token on: what is encoded there does not depend on what was before."""
        return text[max(0, *(text.rfind(control) for control in (self.end_text, *self._boundary_tokens))) :]

    def _check(self) -> None:
        """Find out now, and not in the middle of a rollout, that a template cannot hold a conversation."""
        if self.encode(self.end_text) != [self.end_id]:
            raise ModelError(f"the tokenizer does not read its own eos token {self.end_text!r} as one token")
        self._boundary_tokens = self.controls.texts
        text = self.render(_PROBE, generation_prompt=False)
        self._after_reply(text)
        # From here on a reply may hold control tokens of its own, around its calls, but none that begins another turn.
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
        """Conversations that end in a reply that can be found again, the likest to `after` first.

        Templates leave a reply's text out beside its calls, or refuse calls that a model did make (two at once,
        arguments that are no object). Neither may end an episode: what follows the reply is all that is wanted.
        """
        if after:
            before, reply = list(after[:-1]) or _PROBE[:1], after[-1]
            yield [*before, _with_reply_marker(reply)]
            if reply.tool_calls:
                yield [*before, _PROBE[1]]
                yield [_TOOL_CALL_PROBE[0], _with_reply_marker(_TOOL_CALL_PROBE[1])]
        yield _PROBE

    def _after_reply(self, text: str) -> str:
        """What a template writes after the probe's reply and the end-of-turn token that closes it."""
        _, found, after = text.rpartition(_REPLY_MARKER)
        between, end, rest = after.partition(self.end_text)
        if not found or not end or any(token in between for token in self._boundary_tokens):
            raise ModelError(
                f"the chat template of {self.name} does not end an assistant turn with the eos token "
                f"{self.end_text!r}: set eos_token to the token that does, or use a template that ends turns with it"
            )
        return rest

    def _template(self, tools: Tools) -> Any:
        """The template in use, with the clock stopped and an end to whatever it does."""
        source: str = self.tokenizer.get_chat_template(tools=list(tools) if tools else None)
        if source not in self._templates:
            stopped = _STRFTIME_CALL.sub(lambda m: f'"{self._now.strftime(m.group(2))}"', source)
            self._templates[source] = bound_template(stopped)
        return self._templates[source]

    def _to_template_dict(self, message: Message) -> dict[str, Any]:
        """The dictionary templates expect: arguments as objects, and nothing in it that could be a control token."""
        guard, from_tool = self.controls.guard, message.role == "tool" or isinstance(message, UserToolResult)
        plain: dict[str, Any] = {"role": message.role, "content": guard(message.content or "", tags=from_tool)}
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": self._call_id(c.id),
                    "type": "function",
                    "function": {"name": guard(c.name), "arguments": self.controls.guard_all(c.arguments)},
                }
                for c in message.tool_calls
            ]
        if message.reasoning_content is not None:
            plain["reasoning_content"] = guard(message.reasoning_content)
        if message.tool_call_id is not None:
            plain["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.name is not None:
            plain["name"] = guard(message.name)
        return plain

    def _call_id(self, call_id: str) -> str:
        """Mistral's templates want nine letters and digits; others take whatever there is."""
        if self._nine_letter_ids:
            return "".join(c for c in call_id if c.isascii() and c.isalnum())[-9:].rjust(9, "0")
        return self.controls.guard(call_id)


def _with_reply_marker(reply: Message) -> Message:
    """The reply with a known word as its text and as its last call's name, one of which every template writes."""
    calls = list(reply.tool_calls or ())
    calls[-1:] = [call.model_copy(update={"name": _REPLY_MARKER}) for call in calls[-1:]]
    return reply.model_copy(update={"content": _REPLY_MARKER, "tool_calls": calls or None})
