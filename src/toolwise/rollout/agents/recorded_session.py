"""One session of an outside agent: every model call is recorded with its exact tokens, until it is closed.

Closing yields a `Rollout` of the same type as our own episodes. What may be asked of the model is limited: the number
of calls, the tokens of all replies, and the sampling, which is that of the run (a client's temperature would make the
recorded log-probs those of another policy).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from toolwise.concurrency.limits import UNLIMITED, Gate
from toolwise.concurrency.text_threads import LONG_CHARS, run_in_thread
from toolwise.errors import ContextFullError, ModelError, PolicyError, ToolwiseError
from toolwise.messages import Message, Prefix
from toolwise.protocols import Generation, Sampling
from toolwise.rollout.agents.message_graph import GraphTurn, MessageGraph, Origin
from toolwise.rollout.agents.recorded_call import (
    CallOptions,
    RecordedCall,
    count_chars,
    cut_at,
    extends,
    is_valid,
    sampled_tokens,
    to_step,
)
from toolwise.rollout.call_counts import CallCounts
from toolwise.rollout.call_format import CallFormat
from toolwise.rollout.chat_tokenizer import ChatTokenizer, Tools
from toolwise.rollout.parsers import reasoning_of
from toolwise.rollout.tokens import OnChange
from toolwise.types import EvaluateResult, Rollout, RouteDecision, StopReason
from toolwise.types.tokens import Alignment
from toolwise.untrusted.bounds import MAX_FAULT_CHARS, truncate_text

OnTokens = Callable[[Sequence[int]], None]


class SessionPolicy(Protocol):
    """What a session needs of the run's policy."""

    chat: ChatTokenizer
    sampling: Sampling
    call_format: CallFormat
    on_change: OnChange
    max_context: int

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        constraint: Any = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """`on_tokens` receives new tokens while they are sampled, if the policy can tell."""

    @property
    def has_grammar(self) -> bool:
        """Whether replies follow `rollout.grammar`."""

    def constraint(self, tools: Tools = None) -> Any:
        """The constraint on a reply with these tools, if any."""


class SessionEndedError(ToolwiseError):
    """A call came after the end of its session."""


class SessionLimitError(ToolwiseError):
    """A session has used what it may use; `reason` says what."""

    def __init__(self, text: str, reason: StopReason) -> None:
        super().__init__(text)
        self.reason = reason


class ContextLimitError(SessionLimitError):
    """One call is too long for the model's context; the next may be shorter."""


