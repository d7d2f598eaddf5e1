"""How well replies follow the level format: metrics for each training step, and an optional reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolwise.messages import Message
from toolwise.protocols import Metrics
from toolwise.rewards.function import reward_function
from toolwise.thinking.reply import FormatFault, ParsedReply, parse_reply
from toolwise.types import LEVEL_COUNT, EvaluateResult, MetricResult, StepOutput


def format_metrics(replies: Sequence[ParsedReply]) -> Metrics:
    """Share of valid replies, share of each level among replies that have one, and share of each format fault."""
    if not replies:
        return {}
    faults = Counter(fault for reply in replies for fault in reply.faults)
    return {
        "thinking/format_valid": sum(reply.valid for reply in replies) / len(replies),
        **level_shares(replies, "thinking"),
        **{f"thinking/fault/{fault}": faults[fault] / len(replies) for fault in FormatFault if faults[fault]},
    }


def level_shares(replies: Sequence[ParsedReply], prefix: str) -> Metrics:
    levels = Counter(reply.level for reply in replies if reply.level is not None)
    return {f"{prefix}/level_{k}_share": levels[k] / max(1, levels.total()) for k in range(1, LEVEL_COUNT + 1)}


@reward_function
def format_reward(messages: Sequence[Message], ground_truth: Any = None, prompt_length: int = 0) -> EvaluateResult:
    """Share of the assistant's replies that follow the format; each step earns its part of it.

        [[reward.parts]]
        function = "toolwise.thinking.format_metrics:format_reward"
        weight = 0.1

    It reads the text of the conversation. Tool calls that a parser extracted from a reply count as its action. With
    `rollout.tool_parser = "action"` the tags are removed from the text, so use "none" and let the environment parse
    them.
    """
    # Of tool calls only the presence matters here; their content is for the tool to judge.
    replies = [
        parse_reply((message.content or "") + ("<tool_call></tool_call>" if message.tool_calls else ""))
        for message in messages[prompt_length:]
        if message.role == "assistant"
    ]
    if not replies:
        return EvaluateResult(score=0.0, reason="there is no assistant message")
    share = sum(reply.valid for reply in replies) / len(replies)
    errors = [f"{index}: {', '.join(reply.faults)}" for index, reply in enumerate(replies) if not reply.valid]
    return EvaluateResult(
        score=share,
        reason="; ".join(errors) or "every reply follows the format",
        metrics={"format_valid": MetricResult(score=share)},
        step_outputs=[
            StepOutput(step_index=index, base_reward=reply.valid / len(replies)) for index, reply in enumerate(replies)
        ],
    )
