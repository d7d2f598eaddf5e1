"""`ServedAgent`: an agent behind chat completions. The server routes, runs the tools and keeps to the budget; answers
report the route, the calls and their cost."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.agent.events import AgentAnswer, AgentEvent
from toolwise.concurrency.tasks import spawn, wait_all
from toolwise.concurrency.text_threads import run_if_long
from toolwise.errors import PolicyError, QuestionError
from toolwise.messages import Message
from toolwise.rollout.parsers.stream import CallStream
from toolwise.serve.agent_answers import ChunkWriter, answer_choice, details_of, usage_of
from toolwise.serve.chat import opens_thought
from toolwise.serve.completion import AnswerHead
from toolwise.serve.event_stream import ShortCut
from toolwise.serve.limits import TextLimits, chars_of, check_chars, check_model, check_new_tokens
from toolwise.serve.request import BadRequestError, ChatRequest, read_request, unsupported
from toolwise.types import StopReason

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent

log = logging.getLogger("toolwise.serve")

SAMPLING = ("top_p", "top_k", "stop")
SEED_STEP, MAX_SEED = 0x9E37_79B9, (1 << 31) - 1
"""Between the answers of one request."""
_PROBE = [Message(role="user", content="hello")]


@dataclass(frozen=True, slots=True)
class ServedAgent:
    """An agent to serve under a public name."""

    name: str
    agent: Agent
    budget: float | None = None
    """Mean cost per question, where a request gives none."""
    max_cost: float | None = None
    """The most that an answer may cost; a request may only lower it."""
    max_new_tokens: int | None = None
    """The most new tokens per turn that a request may ask for."""
    limits: TextLimits = field(init=False)
    _thought_open: bool = field(init=False)

    def __post_init__(self) -> None:
        policy = self.agent.policy
        object.__setattr__(self, "limits", TextLimits.of(policy.chat.tokenizer, policy.max_context))
        object.__setattr__(self, "_thought_open", opens_thought(policy.chat.render(_PROBE)))

    def metrics(self) -> Mapping[str, float]:
        return self.agent.policy.metrics()

    def close(self) -> None:
        """The tools stay: agents that are loaded again share them."""
        self.agent.policy.close()

    async def read(self, raw: bytes) -> ChatRequest:
        return await run_if_long(len(raw), read_request, raw)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        options = self._options(request)
        check_chars(chars_of(request.messages), self.limits, self.agent.policy.max_context)
        tasks = [spawn(self.agent.aask(request.messages, **each)) for each in options]
        with _refusals(request):
            try:
                answers = [await task for task in tasks]
            finally:
                await _end(tasks)
        for answer in answers:
            check_answer(answer)
        choices = [answer_choice(answer, index, request) for index, answer in enumerate(answers)]
        return AnswerHead(self.name).fields("chat.completion") | {
            "choices": choices,
            "usage": usage_of(answers),
            "policy_version": min(map(self.version, answers)),
            **({"toolwise": details_of(answers[0])} if len(answers) == 1 else {}),
        }

    async def stream(self, request: ChatRequest, short_cut: ShortCut | None = None) -> AsyncIterator[dict[str, Any]]:
        """Chunks with the text that the agent writes, without the text of its calls; calls, results and the route are
        in the field `toolwise`. The last chunk has the usage and no choices."""
        options, head = self._options(request), AnswerHead(self.name)
        check_chars(chars_of(request.messages), self.limits, self.agent.policy.max_context)
        writers = [ChunkWriter(self, head, index, request) for index in range(request.n)]
        answers: list[AgentAnswer] = []
        with _refusals(request):
            async with aclosing(self._events(request, options)) as events:
                async for index, event in events:
                    if isinstance(event, AgentAnswer):
                        check_answer(event)
                        answers.append(event)
                    for chunk in writers[index].write(event):
                        yield chunk
        last = head.fields("chat.completion.chunk") | {"choices": [], "usage": usage_of(answers)}
        yield last | {"policy_version": min(map(self.version, answers))}

    async def _events(
        self, request: ChatRequest, options: Sequence[dict[str, Any]]
    ) -> AsyncGenerator[tuple[int, AgentEvent], None]:
        """The events of all answers as they come, each with the index of its answer."""
        queue: asyncio.Queue[tuple[int, AgentEvent] | asyncio.Task[None]] = asyncio.Queue()

        async def answer(index: int, each: dict[str, Any]) -> None:
            async with aclosing(self.agent.astream(request.messages, **each)) as events:  # type: ignore[type-var]
                async for event in events:
                    queue.put_nowait((index, event))

        tasks = [spawn(answer(index, each)) for index, each in enumerate(options)]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        left = len(tasks)
        try:
            while left:
                event = await queue.get()
                if isinstance(event, tuple):
                    yield event
                else:
                    event.result()  # raises what the answer raised
                    left -= 1
        finally:
            await _end(tasks)

    def _options(self, request: ChatRequest) -> list[dict[str, Any]]:
        """The options of `Agent.aask` for each answer; what does not apply to an agent is refused."""
        check_model(request, self.name)
        refused = {
            "tools": bool(request.tools),
            "logprobs": request.logprobs,
            "stop_token_ids": bool(request.stop_token_ids),
            "return_token_ids": request.return_token_ids,
            "return_tokens_as_token_ids": request.return_tokens_as_token_ids,
            "ignore_eos": request.ignore_eos,
            "parallel_tool_calls": not request.parallel_tool_calls,
            "tool_choice": request.tool_choice not in (None, "auto"),
        } | {name: True for name in request.changed_options() if name not in SAMPLING}
        for name, given in refused.items():
            if given:
                raise unsupported(name, "in mode agent: the server runs its own tools; serve with --mode model for it")
        for name in ("budget", "route"):
            if getattr(request, name) is not None and not self.agent.has_router:
                raise unsupported(name, "by this agent: it has no router")
        if not self.agent.policy.has_serving_options:
            for name in (name for name in request.changed_options() if name in SAMPLING):
                raise unsupported(name, "with this model's engine")
        from toolwise.engine.request import ServingOptions

        limit = check_new_tokens(request, self.max_new_tokens)
        sampled = bool(request.temperature)
        top_p, top_k = 1.0 if request.top_p is None else request.top_p, max(0, request.top_k or 0)
        seed = (secrets.randbits(31) if sampled else 0) if request.seed is None else request.seed
        options = {
            "budget": self.budget if request.budget is None else request.budget,
            "route": request.route or "auto",
            "cap": self._cap(request),
            "do_sample": sampled,
            "sampling": {
                "temperature": request.temperature or None,
                "max_new_tokens": limit,
                "options": ServingOptions(top_p, top_k, stop_strings=tuple(request.stop)),
            },
        }
        return [{**options, "seed": (seed + index * SEED_STEP) & MAX_SEED} for index in range(request.n)]

    def _cap(self, request: ChatRequest) -> float | None:
        """The most that the answer may cost: a request may only lower the server's limit, or else that of training."""
        trained = self.agent.config.router.max_cost if self.agent.has_router else None
        limit = trained if self.max_cost is None else self.max_cost
        if request.max_cost is None:
            return self.max_cost
        return request.max_cost if limit is None else min(request.max_cost, limit)

    def call_stream(self) -> CallStream:
        specs = [tool.get_openai_tool_schema().model_dump() for tool in self.agent.tools.values()]
        return self.agent.policy.call_format.stream(self._thought_open, specs)

    def version(self, answer: AgentAnswer) -> int:
        versions = [step.tokens.policy_version for step in answer.rollout.steps]
        return min((version for version in versions if version is not None), default=self.agent.policy.version)


