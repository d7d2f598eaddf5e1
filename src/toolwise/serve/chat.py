"""`ServedModel`: a model behind chat completions. The client runs the tools; see `agent_chat.py` for an agent that runs
its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.deadlines import gather_all
from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.concurrency.text_threads import run_if_long, run_in_thread
from toolwise.errors import ContextFullError, PolicyError
from toolwise.protocols import Generation, Sampling, TokenGenerator
from toolwise.rollout.call_format import CallFormat, ParserSpec
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.rollout.parsers.json_calls import THOUGHT_OPENINGS
from toolwise.serve.choice_stream import ChoiceStream, cut_at_stop, reply_fields
from toolwise.serve.completion import LOGPROBS_STAGE, AnswerHead, Completion, completion_events, logprob_entries
from toolwise.serve.constraints import ReplyConstraints, asks_for_grammar, tool_specs
from toolwise.serve.event_stream import ShortCut
from toolwise.serve.limits import (
    MAX_CONTEXT_TOKENS,
    MAX_REQUEST_BODY_BYTES,
    TextLimits,
    check_chars,
    check_model,
    check_new_tokens,
)
from toolwise.serve.model_stream import ModelStream
from toolwise.serve.request import BadRequestError, ChatRequest, error_body, read_request, unsupported

if TYPE_CHECKING:
    from toolwise.engine.grammar import Constraint
    from toolwise.engine.request import SampledPiece
    from toolwise.policies.local import LocalPolicy

__all__ = ["MAX_REQUEST_BODY_BYTES", "ServedModel", "TextLimits", "completion_events", "error_response"]

MAX_MESSAGE_CHARS = 1_000
_PROMPT_TAIL_CHARS = 64


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: list[int]
    thought_open: bool
    """Whether it ends inside a thought."""
    constraint: Constraint | None = None


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
    max_new_tokens: int | None = None
    """The most new tokens that a request may ask for; None: as many as fit the context."""
    limits: TextLimits = field(init=False)
    call_format: CallFormat = field(init=False)
    _constraints: ReplyConstraints | None = field(init=False)
    """None: the generator knows neither grammars nor other options than those of training."""

    def __post_init__(self) -> None:
        from toolwise.engine import Engine
        from toolwise.policies.local import LocalPolicy

        object.__setattr__(self, "call_format", self.chat.find_format(self.parser))
        object.__setattr__(self, "limits", TextLimits.of(self.chat.tokenizer, self.max_context))
        is_engine = isinstance(self.generator, LocalPolicy) and isinstance(self.generator.engine, Engine)
        constraints = ReplyConstraints(self.generator, self.call_format) if is_engine else None  # type: ignore[arg-type]
        object.__setattr__(self, "_constraints", constraints)

    @classmethod
    def of(
        cls, policy: LocalPolicy, name: str, *, parser: ParserSpec | None = None, max_new_tokens: int | None = None
    ) -> ServedModel:
        """Serve a local policy's model; `parser` replaces the policy's own. Concurrent requests are batched. The policy
        then belongs to the server's event loop; to use the model elsewhere, create another policy over it."""
        parser = policy.call_format if parser is None else parser
        return cls(name, policy, policy.chat, policy.sampling, parser, policy.max_context, max_new_tokens)

    def metrics(self) -> Mapping[str, float]:
        from toolwise.policies.local import LocalPolicy

        return self.generator.metrics() if isinstance(self.generator, LocalPolicy) else {}

    def close(self) -> None:
        from toolwise.policies.local import LocalPolicy

        if isinstance(self.generator, LocalPolicy):
            self.generator.close()

    async def read(self, raw: bytes) -> ChatRequest:
        return await run_if_long(len(raw), read_request, raw)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        prompt = await self._prepare(request)
        samplings = self._samplings(request)
        try:
            results = await gather_all(self._generate(request, prompt, s) for s in samplings)
        except ContextFullError as full:
            raise _context_full(full) from full
        return await run_in_thread(self._answer, request, prompt, results)

    async def stream(self, request: ChatRequest, short_cut: ShortCut | None = None) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a completion while it is sampled. The choices come interleaved; the last chunk has the usage
        and no choices."""
        prompt = await self._prepare(request)
        completion = Completion(AnswerHead(self.name), request, prompt.ids)
        streams = [self._choice_stream(request, prompt) for _ in range(request.n)]
        stream = ModelStream(self.chat, completion, streams, short_cut or ShortCut(), self._merges_pieces)
        tasks = [
            spawn(self._generate(request, prompt, sampling, partial(stream.add, index)))
            for index, sampling in enumerate(self._samplings(request))
        ]
        for index, task in enumerate(tasks):
            task.add_done_callback(partial(stream.add, index))
        try:
            while not completion.ended:
                index, event = await stream.next()
                if isinstance(event, asyncio.Task):
                    result = event.result()
                    if self._constraints is None and (chunk := stream.chunk(index, result)):
                        yield chunk
                    text = self.chat.decode(result.token_ids, request.stop_token_ids or ())
                    finish_reason: str = result.finish_reason
                    if self._cut(text, request, result) is not None:
                        finish_reason = "stop"
                    rest = streams[index].finish(text, finish_reason)
                    if streams[index].called and finish_reason == "stop":
                        finish_reason = "tool_calls"
                    for chunk in completion.end_choice(index, rest, finish_reason, result):
                        yield chunk
                elif chunk := stream.chunk(index, event):
                    yield chunk
        except ContextFullError as full:
            raise _context_full(full) from full
        finally:
            for task in tasks:
                task.cancel()
            await wait_all(tasks)
        yield completion.last()

    @property
    def _merges_pieces(self) -> bool:
        """Whether a chunk may have tokens of several steps."""
        return self._constraints is not None and self._constraints.stream_interval_s > 0

    async def _generate(
        self,
        request: ChatRequest,
        prompt: _Prompt,
        sampling: Sampling,
        on_sampled: Callable[[SampledPiece], None] | None = None,
    ) -> Generation:
        if self._constraints is None:
            return await self.generator.generate(prompt.ids, sampling)
        from toolwise.engine.request import ServingOptions

        options = ServingOptions(
            1.0 if request.top_p is None else request.top_p,
            max(0, request.top_k or 0),
            request.top_logprobs,
            on_sampled,
        )
        from toolwise.engine.grammar import GrammarError

        try:
            return await self._constraints.policy.generate(
                prompt.ids, sampling, constraint=prompt.constraint, stop_strings=request.stop, options=options
            )
        except GrammarError as fault:  # too complex to follow: the client chose it
            raise BadRequestError(str(fault), param=asks_for_grammar(request)) from fault

    async def _prepare(self, request: ChatRequest) -> _Prompt:
        """Check the request, render its prompt and compile its grammar."""
        check_model(request, self.name)
        for name in ("budget", "route", "max_cost"):
            if getattr(request, name) is not None:
                raise unsupported(name, "in mode model: the client runs the tools")
        check_new_tokens(request, self.max_new_tokens)
        changed = [name for name in request.changed_options() if name != "stop"]
        if changed and self._constraints is None:
            raise unsupported(changed[0], "by this server's generator")
        if self._constraints is not None:
            self._constraints.check_stops(request.stop_token_ids or ())
        prompt = await run_in_thread(self._prompt, request)
        return prompt if self._constraints is None else replace(prompt, constraint=await self._constraints.of(request))

    def _answer(self, request: ChatRequest, prompt: _Prompt, results: Sequence[Generation]) -> dict[str, Any]:
        choices = [self._choice(request, prompt, index, result) for index, result in enumerate(results)]
        return Completion(AnswerHead(self.name), request, prompt.ids).answer(choices, results)

    def _prompt(self, request: ChatRequest) -> _Prompt:
        try:
            text = self.chat.render(request.messages, tool_specs(request) or None)
            check_chars(len(text), self.limits, self.max_context)
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
        return _Prompt(prompt, opens_thought(text))

    def _max_new_tokens(self, request: ChatRequest) -> int:
        default = self.sampling.max_new_tokens
        if self.max_new_tokens is not None:
            default = min(default, self.max_new_tokens)
        return request.max_completion_tokens or request.max_tokens or default

    def _samplings(self, request: ChatRequest) -> list[Sampling]:
        """One per choice, each with its own seed; the first uses the requested seed."""
        temperature = self.sampling.temperature if request.temperature is None else request.temperature
        do_sample = self.sampling.do_sample if request.temperature is None else temperature > 0
        seed = secrets.randbits(62) if request.seed is None else request.seed
        return [
            Sampling(
                temperature=temperature if do_sample else 1.0,
                max_new_tokens=self._max_new_tokens(request),
                do_sample=do_sample,
                seed=(seed + index * 0x9E37_79B9_7F4A_7C15) & 0x7FFF_FFFF_FFFF_FFFF,
                stop_token_ids=(*(() if request.ignore_eos else self.chat.stop_ids), *(request.stop_token_ids or ())),
            )
            for index in range(request.n)
        ]

    def _choice_stream(self, request: ChatRequest, prompt: _Prompt) -> ChoiceStream:
        parses = bool(request.tools) and request.tool_choice != "none"
        stops = request.stop_token_ids or ()
        return ChoiceStream(
            lambda ids: self.chat.decode(ids, stops),
            request.stop,
            self.call_format.stream(prompt.thought_open, tool_specs(request)) if parses else None,
            None if request.parallel_tool_calls else 1,
            dropped_space=self.chat.dropped_space,
        )

    def _cut(self, text: str, request: ChatRequest, result: Generation) -> str | None:
        """The text before the first stop string, if there is one."""
        return cut_at_stop(text, request.stop, self.chat.dropped_space(result.token_ids)) if request.stop else None

    def _choice(self, request: ChatRequest, prompt: _Prompt, index: int, result: Generation) -> dict[str, Any]:
        text, finish_reason = self.chat.decode(result.token_ids, request.stop_token_ids or ()), result.finish_reason
        if (cut := self._cut(text, request, result)) is not None:
            text, finish_reason = cut, "stop"
        content, fields = text, dict[str, Any]()
        call_stream = self._choice_stream(request, prompt).call_stream
        if call_stream is not None and finish_reason == "stop":  # calls in a reply that was cut off were not made
            call_stream.feed(text)
            call_stream.finish()
            assert call_stream.reply is not None
            if cut is None or all(call.name for call in call_stream.reply[1]):  # a stop string may end a call too
                content = call_stream.reply[0]
                fields = reply_fields(call_stream.reply, None if request.parallel_tool_calls else 1)
        calls = "tool_calls" in fields
        entries = logprob_entries(self.chat, request, result) if request.logprobs else None
        return {
            "index": index,
            "message": {"role": "assistant", "content": content if content or not calls else None, **fields},
            "finish_reason": "tool_calls" if calls else finish_reason,
            "logprobs": None if entries is None else {"content": entries, "stage": LOGPROBS_STAGE},
            **({"token_ids": list(result.token_ids)} if request.return_token_ids else {}),
        }


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a thought."""
    return strip_guard_marks(prompt[-_PROMPT_TAIL_CHARS:]).rstrip().endswith(THOUGHT_OPENINGS)


def _context_full(full: ContextFullError) -> BadRequestError:
    message = str(full).replace("rollout.max_new_tokens", "max_tokens")  # as clients call it
    return BadRequestError(message, param="messages", code="context_length_exceeded")


def error_response(fault: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body in the OpenAI error format."""
    message = " ".join(str(fault).split())[:MAX_MESSAGE_CHARS]
    if isinstance(fault, BadRequestError):
        return fault.status, error_body(message, param=fault.param, code=fault.code)
    known = isinstance(fault, PolicyError)  # any other is a bug in the server: reveal no details to the client
    return 500, error_body(message if known else "internal error", "server_error")
