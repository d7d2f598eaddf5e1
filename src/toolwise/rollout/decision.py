"""What a policy answered, read and found whole: between a policy and the request that asked it."""

from __future__ import annotations

from typing import Any, NamedTuple

from toolwise.messages import Message, ToolCall

PolicyAnswer = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


class PolicyDecision(NamedTuple):
    """An action and what came with it. A tuple, since one is made every turn."""

    action: dict[str, Any]
    raw: str | None
    logprobs: dict[str, Any] | None
    value: float | None
    message: Message
    """The action as the conversation has it."""

    @classmethod
    def from_answer(cls, answer: PolicyAnswer) -> PolicyDecision:
        """Raises where the policy's word makes no sense."""
        action, raw, logprobs, value = answer
        if action["type"] not in ("text", "tool_call", "terminate"):
            raise ValueError(f"an action of type {action['type']!r}; give text, tool_call or terminate")
        if raw is not None and not isinstance(raw, str):
            raise ValueError(f"a raw output of type {type(raw).__name__}; give a string or None")
        if logprobs is not None and not isinstance(logprobs, dict):
            raise ValueError(f"log-probs of type {type(logprobs).__name__}; give a TokenLogprobs or None")
        if logprobs is not None:
            for key in ("prompt_ids", "token_ids"):
                count_tokens(logprobs, key)  # where that fails, it is here that it can still be told whose fault it is
        given = action.get("tool_calls") or ()
        calls = [call if isinstance(call, ToolCall) else ToolCall.model_validate(call) for call in given]
        if action["type"] == "tool_call" and not calls:  # one call may be told by its name and arguments alone
            calls = [ToolCall(id="call_0", name=action["name"], arguments=action.get("arguments") or {})]
        if calls:
            action = {**action, "tool_calls": calls}
        content = action.get("content") or ""
        if not isinstance(content, str):
            raise ValueError(f"content of type {type(content).__name__}; give a string")
        thought = action.get("reasoning_content") or None
        if thought is not None and not isinstance(thought, str):
            raise ValueError(f"reasoning_content of type {type(thought).__name__}; give a string")
        said = Message.unchecked("assistant", content, tool_calls=calls or None, reasoning_content=thought)
        return cls(action, raw, logprobs, value, said)

    @property
    def sampled_tokens(self) -> int:
        return count_tokens(self.logprobs, "token_ids")

    @property
    def hit_length_limit(self) -> bool:
        """The reply reached its length before its end."""
        return (self.logprobs or {}).get("finish_reason") == "length"


def count_tokens(logprobs: dict[str, Any] | None, key: str) -> int:
    """How many ids there are under `key`; none where the policy gives none."""
    ids = (logprobs or {}).get(key)
    return 0 if ids is None else len(ids)