@contextmanager
def _refusals(request: ChatRequest) -> Iterator[None]:
    """What the request asks too much of the agent is the client's error. Anything else, such as a budget that the
    server sets, is the server's: it is logged, and its text is not sent."""
    try:
        yield
    except QuestionError as fault:
        if getattr(request, fault.option, None) is None:
            raise
        raise BadRequestError(str(fault), param=fault.option) from fault
    except PolicyError as fault:
        log.error("%s: %s", type(fault).__name__, fault, exc_info=fault)
        raise BadRequestError("the agent did not answer: its model failed", status=500) from fault


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await wait_all(tasks)


def _too_long() -> BadRequestError:
    return BadRequestError(
        "the conversation does not fit the model's context: shorten it",
        param="messages",
        code="context_length_exceeded",
    )


def check_answer(answer: AgentAnswer) -> None:
    """Raise if the agent did not answer."""
    rollout = answer.rollout
    if rollout.stop_reason is StopReason.PROMPT_TOO_LONG:
        raise _too_long()
    if rollout.fault and not answer.text:  # the fault itself may quote a tool's code: it is logged, not sent
        status = 504 if rollout.stop_reason is StopReason.DEADLINE else 500
        raise BadRequestError(f"the agent did not answer: {rollout.stop_reason.value}", status=status)
