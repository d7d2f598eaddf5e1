"""One chat completion: messages to tokens, generation, and tokens to an OpenAI response or stream events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from toolwise.concurrency.deadlines import gather_all
from toolwise.errors import ContextFullError, PolicyError
from toolwise.protocols import Generation, Sampling, TokenGenerator
from toolwise.rollout.call_format import CallFormat, ParserSpec
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.parsers import reasoning_of
from toolwise.serve.request import BadRequestError, ChatRequest, error_body, read_request

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

T = TypeVar("T")
MAX_MESSAGE_CHARS = 1_000
MAX_REQUEST_BODY_BYTES = 32_000_000
MIN_REQUEST_BODY_BYTES = 1_000_000
MAX_CONTEXT_TOKENS = 1 << 20
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="toolwise-serve-text")
"""For parsing, rendering and tokenising, which would block the event loop for other requests."""


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Upper bounds on text that can fit the context, without tokenising it."""

    prompt_chars: int
    """For the rendered prompt: no token covers more characters than the longest entry of the vocabulary."""
    body_bytes: int

    @classmethod
    def of(cls, tokenizer: Any, max_context: int) -> TextLimits:
        longest = max((len(text) for text in tokenizer.get_vocab()), default=1)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # A normaliser may merge characters before the lookup: at most three (Hangul), so a factor of four is safe.
        joined = 4 if backend is None or backend.normalizer is not None else 1
        chars = min(max_context, MAX_CONTEXT_TOKENS) * max(longest, 16) * joined
        # JSON may escape a character as six bytes, and templates drop some of their input.
        return cls(chars, min(MIN_REQUEST_BODY_BYTES + 6 * chars, MAX_REQUEST_BODY_BYTES))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve: its public name, its generator, and its tokenizer and tool-call parser."""

    name: str
    generator: TokenGenerator
    chat: ChatTokenizer
    sampling: Sampling
    """Defaults for what a request leaves out."""
    parser: ParserSpec = "auto"
    """"auto": the format that the model's chat template shows."""
    max_context: int = MAX_CONTEXT_TOKENS
    """Tokens of prompt and completion; text that cannot fit is rejected before it is tokenised."""
    limits: TextLimits = field(init=False)
    call_format: CallFormat = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "call_format", self.chat.find_format(self.parser))
        object.__setattr__(self, "limits", TextLimits.of(self.chat.tokenizer, self.max_context))

    @classmethod
    def of(cls, policy: LocalPolicy, name: str, *, parser: ParserSpec | None = None) -> ServedModel:
        """Serve a local policy's model; `parser` replaces the policy's own. Concurrent requests are batched. The policy
        then belongs to the server's event loop; to use the model elsewhere, create another policy over it."""
        parser = policy.call_format if parser is None else parser
        return cls(name, policy, policy.chat, policy.sampling, parser, policy.max_context)

    async def read(self, raw: bytes) -> ChatRequest:
        return await _run_in_thread(read_request, raw)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        if request.model != self.name:
            raise BadRequestError(
                f"model {request.model!r} not found; available: {self.name}",
                param="model",
                code="model_not_found",
                status=404,
            )
        prompt = await _run_in_thread(self._prompt, request)
        try:
            results = await gather_all(self.generator.generate(prompt, s) for s in self._samplings(request))
        except ContextFullError as full:
            raise BadRequestError(str(full), param="messages", code="context_length_exceeded") from full
        return await _run_in_thread(self._answer, request, prompt, results)

    def _answer(self, request: ChatRequest, prompt: list[int], results: Sequence[Generation]) -> dict[str, Any]:
        sampled = sum(len(result.token_ids) for result in results)
        return {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [self._choice(request, index, result) for index, result in enumerate(results)],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": sampled,
                "total_tokens": len(prompt) + sampled,
            },
            "policy_version": min(result.policy_version for result in results),
            **({"prompt_token_ids": prompt} if request.return_token_ids else {}),
        }

    def _prompt(self, request: ChatRequest) -> list[int]:
        try:
            text = self.chat.render(request.messages, _specs(request) or None)
            if len(text) > self.limits.prompt_chars:
                raise BadRequestError(
                    f"a prompt of {len(text)} characters cannot fit the model's {self.max_context} tokens: shorten it",
                    param="messages",
                    code="context_length_exceeded",
                )
            prompt = self.chat.encode(text)
        except BadRequestError:
            raise
        except Exception as fault:  # a template is code of the model and may raise anything
            reason = " ".join(f"{type(fault).__name__}: {fault}".split())
            raise BadRequestError(
                f"the model's chat template rejects these messages: {reason}", param="messages"
            ) from fault
        if not prompt:
            raise BadRequestError("the messages render to an empty prompt", param="messages")
        return prompt

    def _samplings(self, request: ChatRequest) -> list[Sampling]:
        """One per choice, each with its own seed; the first uses the requested seed."""
        temperature = self.sampling.temperature if request.temperature is None else request.temperature
        do_sample = self.sampling.do_sample if request.temperature is None else temperature > 0
        seed = secrets.randbits(62) if request.seed is None else request.seed
        return [
            Sampling(
                temperature=temperature if do_sample else 1.0,
                max_new_tokens=request.max_completion_tokens or request.max_tokens or self.sampling.max_new_tokens,
                do_sample=do_sample,
                seed=(seed + index * 0x9E37_79B9_7F4A_7C15) & 0x7FFF_FFFF_FFFF_FFFF,
                stop_token_ids=(*self.chat.stop_ids, *(request.stop_token_ids or ())),
            )
            for index in range(request.n)
        ]

    def _choice(self, request: ChatRequest, index: int, result: Generation) -> dict[str, Any]:
        text = self.chat.decode(result.token_ids)
        parses = bool(request.tools) and request.tool_choice != "none"
        reply = self.call_format.parse_for(text, _specs(request)) if parses else (text, [])
        (content, calls), reasoning = reply, reasoning_of(reply)
        if result.finish_reason == "length":  # calls in a reply that was cut off were not made
            content, calls = text, []
        more: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        more |= {"tool_calls": [call.to_openai() for call in calls]} if calls else {}
        return {
            "index": index,
            "message": {"role": "assistant", "content": content if content or not calls else None, **more},
            "finish_reason": "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason,
            "logprobs": {"content": self._logprobs(request, result)} if request.logprobs else None,
            **({"token_ids": list(result.token_ids)} if request.return_token_ids else {}),
        }

    def _logprobs(self, request: ChatRequest, result: Generation) -> list[dict[str, Any]]:
        if request.return_tokens_as_token_ids:
            tokens = [f"token_id:{token}" for token in result.token_ids]
        else:  # `decode` strips a final end token, so append one
            tokens = [self.chat.decode([token, self.chat.end_id]) for token in result.token_ids]
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
            for token, logprob in zip(tokens, result.logprobs, strict=True)
        ]


def _specs(request: ChatRequest) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in request.tools or ()]


def error_response(fault: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body in the OpenAI error format."""
    message = " ".join(str(fault).split())[:MAX_MESSAGE_CHARS]
    if isinstance(fault, BadRequestError):
        return fault.status, error_body(message, param=fault.param, code=fault.code)
    known = isinstance(fault, PolicyError)  # any other is a bug in the server: reveal no details to the client
    return 500, error_body(message if known else "internal error", "server_error")


def completion_events(answer: dict[str, Any]) -> Iterator[str]:
    """Server-sent events, for clients that require streaming: each choice's message in one piece (tokens are not sent
    one by one), then its end, then usage, then [DONE]."""
    head = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        delta = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        rest = {key: value for key, value in choice.items() if key not in ("message", "finish_reason")}
        yield _event({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
        yield _event(
            {**head, "choices": [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]}
        )
    extra = ("usage", "prompt_token_ids", "policy_version")
    yield _event({**head, "choices": [], **{key: answer[key] for key in extra if key in answer}})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
