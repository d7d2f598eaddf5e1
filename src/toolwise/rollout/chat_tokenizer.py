"""From messages to tokens: renders conversations with a chat template, whose control tokens no message can write.

`render` and `encode` handle a whole conversation; `encode_continuation` gives the tokens between one assistant turn and
the next, so that the newline a template puts after its end-of-turn token is not lost. `TokenBuffer` (tokens.py)
combines them turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

import numpy as np

from toolwise.errors import ModelError, TemplateLimitError
from toolwise.messages import Message
from toolwise.rollout.byte_level import byte_level_decode
from toolwise.rollout.call_format import CallFormat, ParserSpec, find_format
from toolwise.rollout.control_tokens import ControlTokens, has_stock_methods, strip_guard_marks
from toolwise.rollout.parsers import Detection, explain_parser
from toolwise.rollout.template_messages import MessageStyle, choose_style
from toolwise.rollout.template_process import TemplateFaultError, render_template
from toolwise.rollout.tool_prompt import ToolPrompt, ToolPromptMode, choose_tool_prompt, shows_system
from toolwise.rollout.turn_ends import CALL, QUESTION, REPLY, after_reply, find_turn_ends, mark_reply

Tools = Sequence[dict[str, Any]] | None

ENCODE_CACHE_SIZE = 256
MAX_CACHED_CHARS = 100_000
"""Longer texts are encoded each time: they would fill the memory."""


def _plain_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """The tokenizer's `decode` with special tokens; without transformers' checks, which take longer than the decoding
    of a few tokens, where they change nothing."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stock = has_stock_methods(tokenizer, "decode", "_decode")
    if stock and backend is not None and not tokenizer.clean_up_tokenization_spaces:
        return byte_level_decode(backend) or (lambda ids: str(backend.decode(ids, skip_special_tokens=False)))
    # As an array: of a list, transformers checks the type of every element.
    return lambda ids: str(tokenizer.decode(np.array(ids, dtype=np.int64), skip_special_tokens=False))


