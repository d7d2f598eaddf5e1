"""`ServedAgent`: an agent behind chat completions. The server routes, runs the tools and keeps to the budget; answers
report the route, the calls and their cost."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.agent.events import AgentAnswer, RouteChosen, TextDelta, ToolCalled, ToolReturned
from toolwise.concurrency.text_threads import run_in_thread
from toolwise.errors import PolicyError, ToolwiseError
from toolwise.messages import Message
from toolwise.rollout.parsers.stream import CallStream, ContentPiece
from toolwise.serve.chat import opens_thought
from toolwise.serve.completion import AnswerHead
from toolwise.serve.limits import TextLimits, chars_of, check_chars, check_model, check_new_tokens
from toolwise.serve.request import BadRequestError, ChatRequest, read_request, unsupported
from toolwise.types import StopReason

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent

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
        return await run_in_thread(read_request, raw)

    async def complete(self, request: ChatRequest) -> dict[str, Any]:
        options = self._options(request)
        check_chars(chars_of(request.messages), self.limits, self.agent.policy.max_context)
        try:
            answer = await self.agent.aask(request.messages, **options)
        except ToolwiseError as fault:
            raise _refusal(fault) from fault
        _check_answer(answer)
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
        return AnswerHead(self.name).fields("chat.completion") | {
            "choices": [choice],
            "usage": _usage(answer),
            "policy_version": self._version(answer),
            "toolwise": _details(answer),
        }

    async def stream(self, request: ChatRequest) -> AsyncIterator[dict[str, Any]]:
        """Chunks with the text that the agent writes, without the text of its calls; calls, results and the route are
        in the field `toolwise`. The last chunk has the usage and no choices."""
        options, writer = self._options(request), _ChunkWriter(self, AnswerHead(self.name))
        check_chars(chars_of(request.messages), self.limits, self.agent.policy.max_context)
        try:
            async with aclosing(self.agent.astream(request.messages, **options)) as events:  # type: ignore[type-var]
                async for event in events:
                    if isinstance(event, AgentAnswer):
                        _check_answer(event)
                    for chunk in writer.write(event):
                        yield chunk
        except ToolwiseError as fault:
            raise _refusal(fault) from fault

    def _options(self, request: ChatRequest) -> dict[str, Any]:
        """The options of `Agent.aask`; what does not apply to an agent is refused."""
        check_model(request, self.name)
        refused = {
            "tools": bool(request.tools),
            "n": request.n > 1,
            "logprobs": request.logprobs,
            "stop_token_ids": bool(request.stop_token_ids),
            "return_token_ids": request.return_token_ids,
            "return_tokens_as_token_ids": request.return_tokens_as_token_ids,
            "ignore_eos": request.ignore_eos,
            "parallel_tool_calls": not request.parallel_tool_calls,
            "tool_choice": request.tool_choice not in (None, "auto"),
        } | {name: True for name in request.changed_options() if name not in ("top_p", "top_k")}
        for name, given in refused.items():
            if given:
                raise unsupported(name, "in mode agent: the server runs its own tools; serve with --mode model for it")
        for name in ("budget", "route"):
            if getattr(request, name) is not None and not self.agent.has_router:
                raise unsupported(name, "by this agent: it has no router")
        from toolwise.engine.request import ServingOptions

        limit = check_new_tokens(request, self.max_new_tokens)
        sampled = bool(request.temperature)
        top_p, top_k = 1.0 if request.top_p is None else request.top_p, max(0, request.top_k or 0)
        return {
            "budget": self.budget if request.budget is None else request.budget,
            "route": request.route or "auto",
            "cap": self._cap(request),
            "do_sample": sampled,
            "seed": (secrets.randbits(31) if sampled else 0) if request.seed is None else request.seed,
            "sampling": {
                "temperature": request.temperature or None,
                "max_new_tokens": limit,
                "options": ServingOptions(top_p, top_k),
            },
        }

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

    def _version(self, answer: AgentAnswer) -> int:
        versions = [step.tokens.policy_version for step in answer.rollout.steps]
        return min((version for version in versions if version is not None), default=self.agent.policy.version)


class _ChunkWriter:
    """Turns the events of an answer into chunks."""

    def __init__(self, served: ServedAgent, head: AnswerHead) -> None:
        self.served, self.head = served, head
        self._turn: CallStream | None = None
        self._begun = self._wrote = self._turn_wrote = False

    def write(self, event: Any) -> list[dict[str, Any]]:
        if isinstance(event, TextDelta):
            if self._turn is None:
                self._turn, self._turn_wrote = self.served.call_stream(), False
            return self._text(_pieces(self._turn.feed(event.text)))
        if isinstance(event, RouteChosen):
            return [self._chunk({}, toolwise={"route": event.route, "route_probs": dict(event.route_probs)})]
        rest = self._end_turn()
        if isinstance(event, ToolCalled):
            call = {"name": event.name, "arguments": event.arguments}
            return [*rest, self._chunk({}, toolwise={"tool_call": call})]
        if isinstance(event, ToolReturned):
            return [*rest, self._chunk({}, toolwise={"tool_result": {"name": event.name, "content": event.text}})]
        assert isinstance(event, AgentAnswer)
        if not rest and not self._turn_wrote:  # a route that is answered by a server does not stream
            rest = self._text(event.text)
        end = self._chunk({}, _finish_reason(event), toolwise=_details(event))
        version = self.served._version(event)
        last = self.head.fields("chat.completion.chunk") | {"choices": [], "usage": _usage(event)}
        return [*rest, end | {"policy_version": version}, last | {"policy_version": version}]

    def _end_turn(self) -> list[dict[str, Any]]:
        if self._turn is None:
            return []
        rest, self._turn = _pieces(self._turn.finish()), None
        return self._text(rest)

    def _text(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        between_turns = self._wrote and not self._turn_wrote
        self._wrote = self._turn_wrote = True
        return [self._chunk({"content": f"\n\n{text}" if between_turns else text})]

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
        if not self._begun:
            self._begun, delta = True, {"role": "assistant", "content": ""} | delta
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return self.head.fields("chat.completion.chunk") | {"choices": [choice], **more}


def _pieces(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))


def _refusal(fault: ToolwiseError) -> ToolwiseError:
    """A budget, route or cap that the router cannot keep is the client's error; the model's faults are the server's."""
    if isinstance(fault, BadRequestError | PolicyError):
        return fault
    return BadRequestError(str(fault), param="budget" if "budget" in str(fault) else "route")


