"""Which tools a rollout used, by family: from executed calls, or from the text if no tool is executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import parse_auto, parse_rlla
from toolwise.routing.families import Family, family_of_call
from toolwise.routing.prompts import prompt_style
from toolwise.types import Rollout, StepData, Task

UNREADABLE = "unreadable"
"""The name under which calls without a readable tool name are counted, here and in the environment."""

UsageSource = Literal["auto", "executed", "text"]


@dataclass(frozen=True, slots=True)
class RouteUsage:
    """The calls of one rollout."""

    calls_by_tool: Mapping[str, int] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    """The family of each tool in `calls_by_tool`."""

    @property
    def calls(self) -> dict[Family, int]:
        counts = dict.fromkeys(Family, 0)
        for tool, count in self.calls_by_tool.items():
            counts[self.families.get(tool, Family.OTHER)] += count
        return counts

    @property
    def used_any_tool(self) -> bool:
        return any(self.calls_by_tool.values())

    @classmethod
    def of(cls, calls_by_tool: Mapping[str, int], families: Mapping[str, Family]) -> RouteUsage:
        """A tool that is not in `families` is classified by its name."""
        calls = {tool: count for tool, count in calls_by_tool.items() if count}
        return cls(calls, {tool: family_of_call(tool, families) for tool in calls})


def usage_of(
    rollout: Rollout,
    families: Mapping[str, Family],
    *,
    allowed: Collection[str] | None = None,
    source: UsageSource = "auto",
) -> RouteUsage:
    """The tools a rollout used. `allowed` are the tools of its route; calls of others were refused and are free.

    "auto" reads the text if the prompt itself describes its tools, as RLLA's do: those calls are not executed.
    """
    if counts_written_calls(rollout.task, source):
        return written_usage(rollout.steps, families)
    # As the environment charges: calls of available tools, including failed ones, and calls that name no tool.
    reachable = {UNREADABLE, *(families if allowed is None else allowed)}
    calls = merge_unknown_calls(rollout.usage.calls, families)
    return RouteUsage.of({tool: count for tool, count in calls.items() if tool in reachable}, families)


def counts_written_calls(task: Task, source: UsageSource) -> bool:
    """Whether the usage of a task's rollouts is counted from the calls in their text, because none are executed."""
    return source == "text" or (source == "auto" and prompt_style(task.prompt) == "rlla")


def written_usage(steps: Sequence[StepData], families: Mapping[str, Family]) -> RouteUsage:
    return usage_of_messages([_step_message(step) for step in steps], families)


def usage_of_messages(messages: Sequence[Message], families: Mapping[str, Family]) -> RouteUsage:
    """The calls that the assistant wrote, executed or not.

    A block that cannot be parsed counts as a call of an unknown tool: it was an attempt to use one.
    """
    replies = (message for message in messages if message.role == "assistant")
    calls = Counter(call.name or UNREADABLE for message in replies for call in tool_calls_in(message))
    return RouteUsage.of(calls, families)


def tool_calls_in(message: Message) -> list[ToolCall]:
    """The parsed calls of a message; without them, those in its text, also several in a block, one per line."""
    if message.tool_calls:
        return message.tool_calls
    text = message.content or ""
    # Only this parser handles blocks with one call per line and both kinds of keys.
    parse = parse_rlla if "<tool_call>" in text.lower() else parse_auto
    return parse(text)[1]


def merge_unknown_calls(calls: Mapping[str, int], families: Mapping[str, Family]) -> Counter[str]:
    """Calls by tool; those that name none of the task's tools are attempts and count as `UNREADABLE`, never free."""
    counts: Counter[str] = Counter()
    for tool, count in calls.items():
        counts[tool if tool in families else UNREADABLE] += count
    return counts


def _step_message(step: StepData) -> Message:
    """The policy's raw text of one step, including its thinking; without text, its parsed action."""
    if step.raw_policy_output is not None:
        return Message(role="assistant", content=step.raw_policy_output)
    action = step.action_taken
    return Message(role="assistant", content=action.get("content"), tool_calls=action.get("tool_calls"))
