"""Which tools a rollout used, by family: from the calls really made, or from the text where nothing executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from toolwise.messages import Message, ToolCall
from toolwise.rollout.parsers import parse_auto, parse_rlla
from toolwise.routing.families import Family, family_of_call
from toolwise.routing.prompts import prompt_style
from toolwise.types import Rollout, StepData

UNREADABLE = "unreadable"
"""The name under which the environment, and this module, count calls whose name nobody can read."""

UsageSource = Literal["auto", "executed", "text"]


@dataclass(frozen=True, slots=True)
class RouteUsage:
    """The calls of one rollout."""

    calls_by_tool: Mapping[str, int] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    """The family of each tool in `calls_by_tool`."""
    refused: int = 0
    """Calls of tools that the route hides or forbids: the model read an error, nothing ran."""

    @property
    def calls(self) -> dict[Family, int]:
        counts = dict.fromkeys(Family, 0)
        for tool, count in self.calls_by_tool.items():
            counts[self.families.get(tool, Family.OTHER)] += count
        return counts

    @property
    def used_any_tool(self) -> bool:
        return any(self.calls_by_tool.values())

    @property
    def used_search(self) -> bool:
        return self.calls[Family.SEARCH] > 0

    @property
    def used_calculate(self) -> bool:
        return self.calls[Family.CALCULATE] > 0

    @classmethod
    def of(cls, calls_by_tool: Mapping[str, int], families: Mapping[str, Family], *, refused: int = 0) -> RouteUsage:
        """A tool that `families` does not know is judged by its name."""
        made = {tool: count for tool, count in calls_by_tool.items() if count}
        return cls(made, {tool: family_of_call(tool, families) for tool in made}, refused)


def usage_of(
    rollout: Rollout,
    families: Mapping[str, Family],
    *,
    allowed: Collection[str] | None = None,
    source: UsageSource = "auto",
) -> RouteUsage:
    """What a rollout used. `allowed` are the tools that its route offered; a call of another came to nothing.

    "auto" goes by the text where the prompt itself describes its tools, as RLLA's do: nobody carries those calls out.
    """
    if counts_written_calls(rollout, source):
        return usage_of_messages([_step_message(step) for step in rollout.steps], families)
    return _executed_usage(rollout.usage.calls, families, families if allowed is None else allowed)


def counts_written_calls(rollout: Rollout, source: UsageSource) -> bool:
    """Whether the calls of a rollout are those that were written, there being nobody who carries them out."""
    return source == "text" or (source == "auto" and prompt_style(rollout.task.prompt) == "rlla")


def usage_of_messages(messages: Sequence[Message], families: Mapping[str, Family]) -> RouteUsage:
    """The calls that the assistant wrote, whoever carried them out; for RLLA nobody does.

    A block that cannot be read counts as a call of no known tool: it was an attempt to use one.
    """
    said = (message for message in messages if message.role == "assistant")
    return RouteUsage.of(_count_by_name(call for message in said for call in tool_calls_in(message)), families)


def usage_of_text(text: str, families: Mapping[str, Family]) -> RouteUsage:
    """The same for one reply as the model wrote it."""
    return RouteUsage.of(_count_by_name(tool_calls_in(Message(role="assistant", content=text))), families)


def tool_calls_in(message: Message) -> list[ToolCall]:
    """As the policy's parser gave them; else those that stand in the text, one a line within a block as well."""
    if message.tool_calls:
        return message.tool_calls
    text = message.content or ""
    # Of a block with one call a line and keys of either kind, only this parser loses none.
    parse = parse_rlla if "<tool_call>" in text.lower() else parse_auto
    return parse(text)[1]


def _count_by_name(calls: Iterable[ToolCall]) -> Counter[str]:
    return Counter(call.name or UNREADABLE for call in calls)


def _executed_usage(calls: Mapping[str, int], families: Mapping[str, Family], reachable: Collection[str]) -> RouteUsage:
    """As the environment charges: a call that names a tool on offer, failed ones too, and one that names none. Those
    that the route refuses cost nothing."""
    named = merge_unknown_calls(calls, families)
    made = {tool: count for tool, count in named.items() if tool in reachable or tool == UNREADABLE}
    return RouteUsage.of(made, families, refused=sum(named.values()) - sum(made.values()))


def merge_unknown_calls(calls: Mapping[str, int], families: Mapping[str, Family]) -> Counter[str]:
    """Calls by tool, those that name none of the task's under `UNREADABLE`: attempts to use one, and never free."""
    counts: Counter[str] = Counter()
    for tool, count in calls.items():
        counts[tool if tool in families else UNREADABLE] += count
    return counts


def _step_message(step: StepData) -> Message:
    """What the policy wrote in one step, its thought included; without its text, what it decided."""
    if step.raw_policy_output is not None:
        return Message(role="assistant", content=step.raw_policy_output)
    action = step.action_taken
    return Message(role="assistant", content=action.get("content"), tool_calls=action.get("tool_calls"))