@dataclass(slots=True)
class RecordedSession:
    """A session. Calls may overlap; each is recorded when it is complete."""

    decision: RouteDecision
    policy: SessionPolicy
    batch_data_id: int = 0
    rollout_offset: int = 0
    do_sample: bool = True
    max_calls: int = 64
    max_tokens: int | None = None
    """Sampled tokens of the whole session."""
    max_prompt_chars: int | None = None
    """A conversation with more characters cannot fit the context: it is refused before it is rendered."""
    model_gate: Gate = UNLIMITED
    """Bounds the calls of all sessions that wait for the model at once."""
    session_id: str = field(default_factory=lambda: secrets.token_hex(8))
    api_key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    calls: list[RecordedCall] = field(default_factory=list)
    closed: bool = False
    limit_reached: SessionLimitError | None = None
    """What ends the session, or that its last call was too long."""
    policy_fault: str | None = None
    """The last call of the model failed for a reason that is not the agent's."""
    _graph: MessageGraph = field(init=False)
    _graph_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Long conversations are tokenised in a thread."""
    _started_calls: int = field(default=0, init=False)
    _started_at: float = field(default=0.0, init=False)
    _working: set[asyncio.Task[Any]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._graph = MessageGraph(self.policy.chat, on_change=self.policy.on_change)

    def begin(self) -> None:
        """Start the clock of `Usage.seconds`."""
        self._started_at = asyncio.get_running_loop().time()

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        options: CallOptions | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> RecordedCall:
        """Continue the conversation `messages`. Raises what the client did wrong as a `ToolwiseError`."""
        options = options or CallOptions()
        sampling = self._begin_call(options)
        self._check_length(messages, tools)
        turn = await self._prompt(messages, tools)
        try:
            constraint = await self._constraint(tools if options.reads_calls else None)
            result = await self._generate(turn.prompt_ids, sampling, constraint=constraint, on_tokens=on_tokens)
            result = cut_at(result, options.stop, self.policy.chat)
            text = self._text(result, sampling, options.stop)
            reply = self._read(text, tools if options.reads_calls else None, cut=result.finish_reason == "length")
            async with self._graph_lock:
                history = Prefix(turn.history)
                alignment = self._add(turn, result, reply, sampling)
        except BaseException:
            self._graph.discard(turn)
            raise
        call = RecordedCall(
            history,
            reply,
            text,
            sampled_tokens(result, turn.prompt_ids, alignment, bool(reply.tool_calls)),
            turn.origin,
            is_valid(reply, tools),
            tuple(map(options.public_id, range(len(reply.tool_calls or ())))),
        )
        self.calls.append(call)
        return call

    async def generate(self, token_ids: Sequence[int], options: CallOptions) -> RecordedCall:
        """Continue tokens that the client made itself: the call has no messages but their text."""
        sampling = self._begin_call(options)
        result = await self._generate(token_ids, sampling, constraint=await self._constraint(None))
        chat = self.policy.chat
        text = chat.decode(result.token_ids, sampling.stop_token_ids)
        seen = Message.unchecked("user", chat.decode(token_ids))
        origin, alignment = self._relate(token_ids)
        tokens = sampled_tokens(result, token_ids, alignment, False)
        call = RecordedCall([seen], Message.unchecked("assistant", text), text, tokens, origin, True, ())
        self.calls.append(call)
        return call

    def close(
        self,
        reward: EvaluateResult | float | None = None,
        *,
        stop_reason: StopReason = StopReason.ANSWERED,
        fault: str | None = None,
        infrastructure_fault: bool = False,
    ) -> Rollout:
        """End the session, and any call still in progress; return what was recorded as a rollout."""
        self.closed = True
        for task in self._working:
            task.cancel()
        last_index = len(self.calls) - 1
        steps = tuple(to_step(i, call, is_last=i == last_index) for i, call in enumerate(self.calls))
        decision = self.decision
        counts = CallCounts.of(decision, decision.count_usage)
        for step in steps:
            counts.add(step.step_info)
        problem = counts.recount(steps)
        last = self.calls[-1] if self.calls else None
        return Rollout(
            rollout_id=f"{decision.group_id}/{self.rollout_offset}",
            group_id=decision.group_id,
            batch_data_id=self.batch_data_id,
            rollout_offset=self.rollout_offset,
            task=decision.task,
            route=decision.route,
            steps=steps,
            messages=tuple(decision.prompt) if last is None else (*last.history, last.reply),
            stop_reason=StopReason.ENV_FAULT if problem else stop_reason,
            usage=counts.usage(steps, asyncio.get_running_loop().time() - self._started_at),
            fault=(fault or problem) and truncate_text(fault or problem or "", MAX_FAULT_CHARS),
            infrastructure_fault=infrastructure_fault,
            result=EvaluateResult(score=float(reward)) if isinstance(reward, int | float) else reward,
        )

    @property
    def branches(self) -> int:
        """Number of calls that did not continue the latest reply of a conversation."""
        return sum(call.origin not in ("first", "continued") for call in self.calls)

    def _begin_call(self, options: CallOptions) -> Sampling:
        """The sampling of the next call; raises if there must not be one."""
        if self.closed:
            raise SessionEndedError("this session has ended")
        if isinstance(self.limit_reached, ContextLimitError):  # the agent may have compacted its history
            self.limit_reached = None
        sampled = sum(len(call.tokens.token_ids) for call in self.calls)
        if self._started_calls >= self.max_calls:
            text = f"this session has made {self.max_calls} calls, as many as agent.max_calls allows"
            self.limit_reached = SessionLimitError(text, StopReason.MAX_STEPS)
        elif self.max_tokens is not None and sampled >= self.max_tokens:
            text = f"this session has sampled {sampled} tokens, as many as rollout.max_episode_tokens allows"
            self.limit_reached = SessionLimitError(text, StopReason.MAX_TOKENS)
        if self.limit_reached is not None:
            raise self.limit_reached
        number, self._started_calls = self._started_calls, self._started_calls + 1
        base, seed = self.policy.sampling, self.decision.seed * 4099 + self.rollout_offset
        return replace(
            base,
            max_new_tokens=min(base.max_new_tokens, options.max_new_tokens or base.max_new_tokens),
            do_sample=self.do_sample,
            seed=(seed * 1_000_003 + number) & 0x7FFF_FFFF_FFFF_FFFF,
            stop_token_ids=(*base.stop_token_ids, *options.stop_token_ids),
        )

    async def _constraint(self, tools: Tools) -> Any:
        """A grammar may take seconds to compile, so not in the event loop. Tools that it cannot describe are the
        client's error."""
        if not self.policy.has_grammar:
            return None
        try:
            return await run_in_thread(self.policy.constraint, tools)
        except PolicyError as fault:
            raise ModelError(f"rollout.grammar: {fault}") from fault

    async def _generate(self, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Generation:
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            async with self.model_gate:
                given = {name: value for name, value in options.items() if value is not None}
                result = await self.policy.generate(prompt_ids, sampling, **given)
        except ContextFullError as full:
            raise self._context_full(str(full)) from full
        except Exception as fault:
            self.policy_fault = f"{type(fault).__name__}: {fault}"
            raise
        finally:
            self._working.discard(task)
        if self.closed:
            raise SessionEndedError("this session has ended")
        self.policy_fault = None
        return result

    async def _prompt(self, messages: Sequence[Message], tools: Tools) -> GraphTurn:
        async with self._graph_lock:
            if count_chars(messages, tools) <= LONG_CHARS:
                return self._graph.prompt(messages, tools)
            work = asyncio.ensure_future(run_in_thread(self._graph.prompt, messages, tools))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:  # a thread cannot be stopped: the graph must not change meanwhile
                await asyncio.wait({work})
                if work.exception() is None:
                    self._graph.discard(work.result())
                raise

    def _check_length(self, messages: Sequence[Message], tools: Tools) -> None:
        limit = self.max_prompt_chars
        if limit is not None and (count := count_chars(messages, tools)) > limit:
            text = f"the messages have {count:,} characters: the model's context of {self.policy.max_context} tokens"
            raise self._context_full(f"{text} holds at most {limit:,}")

    def _context_full(self, text: str) -> ContextLimitError:
        reason = StopReason.MAX_TOKENS if self.calls else StopReason.PROMPT_TOO_LONG
        self.limit_reached = full = ContextLimitError(text, reason)
        return full

    def _relate(self, token_ids: Sequence[int]) -> tuple[Origin, Alignment]:
        """How tokens of the client's own continue those of earlier calls."""
        if not self.calls:
            return "first", "first"
        continues = any(extends(token_ids, call.tokens) for call in self.calls)
        return ("continued", "clean") if continues else ("unrelated", "forked")

    def _text(self, result: Generation, sampling: Sampling, stop: Sequence[str]) -> str:
        text = self.policy.chat.decode(result.token_ids, sampling.stop_token_ids)
        return text[: min((at for word in stop if (at := text.find(word)) >= 0), default=len(text))]

    def _read(self, text: str, tools: Tools, *, cut: bool) -> Message:
        """The reply as a message. Calls in a reply that was cut off were not made: they stay text."""
        if not tools or cut:
            return Message.unchecked("assistant", text)
        parsed = self.policy.call_format.parse_for(text, tools)
        content, calls = parsed
        return Message.unchecked(
            "assistant", content, tool_calls=calls or None, reasoning_content=reasoning_of(parsed) or None
        )

    def _add(self, turn: GraphTurn, result: Generation, reply: Message, sampling: Sampling) -> Alignment:
        ids = result.token_ids
        return self._graph.add(turn, ids, reply, closed=bool(ids) and ids[-1] in sampling.stop_token_ids)
