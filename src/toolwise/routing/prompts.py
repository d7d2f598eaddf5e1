"""Conditions a prompt on a route: which tools it shows, and what it says about them. Pure functions.

Two styles: RLLA's system messages describe their tools in a text block, which is rewritten; chat templates render the
tools' schemas themselves, so it is enough to pass fewer of them. With mode="append" the original prompt is kept and
text is only added after it, so that its KV cache can be reused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PrivateAttr

from toolwise.data.rlla_rows import TOOL_ENTRY
from toolwise.messages import Message
from toolwise.routing.actions import RouteAction
from toolwise.routing.families import Family, family_of_call
from toolwise.routing.prompt_templates import Style, Wording, load_wording

ConditioningMode = Literal["rewrite", "append"]
_HEADING = re.compile(r"^\*\*Available Tools\*\*\n(?:.*\n)?\Z", re.MULTILINE)
_NUMBER = re.compile(r"\A\d+\. ")
_SYSTEM = ("system", "developer")

ROUTE_FAMILIES: Mapping[RouteAction, Family] = {
    RouteAction.SEARCH_FAMILY: Family.SEARCH,
    RouteAction.CALCULATE_FAMILY: Family.CALCULATE,
}


class RoutedMessage(Message):
    """A message that a route has changed or added; it remembers the original."""

    _original: Message | None = PrivateAttr(default=None)

    @classmethod
    def replacing(cls, original: Message | None, content: str, role: Any = "system") -> RoutedMessage:
        fields = (
            {name: getattr(original, name) for name in cls.model_fields} if original is not None else {"role": role}
        )
        message = cls(**{**fields, "content": content})
        message._original = original
        return message


@dataclass(frozen=True, slots=True)
class ConditionedPrompt:
    """A prompt conditioned on a route."""

    messages: Sequence[Message]
    tools: tuple[str, ...] | None = None
    """Names of the tools to show and execute, those of the route's family first; None: all tools of the task."""
    forbidden: tuple[str, ...] = ()
    """Those of them to refuse with an error that the model reads; shown only to keep the prompt unchanged."""


@dataclass(frozen=True, slots=True)
class ToolPartition:
    """Tool names, split by what a route does with them."""

    first: tuple[str, ...]
    """Of the route's family."""
    others: tuple[str, ...]
    """Of neither family."""
    rest: tuple[str, ...]
    """Of the other family; for ANSWER all tools."""

    def offered(self, *, hard: bool) -> tuple[str, ...]:
        return (*self.first, *self.others) if hard else (*self.first, *self.others, *self.rest)


def sort_tools(route: RouteAction, families: Mapping[str, Family]) -> ToolPartition:
    """Splits tools into the route's family, neither family, and the other family."""
    if route is RouteAction.ANSWER:
        return ToolPartition((), (), tuple(families))
    route_family = ROUTE_FAMILIES[route]
    groups: dict[bool | None, list[str]] = {True: [], None: [], False: []}
    for name, family in families.items():
        groups[None if family is Family.OTHER else family is route_family].append(name)
    return ToolPartition(tuple(groups[True]), tuple(groups[None]), tuple(groups[False]))


def allowed_tools(route: RouteAction, families: Mapping[str, Family], *, hard: bool = True) -> tuple[str, ...]:
    """Names of the tools that the model may call under a route. ANSWER allows none, hard or not."""
    return sort_tools(route, families).offered(hard=hard or route is RouteAction.ANSWER)


def condition(
    messages: Sequence[Message],
    route: RouteAction | str,
    families: Mapping[str, Family],
    *,
    style: Style | Literal["auto"] = "auto",
    mode: ConditioningMode = "rewrite",
    hard: bool = True,
    templates: Wording | None = None,
) -> ConditionedPrompt:
    """Conditions `messages` on `route`. A prompt that is already conditioned is conditioned from its original."""
    route = RouteAction.parse(route)
    original = unconditioned(messages)
    wording = load_wording() if templates is None else templates
    described = style == "rlla" or (style == "auto" and prompt_style(original) == "rlla")
    kind: Style = "rlla" if described else "chat"
    tools = sort_tools(route, families)
    hard = hard or route is RouteAction.ANSWER
    if mode == "append":
        text = wording.render(kind, route, "append", _template_values(tools, hard, named=True))
        return ConditionedPrompt(_append_to_last(original, text), None, tools.rest if hard else ())
    if described:
        return ConditionedPrompt(
            _rewrite_tool_blocks(original, route, families, hard, wording), tools.offered(hard=hard)
        )
    text = wording.render(kind, route, "note", _template_values(tools, hard))
    return ConditionedPrompt(_with_note(original, text), tools.offered(hard=hard))


