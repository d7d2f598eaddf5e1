"""The calls of a session: what a client may choose, what is recorded of each, and the step that it becomes."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from toolwise.messages import Message, ToolCall
from toolwise.protocols import Generation
from toolwise.rollout.agents.message_graph import Origin
from toolwise.rollout.chat_tokenizer import ChatTokenizer, Tools
from toolwise.rollout.parsers import to_action
from toolwise.types import SampledTokens, StepData
from toolwise.types.tokens import Alignment


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a client may choose for one call."""

    max_new_tokens: int | None = None
    """At most this many tokens, and at most those of the run."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    stop_token_ids: tuple[int, ...] = ()
    reads_calls: bool = True
    """False: calls in the reply stay text."""
    id_prefix: str = field(default_factory=lambda: f"call_{secrets.token_hex(6)}")
    """Of the ids under which the client knows the calls in the reply."""

    def public_id(self, index: int) -> str:
        return f"{self.id_prefix}_{index}"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of the model: what it saw, what it sampled, and what the client was told."""

    history: Sequence[Message]
    """What the model saw."""
    reply: Message
    text: str
    tokens: SampledTokens
    origin: Origin
    valid: bool
    """Whether all calls in the reply could be read and name a tool that was offered."""
    public_ids: tuple[str, ...]
    """The ids under which the client knows the calls in the reply: unlike those of a parser, unique."""


def to_step(index: int, call: RecordedCall, *, is_last: bool) -> StepData:
    calls = list(call.reply.tool_calls or ())
    return StepData.unchecked(
        system_step_index=index,
        observation_data=call.history,
        action_taken=to_action(call.reply.content or "", calls, call.reply.reasoning_content or ""),
        raw_policy_output=call.text,
        resulting_messages_history=[*call.history, call.reply],
        policy_logprobs=call.tokens,
        policy_value_estimate=None,
        is_done=is_last,
        step_info={
            "assistant_turn_index": index,
            "origin": call.origin,
            "is_action_valid": call.valid,
            **_call_info(calls),
        },
        base_reward=None,
        advantage=None,
        return_to_go=None,
    )


def extends(token_ids: Sequence[int], earlier: SampledTokens) -> bool:
    """Whether `token_ids` begin with all that the model saw and sampled in an earlier call."""
    seen = [*earlier.prompt_ids, *earlier.token_ids]
    return list(token_ids[: len(seen)]) == seen


def sampled_tokens(
    result: Generation, prompt_ids: Sequence[int], alignment: Alignment, has_calls: bool
) -> SampledTokens:
    versions = {} if result.token_versions is None else {"token_versions": result.token_versions}
    return SampledTokens.from_dict(
        {
            **versions,
            "token_ids": result.token_ids,
            "logprobs": result.logprobs,
            "prompt_ids": prompt_ids,
            "finish_reason": "tool_calls" if has_calls and result.finish_reason == "stop" else result.finish_reason,
            "policy_version": result.policy_version,
            "alignment": alignment,
        }
    )


def cut_at(result: Generation, stop: Sequence[str], chat: ChatTokenizer) -> Generation:
    """`result` without the tokens after the first that completes one of `stop`: they might as well not have been
    sampled, as no later token changes an earlier one."""
    ids = list(result.token_ids)

    def stops(count: int) -> bool:
        text = chat.decode(ids[:count])
        return any(word in text for word in stop)

    if not stop or not stops(len(ids)):
        return result
    count = bisect_left(range(len(ids) + 1), True, key=stops)
    versions = result.token_versions
    return replace(
        result,
        token_ids=ids[:count],
        logprobs=list(result.logprobs)[:count],
        finish_reason="stop",
        token_versions=None if versions is None else versions[:count],
    )


def count_chars(messages: Sequence[Message], tools: Tools) -> int:
    """Characters of what chat templates render: texts, arguments of calls, and descriptions of tools."""
    arguments = [call.arguments for message in messages for call in message.tool_calls or ()]
    return sum(len(message.content or "") for message in messages) + _value_chars([arguments, list(tools or ())])


def _value_chars(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_value_chars, value.values()))
    if isinstance(value, list):
        return sum(map(_value_chars, value))
    return len(value) if isinstance(value, str) else 0


def is_valid(reply: Message, tools: Tools) -> bool:
    offered = {str(tool.get("function", {}).get("name")) for tool in tools or ()}
    return all(isinstance(call.arguments, dict) and call.name in offered for call in reply.tool_calls or ())


def _call_info(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """The calls that the reply asks for, by tool, in the form in which environments report them."""
    info: dict[str, Any] = {"calls": {}, "failed_calls": {}, "cost": 0.0}
    for call in calls:
        info["calls"][call.name] = info["calls"].get(call.name, 0) + 1
        if not isinstance(call.arguments, dict):
            info["failed_calls"]["bad_json"] = info["failed_calls"].get("bad_json", 0) + 1
    return info
