"""`PolicyDecision`: a policy's answer, validated for the rollout request that asked for it."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers.hermes import render_hermes
from toolwise.types import Action, SampledTokens

PolicyAnswer = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


class PolicyDecision(NamedTuple):
    """An action with its raw text, tokens and value estimate. A tuple, because one is created every turn."""

    action: Action
    raw: str | None
    tokens: SampledTokens | None
    value: float | None
    message: Message
    """The action as an assistant message."""

    def message_as_text(self) -> Message:
        """A reply that was cut off: its calls are not made, so they stay text."""
        if not self.message.tool_calls:
            return self.message
        text = self.raw or render_hermes(self.message.content or "", self.message.tool_calls)
        return Message.unchecked("assistant", text)

    @classmethod
    def from_answer(cls, answer: PolicyAnswer) -> PolicyDecision:
        """Raises ValueError if the policy's answer is malformed."""
        action, raw, logprobs, value = answer
        if action["type"] not in ("text", "tool_call", "terminate"):
            raise ValueError(f"unknown action type {action['type']!r}: use text, tool_call or terminate")
        if raw is not None and not isinstance(raw, str):
            raise ValueError(f"raw output must be a string or None, not {type(raw).__name__}")
        tokens = None if logprobs is None else SampledTokens.from_dict(logprobs)
        raw_calls = action.get("tool_calls") or ()
        # `type` because isinstance is slow on pydantic models; `model_validate` returns a subclass unchanged.
        calls = [call if type(call) is ToolCall else ToolCall.model_validate(call) for call in raw_calls]
        if action["type"] == "tool_call" and not calls:  # a single call may be given by name and arguments alone
            calls = [ToolCall(id="call_0", name=action["name"], arguments=action.get("arguments") or {})]
        if calls and calls != raw_calls:
            action = {**action, "tool_calls": calls}
        content = action.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(f"content must be a string, not {type(content).__name__}")
        reasoning = action.get("reasoning_content") or None
        if reasoning is not None and not isinstance(reasoning, str):
            raise ValueError(f"reasoning_content must be a string, not {type(reasoning).__name__}")
        message = Message.unchecked("assistant", content, tool_calls=calls or None, reasoning_content=reasoning)
        return cls(cast("Action", action), raw, tokens, value, message)
