"""Whether replies keep to the format: figures for every step's table, and an optional reward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from toolwise.messages import Message
from toolwise.protocols import Metrics
from toolwise.rewards.function import reward_function
from toolwise.thinking.levels import LEVEL_COUNT
from toolwise.thinking.reply import FormatFault, ParsedReply, parse_reply
from toolwise.types import EvaluateResult, MetricResult, StepOutput


def format_metrics(readings: Sequence[ParsedReply]) -> Metrics:
    """The share of replies that are as they should be, of each level among those that have one, and of each fault."""
    if not readings:
        return {}
    levels = Counter(reading.level for reading in readings if reading.level is not None)
    faults = Counter(fault for reading in readings for fault in reading.faults)
    told = max(1, levels.total())
    return {
        "thinking/format_valid": sum(reading.valid for reading in readings) / len(readings),
        **{f"thinking/level_{number}_share": levels[number] / told for number in range(1, LEVEL_COUNT + 1)},
        **{f"thinking/fault/{fault}": faults[fault] / len(readings) for fault in FormatFault if faults[fault]},
    }


@reward_function
def format_reward(messages: Sequence[Message], ground_truth: Any = None, prompt_length: int = 0) -> EvaluateResult:
    """The share of the assistant's replies that keep to the format; each step earns its part of it.

        [[reward.parts]]
        function = "toolwise.thinking.format_metrics:format_reward"
        weight = 0.1

    It judges what stands in the conversation. Calls that a parser has taken out of a reply count as its action; under
    `rollout.tool_parser = "action"` the tags are gone from there, so let the world read them: "none".
    """
    readings = [_read_message(message) for message in messages[prompt_length:] if message.role == "assistant"]
    if not readings:
        return EvaluateResult(score=0.0, reason="the assistant said nothing")
    share = sum(reading.valid for reading in readings) / len(readings)
    wrong = [f"{number}: {', '.join(reading.faults)}" for number, reading in enumerate(readings) if not reading.valid]
    return EvaluateResult(
        score=share,
        reason="; ".join(wrong) or "every reply keeps to the format",
        metrics={"format_valid": MetricResult(score=share)},
        step_outputs=[
            StepOutput(step_index=number, base_reward=reading.valid / len(readings))
            for number, reading in enumerate(readings)
        ],
    )


def _read_message(message: Message) -> ParsedReply:
    text = message.content or ""
    # What the calls say is their tool's to judge; that there are some is all that matters here.
    return parse_reply(f"{text}<tool_call></tool_call>" if message.tool_calls else text)
