"""One chat completion: messages to tokens, generation, and tokens to an OpenAI response."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from toolwise.concurrency.deadlines import gather_all
from toolwise.errors import ContextFullError, PolicyError
from toolwise.protocols import Generation, Sampling, TokenGenerator
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.parsers import PARSERS
from toolwise.serve.limits import MAX_CONTEXT_TOKENS, TextLimits
from toolwise.serve.request import BadRequestError, ChatRequest, read_request

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

T = TypeVar("T")
MAX_MESSAGE_CHARS = 1_000
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="toolwise-serve-text")
"""For parsing, rendering and tokenising, which would block the event loop for other requests."""


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model to serve: its public name, its generator, and its tokenizer and tool-call parser."""

    name: str
    generator: TokenGenerator
    chat: ChatTokenizer
    sampling: Sampling
    """Defaults for what a request leaves out."""
    parser: str = "hermes"
    max_context: int = MAX_CONTEXT_TOKENS
    """Tokens of prompt and completion; text that cannot fit is rejected before it is tokenised."""
    limits: TextLimits = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", TextLimits.of(self.chat.tokenizer, self.max_context))

    @classmethod
    def of(cls, policy: LocalPolicy, name: str, *, parser: str = "hermes") -> ServedModel:
        """Serve a local policy's model. Concurrent requests are batched. The policy then belongs to the server's event
        loop; to use the model elsewhere, create another policy over it."""
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
        answer: dict[str, Any] = {
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
        }
        if request.return_token_ids:
            answer["prompt_token_ids"] = prompt
        return answer

    def _prompt(self, request: ChatRequest) -> list[int]:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        try:
            text = self.chat.render(request.messages, tools or None)
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
                stop_token_ids=(self.chat.end_id, *(request.stop_token_ids or ())),
            )
            for index in range(request.n)
        ]

    def _choice(self, request: ChatRequest, index: int, result: Generation) -> dict[str, Any]:
        text = self.chat.decode(result.token_ids)
        parses = bool(request.tools) and request.tool_choice != "none"
        content, calls = PARSERS[self.parser](text) if parses else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = [call.to_openai() for call in calls]
        choice: dict[str, Any] = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls and result.finish_reason == "stop" else result.finish_reason,
            "logprobs": {"content": self._logprobs(request, result)} if request.logprobs else None,
        }
        if request.return_token_ids:
            choice["token_ids"] = list(result.token_ids)
        return choice

    def _logprobs(self, request: ChatRequest, result: Generation) -> list[dict[str, Any]]:
        if request.return_tokens_as_token_ids:
            tokens = [f"token_id:{token}" for token in result.token_ids]
        else:  # `decode` strips a final end token, so append one
            tokens = [self.chat.decode([token, self.chat.end_id]) for token in result.token_ids]
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
            for token, logprob in zip(tokens, result.logprobs, strict=True)
        ]


def error_response(fault: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body in the OpenAI error format."""
    if isinstance(fault, BadRequestError):
        kind, param, code, status = "invalid_request_error", fault.param, fault.code, fault.status
    elif isinstance(fault, PolicyError):
        kind, param, code, status = "server_error", None, None, 500
    else:  # a bug in the server: reveal no details to the client
        return 500, {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}}
    message = " ".join(str(fault).split())[:MAX_MESSAGE_CHARS]
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