class ChatTokenizer:
    """A tokenizer with its chat template. A reply ends with any of `stop_ids`; `end_id` is the one to write.

    `template_kwargs` are passed to the template (`enable_thinking`, `date_string`, …). A template that reads the clock
    sees the time at which this object was created (`now`): a prompt must not change at midnight. `eos_ids` are stop
    tokens that the model's settings name (`generation_config.json`), besides the tokenizer's `eos_token`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        eos_ids: Sequence[Any] = (),
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(
                "the tokenizer has no chat template: give one with model.chat_template = FILE.jinja, or add "
                "chat_template.jinja to the model's folder"
            )
        self.tokenizer = tokenizer
        self.name: str = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self.template_kwargs = dict(template_kwargs or {})
        self._check_template_kwargs()
        self.controls = ControlTokens(tokenizer)
        self._decode_ids = _plain_decode(tokenizer)
        self._now = now or datetime.now()
        self._encode_cached = lru_cache(ENCODE_CACHE_SIZE)(self._encode)
        """For the last few texts, since all rollouts of a group start with the same one; safe in several threads."""
        self.tool_prompt = ToolPrompt()
        self.style = choose_style(self._render_styled)
        self.unknown_eos_ids: tuple[str, ...] = tuple(f"{i!r:.40}" for i in eos_ids if not self._is_token(i))
        """Those of `eos_ids` that are not in the vocabulary: generation cannot stop there."""
        eos_ids = [i for i in eos_ids if self._is_token(i)]
        stops = [token for i in (tokenizer.eos_token_id, *eos_ids) if (token := self._control_text(i)) is not None]
        self.turn_ends = find_turn_ends(
            lambda messages, opened: self.render(messages, generation_prompt=opened),
            self.controls.texts,
            stops,
            name=self.name,
        )
        end_text = (*self.turn_ends.ends, *self.turn_ends.stops)[0]
        for token in (end_text, *self.turn_ends.stops):
            if len(self.controls.encode(token, "")) != 1:
                raise ModelError(f"the tokenizer does not read its own control token {token!r} as one token")
        stop_ids: list[int] = tokenizer.convert_tokens_to_ids(list(self.turn_ends.stops))
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*stop_ids, *eos_ids]))
        self.ordinary_stop_ids: tuple[int, ...] = tuple(i for i in self.stop_ids if self._control_text(i) is None)
        """Those of `eos_ids` that are tokens of ordinary text, where generation stops too."""
        self.end_id: int = tokenizer.convert_tokens_to_ids(end_text)
        self.end_text: str = end_text
        self.pad_id: int = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else self.end_id
        self._closer_ids = frozenset(tokenizer.convert_tokens_to_ids(list(self.turn_ends.closers)))
        self.set_tool_prompt()

    def find_format(self, parser: ParserSpec) -> CallFormat:
        """The format of a parser; "auto" detects it from the chat template."""
        return find_format(self.detect_format().name if parser == "auto" else parser)

    def detect_format(self) -> Detection:
        """The format in which the model calls tools, by its chat template and control tokens, and the reason."""
        return explain_parser(self.tokenizer.chat_template, self.controls.texts)

    def set_tool_prompt(self, mode: ToolPromptMode = "auto", parser: ParserSpec = "auto") -> ToolPrompt:
        """Choose how the model sees its tools (`rollout.tool_prompt`) for the given parser."""
        self.tool_prompt = ToolPrompt()  # the bare template

        def render(messages: Sequence[Message], tools: Tools) -> str:
            return strip_guard_marks(self.render(messages, tools))

        chosen = choose_tool_prompt(render, mode, self.find_format(parser))
        self.tool_prompt = replace(chosen, system_in_user=not shows_system(render))
        return self.tool_prompt

    def start(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """A whole prompt, up to where the assistant starts to write."""
        return self.encode(self.render(messages, tools))

    def encode_continuation(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        after: Sequence[Message] = (),
        closed: bool = True,
        stop_id: int | None = None,
    ) -> list[int]:
        """Tokens after an assistant's turn: `messages` and the start of the next reply.

        `after` is the conversation up to and including that assistant turn, whose content does not matter. `closed`:
        the turn has been ended, by `stop_id` or as the template ends it; otherwise its end is part of the result.
        """
        stop = None if stop_id is None else self._control_text(stop_id)
        first_error: ModelError | None = None
        for context in self._contexts(after):
            try:
                end, rest = self.turn_ends.split(after_reply(self.render([*context, *messages], tools)), stop)
            except ModelError as fault:
                first_error = first_error or fault
            else:
                # The token before the rest is encoded too: it may absorb the white space after it, and some
                # tokenizers put a space before the first token.
                before = (stop or end) if closed else end
                return self.encode((before or self.end_text) + rest)[0 if end and not closed else 1 :]
        assert first_error is not None
        raise first_error

    def reply(self, message: Message, tools: Tools = None) -> list[int]:
        """An assistant turn as the template writes it, including its end-of-turn token (for SFT)."""
        return self.encode(self.render_reply(message, tools))

    def render_reply(self, message: Message, tools: Tools = None) -> str:
        """The text of `reply`, with the marks of `ControlTokens`."""
        before = self.render([QUESTION], tools)
        rendered = self.render([QUESTION, message], tools, generation_prompt=False)
        ends = [rendered.rfind(token) + len(token) for token in self.turn_ends.stops if token in rendered]
        if not self.turn_ends.ends:  # the model writes the opening of the next message
            rendered += self.turn_ends.openings[-1 if message.tool_calls else 0]
            ends = [len(rendered)]
        if not rendered.startswith(before) or max(ends, default=0) < len(before):
            raise ModelError("the chat template does not put an assistant turn between its opening and its end")
        reply, stops = rendered[len(before) : max(ends)], self.turn_ends.stops
        # Generation ends at the first of several stops: Phi-3 ends a turn, and then the conversation.
        while (stop := next(filter(reply.endswith, stops), "")) and reply[: -len(stop)].rstrip().endswith(stops):
            reply = reply[: -len(stop)].rstrip()
        return reply

    def render(self, messages: Sequence[Message], tools: Tools = None, *, generation_prompt: bool = True) -> str:
        """The rendered text, with the marks of `ControlTokens`: for `encode` and for comparisons."""
        try:
            return self._render(messages, tools, generation_prompt)
        except RecursionError as fault:
            raise ModelError(
                "the arguments of a call, or a tool's schema, are nested too deeply: flatten them"
            ) from fault

    def _render(self, messages: Sequence[Message], tools: Tools, generation_prompt: bool) -> str:
        arranged = self.tool_prompt.arrange(messages, tools)
        if self.tool_prompt.where != "template":
            tools = None
        converted = [self.style.convert(message, self.controls) for message in arranged]
        try:
            return render_template(
                self.tokenizer.get_chat_template(tools=list(tools) if tools else None),
                {
                    **self.tokenizer.special_tokens_map,
                    **self.template_kwargs,
                    # Like transformers, without what is None: templates check whether a key is there.
                    "messages": [{k: v for k, v in message.items() if v is not None} for message in converted],
                    "tools": self.controls.guard_all(list(tools)) if tools else None,
                    "documents": None,
                    "add_generation_prompt": generation_prompt,
                },
                self._now,
            )
        except TemplateLimitError as fault:
            raise TemplateLimitError(f"the chat template of {self.name} is refused: {fault}") from fault
        except TemplateFaultError as fault:
            roles = ", ".join(m.role for m in messages)
            raise ModelError(
                f"the chat template of {self.name} fails on a conversation of [{roles}]: {fault}"
            ) from fault

    def encode(self, text: str) -> list[int]:
        return self._encode(text) if len(text) > MAX_CACHED_CHARS else self._encode_cached(text).copy()

    def _encode(self, text: str) -> list[int]:
        return self.controls.encode(text, self.controls.texts[0])

    def decode(self, token_ids: Sequence[int], stop_ids: Sequence[int] = ()) -> str:
        """The text of sampled tokens, tags included, without the tokens that ended the turn."""
        ids = list(token_ids)
        if ids and (ids[-1] in self.stop_ids or ids[-1] in stop_ids):
            ids.pop()
            while ids and ids[-1] in self._closer_ids:
                ids.pop()
        return self._decode_ids(ids)

    def dropped_space(self, token_ids: Sequence[int]) -> str:
        """The space that a reply begins with if its text leaves that out, as some tokenizers do with the first word."""
        ids = list(token_ids[:1])
        before, alone, after = (self._decode_ids(part) for part in ([self.end_id], ids, [self.end_id, *ids]))
        return " " if after == f"{before} {alone}" else ""

    def tail(self, text: str) -> str:
        """Rendered text from its last control token on: its encoding does not depend on what comes before."""
        return text[max(0, *(text.rfind(control) for control in self.controls.texts)) :]

    def _render_styled(self, style: MessageStyle, messages: Sequence[Message]) -> str:
        self.style = style
        return self.render(messages)

    def _control_text(self, token_id: int | None) -> str | None:
        """The text of a control token; None for any other id."""
        if token_id is None or not self._is_token(token_id):
            return None
        text: str = self.tokenizer.convert_ids_to_tokens(token_id)
        return text if text in self.controls.texts else None

    def _is_token(self, token_id: Any) -> bool:
        integer = hasattr(token_id, "__index__") and not isinstance(token_id, bool)
        return integer and 0 <= token_id < len(self.tokenizer)

    def _check_template_kwargs(self) -> None:
        """A misspelt name would be ignored by the template without a word."""
        templates = self.tokenizer.chat_template
        texts = list(templates.values()) if isinstance(templates, dict) else [templates]
        if not all(isinstance(text, str) for text in texts):
            raise ModelError(f"the chat template of {self.name} is not text: {templates!r:.80}")
        source = "\n".join(texts)
        unknown = [name for name in self.template_kwargs if not re.search(rf"\b{re.escape(name)}\b", source)]
        if unknown:
            raise ModelError(
                f"model.template_kwargs: the chat template of {self.name} does not read {', '.join(unknown)}: check "
                "the spelling, or remove it"
            )

    def _contexts(self, after: Sequence[Message]) -> Iterator[list[Message]]:
        """Conversations that end in a reply marked so that it can be found again, most similar to `after` first.

        Templates leave out a reply's text next to its calls, or reject calls that a model did make (two at once,
        arguments that are not an object). Neither may end an episode: only the text after the reply is needed.
        """
        if after:
            before, reply = list(after[:-1]) or [QUESTION], after[-1]
            yield [*before, mark_reply(reply)]
            if reply.tool_calls:
                yield [*before, REPLY]
                yield [QUESTION, mark_reply(CALL)]
        yield [QUESTION, REPLY]
