"""The OpenAI form of a chat completion: the whole answer, or the chunks of a stream and their server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as json_string
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from toolwise.protocols import Generation
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve.request import ChatRequest

if TYPE_CHECKING:
    from toolwise.engine.request import SampledPiece

LOGPROBS_STAGE = "after temperature, before top_p, top_k and grammars"
"""Which distribution log-probs come from: the model's own."""
DONE = "data: [DONE]\n\n"
_TEXT = "\N{REPLACEMENT CHARACTER}text\N{REPLACEMENT CHARACTER}"
"""Where the text of an event goes."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all chunks of an answer have in common."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Completion:
    """One completion in the making: its head, and what the chunks of a stream have said so far."""

    head: AnswerHead
    request: ChatRequest
    prompt: Sequence[int]
    _begun: set[int] = field(default_factory=set)
    _results: list[Generation] = field(default_factory=list)
    _around_text: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The event of each choice, but for its text."""

    @property
    def ended(self) -> bool:
        return len(self._results) == self.request.n

    def answer(self, choices: list[dict[str, Any]], results: Sequence[Generation]) -> dict[str, Any]:
        return {
            **self.head.fields("chat.completion"),
            "choices": choices,
            **self._figures(results),
            **({"prompt_token_ids": list(self.prompt)} if self.request.return_token_ids else {}),
        }

    def delta(
        self,
        index: int,
        fields: dict[str, Any],
        entries: list[dict[str, Any]] | None,
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """A chunk with more of the message; None if there is nothing to say."""
        ids: dict[str, Any] = {"token_ids": list(token_ids)} if self.request.return_token_ids else {}
        if not fields and not entries and not ids:
            return None
        return self._chunk(index, fields or {"content": ""}, **self._logprobs(entries), **ids)

    def event_of(
        self,
        index: int,
        fields: dict[str, Any],
        entries: list[dict[str, Any]] | None = None,
        token_ids: Sequence[int] = (),
    ) -> bytes | None:
        """`delta` as a server-sent event. Mostly there is text and nothing else to say, and the rest of the event is
        always the same."""
        request = self.request
        if entries is None and fields.keys() == {"content"} and index in self._begun and not request.return_token_ids:
            around = self._around_text.get(index)
            if around is None:
                before, _, after = event(self._chunk(index, {"content": _TEXT})).rpartition(json.dumps(_TEXT))
                around = self._around_text[index] = before, after
            return f"{around[0]}{json_string(fields['content'])}{around[1]}".encode("ascii")
        chunk = self.delta(index, fields, entries, token_ids)
        return None if chunk is None else event(chunk).encode()

    def end_choice(
        self, index: int, rest: dict[str, Any], finish_reason: str, result: Generation
    ) -> Iterator[dict[str, Any]]:
        """The rest of a choice's message, and its end."""
        self._results.append(result)
        if rest or index not in self._begun:
            yield self._chunk(index, rest)
        yield self._chunk(index, {}, finish_reason) | {"policy_version": result.policy_version}

    def last(self) -> dict[str, Any]:
        """The last chunk of a stream: usage, and no choices."""
        return self.head.fields("chat.completion.chunk") | {"choices": []} | self._figures(self._results)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        chunk = self.head.fields("chat.completion.chunk")
        if index not in self._begun:
            delta = {"role": "assistant", "content": ""} | delta
            if self.request.return_token_ids and not self._begun:
                chunk["prompt_token_ids"] = list(self.prompt)
            self._begun.add(index)
        return chunk | {"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, **more}]}

    def _figures(self, results: Sequence[Generation]) -> dict[str, Any]:
        sampled = sum(len(result.token_ids) for result in results)
        prompt = len(self.prompt)
        return {
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
            "policy_version": min(result.policy_version for result in results),
        }

    @staticmethod
    def _logprobs(entries: list[dict[str, Any]] | None) -> dict[str, Any]:
        return {} if entries is None else {"logprobs": {"content": entries, "stage": LOGPROBS_STAGE}}


def logprob_entries(
    chat: ChatTokenizer, request: ChatRequest, sampled: Generation | SampledPiece
) -> list[dict[str, Any]]:
    """Tokens with their log-probs and, if they were asked for, the likeliest tokens at each position."""
    tops = sampled.top_logprobs or [()] * len(sampled.token_ids)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        # `decode` strips a final end token, so append one.
        named = request.return_tokens_as_token_ids
        token = f"token_id:{token_id}" if named else chat.decode([token_id, chat.end_id])
        return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}

    return [
        entry(token_id, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
        for token_id, logprob, top in zip(sampled.token_ids, sampled.logprobs, tops, strict=True)
    ]


def completion_events(answer: dict[str, Any]) -> Iterator[str]:
    """A complete answer as server-sent events: each choice's message in one piece, then its end, then usage, then
    [DONE]."""
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        delta = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
        yield event({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        yield event(
            {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]}
        )
    extra = ("usage", "prompt_token_ids", "policy_version")
    yield event({**head, "choices": [], **{key: answer[key] for key in extra if key in answer}})
    yield DONE


def event(value: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(value)}\n\n"