def unconditioned(messages: Sequence[Message]) -> Sequence[Message]:
    """The original of a conditioned prompt, or of a conversation that starts with one; others unchanged."""
    if not any(isinstance(message, RoutedMessage) for message in messages):
        return messages
    originals = (m._original if isinstance(m, RoutedMessage) else m for m in messages)
    return [message for message in originals if message is not None]


def prompt_style(messages: Sequence[Message]) -> Style:
    """How a prompt describes its tools."""
    described = any(m.role in _SYSTEM and TOOL_ENTRY.search(m.content or "") for m in messages)
    return "rlla" if described else "chat"


def _template_values(
    tools: ToolPartition, hard: bool, *, named: bool = False, entries: str = "", avoided: str = ""
) -> dict[str, Any]:
    """Variables for templates. Hidden tools are not named: the model does not know them and need not avoid them."""
    return {
        "entries": entries,
        "avoided": avoided,
        "first": list(tools.first),
        "others": list(tools.others),
        "avoid": list(tools.rest) if named or not hard else [],
        "hard": hard,
    }


def _rewrite_tool_blocks(
    messages: Sequence[Message], route: RouteAction, families: Mapping[str, Family], hard: bool, wording: Wording
) -> list[Message]:
    """Rewrites the tool block of every system message that describes tools."""
    out: list[Message] = []
    for message in messages:
        text = message.content or ""
        entries = list(TOOL_ENTRY.finditer(text)) if message.role in _SYSTEM else []
        if not entries:
            out.append(message)
            continue
        values = _block_values(entries, route, families, hard)
        begin, first, end = _block_bounds(text, entries)
        block = wording.render("rlla", route, "block", values).strip("\n")
        if not wording.has_template("rlla", route, "block") and values["entries"] + values["avoided"]:
            block = text[begin:first] + "\n".join(filter(None, (values["entries"], values["avoided"])))
        head, tail = text[:begin], text[end:]
        if not block:  # also drop the empty lines around it
            head, tail = f"{head.rstrip()}\n\n".lstrip(), tail.lstrip()
        note = wording.render("rlla", route, "note", values).strip("\n")
        body = head + block + tail
        out.append(RoutedMessage.replacing(message, f"{body.rstrip()}\n\n{note}" if note else body))
    return out


def _block_values(
    entries: Sequence[re.Match[str]], route: RouteAction, families: Mapping[str, Family], hard: bool
) -> dict[str, Any]:
    """Template variables of a block. Entries are sorted by index: a block may repeat a tool or name an unknown one."""
    partition = sort_tools(
        route, {str(index): family_of_call(entry[1].strip(), families) for index, entry in enumerate(entries)}
    )
    offered = partition.offered(hard=True)
    return _template_values(
        ToolPartition(*(_entry_names(entries, part) for part in (partition.first, partition.others, partition.rest))),
        hard,
        entries=_renumbered(entries, offered, 1),
        avoided="" if hard else _renumbered(entries, partition.rest, 1 + len(offered)),
    )


def _block_bounds(text: str, entries: Sequence[re.Match[str]]) -> tuple[int, int, int]:
    """Start of the block (with its heading, if any), start of its first entry, end of its last entry."""
    first = entries[0].start()
    heading = _HEADING.search(text[:first])
    return heading.start() if heading else first, first, entries[-1].end()


def _entry_names(entries: Sequence[re.Match[str]], indices: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entries[int(index)][1].strip() for index in indices))


def _renumbered(entries: Sequence[re.Match[str]], indices: Sequence[str], start: int) -> str:
    """The entries verbatim, with new numbers."""
    return "\n".join(_NUMBER.sub(f"{n}. ", entries[int(index)][0]) for n, index in enumerate(indices, start))


def _with_note(messages: Sequence[Message], note: str) -> Sequence[Message]:
    """Adds the note to the end of the first system message, or as a new one if there is none."""
    note = note.strip("\n")
    if not note:
        return messages
    out = list(messages)
    index = next((i for i, message in enumerate(out) if message.role in _SYSTEM), None)
    if index is None:
        return [RoutedMessage.replacing(None, note), *out]
    text = (out[index].content or "").rstrip()
    out[index] = RoutedMessage.replacing(out[index], f"{text}\n\n{note}" if text else note)
    return out


def _append_to_last(messages: Sequence[Message], text: str) -> Sequence[Message]:
    """Appends `text` to the last message, so that everything before it keeps its tokens."""
    if not text or not messages:
        return messages
    *before, last = messages
    return [*before, RoutedMessage.replacing(last, f"{last.content or ''}{text}")]
