"""The OpenAI form of an agent's answers: choices, the chunks of a stream, and usage with route, calls and cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolwise.agent.events import AgentAnswer, RouteChosen, TextDelta, ToolCalled, ToolReturned
from toolwise.agent.turn_inference import ROUTE_SEPARATOR
from toolwise.rollout.parsers.stream import CallStream, ContentPiece
from toolwise.serve.choice_stream import StopFilter, cut_at_stop
from toolwise.serve.completion import AnswerHead
from toolwise.serve.request import ChatRequest

if TYPE_CHECKING:
    from toolwise.serve.agent_chat import ServedAgent


def answer_choice(answer: AgentAnswer, index: int, request: ChatRequest) -> dict[str, Any]:
    """One choice of an answer that is not streamed; with several, each has its own details."""
    message = {"role": "assistant", "content": _cut(answer.text, request)}
    choice = {"index": index, "message": message, "finish_reason": _finish_reason(answer), "logprobs": None}
    return choice if request.n == 1 else choice | {"toolwise": details_of(answer)}


def _cut(text: str, request: ChatRequest) -> str:
    cut = cut_at_stop(text, request.stop)
    return text if cut is None else cut


class ChunkWriter:
    """Turns the events of one answer into the chunks of one choice."""

    def __init__(self, served: ServedAgent, head: AnswerHead, index: int, request: ChatRequest) -> None:
        self.served, self.head, self.index, self.request = served, head, index, request
        self._turn: CallStream | None = None
        self._filter = StopFilter(request.stop)
        self._begun = self._wrote = self._turn_wrote = False

    def write(self, event: Any) -> list[dict[str, Any]]:
        if isinstance(event, TextDelta):
            if self._turn is None:
                self._turn, self._turn_wrote = self.served.call_stream(), False
                self._filter = StopFilter(self.request.stop)
            return self._text(self._filter.feed(_pieces(self._turn.feed(event.text))))
        if isinstance(event, RouteChosen):
            return [self._chunk({}, {"route": event.route, "route_probs": dict(event.route_probs)})]
        rest = self._end_turn()
        if isinstance(event, ToolCalled):
            call = {"name": event.name, "arguments": event.arguments}
            return [*rest, self._chunk({}, {"tool_call": call})]
        if isinstance(event, ToolReturned):
            return [*rest, self._chunk({}, {"tool_result": {"name": event.name, "content": event.text}})]
        assert isinstance(event, AgentAnswer)
        if not rest and not self._turn_wrote:  # a route that is answered by a server does not stream
            rest = self._text(_cut(event.text, self.request))
        end = self._chunk({}, details_of(event), finish_reason=_finish_reason(event))
        return [*rest, end | {"policy_version": self.served.version(event)}]

    def _end_turn(self) -> list[dict[str, Any]]:
        if self._turn is None:
            return []
        rest, self._turn = self._filter.feed(_pieces(self._turn.finish())), None
        return self._text(rest + ("" if self._filter.stopped else self._filter.finish()))

    def _text(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        between_turns = self._wrote and not self._turn_wrote
        self._wrote = self._turn_wrote = True
        return [self._chunk({"content": f"\n\n{text}" if between_turns else text})]

    def _chunk(
        self, delta: dict[str, Any], toolwise: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        if not self._begun:
            self._begun, delta = True, {"role": "assistant", "content": ""} | delta
        choice = {"index": self.index, "delta": delta, "finish_reason": finish_reason}
        chunk = self.head.fields("chat.completion.chunk") | {"choices": [choice]}
        return chunk if toolwise is None else chunk | {"toolwise": toolwise}


def _pieces(events: list[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, ContentPiece))


def _finish_reason(answer: AgentAnswer) -> str:
    steps = answer.rollout.steps
    cut = bool(steps) and steps[-1].tokens.finish_reason == "length"
    return "length" if cut or answer.rollout.stop_reason.truncated else "stop"


def usage_of(answers: Sequence[AgentAnswer]) -> dict[str, Any]:
    """OpenAI's counts, over all turns of all answers, with routes, calls and cost."""
    used = [answer.rollout.usage for answer in answers]
    prompt, sampled = sum(each.prompt_tokens for each in used), sum(each.sampled_tokens for each in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "route": ROUTE_SEPARATOR.join(answer.route for answer in answers if answer.route),
        "calls": dict(sum((Counter(answer.calls) for answer in answers), Counter())),
        "cost": sum(answer.cost for answer in answers),
        "refused_calls": sum(answer.refused for answer in answers),
    }


def details_of(answer: AgentAnswer) -> dict[str, Any]:
    return {
        "route": answer.route,
        "route_probs": dict(answer.route_probs),
        "calls": dict(answer.calls),
        "cost": answer.cost,
        "stop_reason": answer.rollout.stop_reason.value,
        "text": answer.text,
        "messages": [message.to_openai() for message in answer.messages],
    }