def _too_long() -> BadRequestError:
    return BadRequestError(
        "the conversation does not fit the model's context: shorten it",
        param="messages",
        code="context_length_exceeded",
    )


def _check_answer(answer: AgentAnswer) -> None:
    """Raise if the agent did not answer."""
    rollout = answer.rollout
    if rollout.stop_reason is StopReason.PROMPT_TOO_LONG:
        raise _too_long()
    if rollout.fault and not answer.text:  # the fault itself may quote a tool's code: it is logged, not sent
        status = 504 if rollout.stop_reason is StopReason.DEADLINE else 500
        raise BadRequestError(f"the agent did not answer: {rollout.stop_reason.value}", status=status)


def _finish_reason(answer: AgentAnswer) -> str:
    steps = answer.rollout.steps
    cut = bool(steps) and steps[-1].tokens.finish_reason == "length"
    return "length" if cut or answer.rollout.stop_reason.truncated else "stop"


def _usage(answer: AgentAnswer) -> dict[str, Any]:
    """OpenAI's counts, over all turns, with route, calls and cost."""
    used = answer.rollout.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.sampled_tokens,
        "total_tokens": used.prompt_tokens + used.sampled_tokens,
        "route": answer.route,
        "calls": dict(answer.calls),
        "cost": answer.cost,
        "refused_calls": answer.refused,
    }


def _details(answer: AgentAnswer) -> dict[str, Any]:
    return {
        "route": answer.route,
        "route_probs": dict(answer.route_probs),
        "calls": dict(answer.calls),
        "cost": answer.cost,
        "stop_reason": answer.rollout.stop_reason.value,
        "text": answer.text,
        "messages": [message.to_openai() for message in answer.messages],
    }
