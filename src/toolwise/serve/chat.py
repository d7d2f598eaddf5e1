"""One chat completion: messages to tokens, tokens to more tokens, and those to OpenAI's answer."""

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
"""For text: parsing, rendering and tokenising would keep the event loop from everybody else's requests."""


async def _run_in_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *arguments)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on offer: its name to clients, what generates, and how its text is read."""

    name: str
    generator: TokenGenerator
    chat: ChatTokenizer
    sampling: Sampling
    """What holds where a request says nothing."""
    parser: str = "hermes"
    max_context: int = MAX_CONTEXT_TOKENS
    """Tokens of a prompt and its completion; text that cannot fit is refused before it is tokenised."""
    limits: TextLimits = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", TextLimits.of(self.chat.tokenizer, self.max_context))

    @classmethod
    def of(cls, policy: LocalPolicy, name: str, *, parser: str = "hermes") -> ServedModel:
        """A local policy's model. Requests that come together are generated together. The policy belongs to the
        server's event loop from then on: whoever wants the model elsewhere makes another policy over it."""
        return cls(name, policy, policy.chat, policy.sampling, parser, policy.max_context)

    async def read(self, raw: bytes) -> ChatRequest:
        return await _run_in_thread(read_request, raw)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        if request.model != self.name:
            raise BadRequestError(
                f"there is no model {request.model!r} here; there is: {self.name}",
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
        except Exception as fault:  # a template is a program of the model's: whatever it raises, it was over this
            reason = " ".join(f"{type(fault).__name__}: {fault}".split())
            raise BadRequestError(f"the model's chat template refuses this: {reason}", param="messages") from fault
        if not prompt:
            raise BadRequestError("the messages give a prompt of no tokens", param="messages")
        return prompt

    def _samplings(self, request: ChatRequest) -> list[Sampling]:
        """One a choice, each with a seed of its own; the first has the seed that was asked for."""
        given = self.sampling.temperature if request.temperature is None else request.temperature
        do_sample = self.sampling.do_sample if request.temperature is None else given > 0
        seed = secrets.randbits(62) if request.seed is None else request.seed
        return [
            Sampling(
                temperature=given if do_sample else 1.0,
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
        else:  # an end token after each, because `decode` leaves one out and would make nothing of the last
            tokens = [self.chat.decode([token, self.chat.end_id]) for token in result.token_ids]
        return [
            {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace")), "top_logprobs": []}
            for token, logprob in zip(tokens, result.logprobs, strict=True)
        ]


def error_response(fault: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body, as OpenAI writes errors."""
    if isinstance(fault, BadRequestError):
        kind, param, code, status = "invalid_request_error", fault.param, fault.code, fault.status
    elif isinstance(fault, PolicyError):
        kind, param, code, status = "server_error", None, None, 500
    else:  # ours to mend: the client learns that it was not its request, and no more
        return 500, {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}}
    message = " ".join(str(fault).split())[:MAX_MESSAGE_CHARS]
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}
