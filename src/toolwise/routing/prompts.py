"""A prompt as a route wants it: which tools it shows, and what it says of them. Pure; between deciding and rolling out.

Two styles: RLLA's system messages describe their tools in a text block, which is rewritten; chat templates write the
tools' schemas themselves, so there it is enough to hand on fewer of them. With mode="append" the original prompt is
left whole and words are added only behind it, so that what was computed for it can be used again.
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
    """A message that a route has changed or added; it knows what stood there before."""

    _original: Message | None = PrivateAttr(default=None)

    @classmethod
    def replacing(cls, original: Message | None, content: str, role: Any = "system") -> RoutedMessage:
        kept = {name: getattr(original, name) for name in cls.model_fields} if original is not None else {"role": role}
        made = cls(**{**kept, "content": content})
        made._original = original
        return made


@dataclass(frozen=True, slots=True)
class ConditionedPrompt:
    """A prompt after routing."""

    messages: Sequence[Message]
    tools: tuple[str, ...] | None = None
    """Names of the tools to show and to serve, those of the route's family first; None: all that the task has."""
    forbidden: tuple[str, ...] = ()
    """Of these, the ones to refuse with an error that the model reads: shown only to leave the prompt as it was."""


@dataclass(frozen=True, slots=True)
class ToolPartition:
    """Tool names as a route sees them."""

    first: tuple[str, ...]
    others: tuple[str, ...]
    rest: tuple[str, ...]
    """Of the other family; for ANSWER all there are."""

    def offered(self, *, hard: bool) -> tuple[str, ...]:
        return (*self.first, *self.others) if hard else (*self.first, *self.others, *self.rest)


def sort_tools(route: RouteAction, families: Mapping[str, Family]) -> ToolPartition:
    """The route's family, those of neither, and the other family."""
    if route is RouteAction.ANSWER:
        return ToolPartition((), (), tuple(families))
    mine = ROUTE_FAMILIES[route]
    groups: dict[bool | None, list[str]] = {True: [], None: [], False: []}
    for name, family in families.items():
        groups[None if family is Family.OTHER else family is mine].append(name)
    return ToolPartition(tuple(groups[True]), tuple(groups[None]), tuple(groups[False]))


def allowed_tools(route: RouteAction, families: Mapping[str, Family], *, hard: bool = True) -> tuple[str, ...]:
    """Names of the tools that a route lets the model call. ANSWER allows none, hard or not."""
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
    """`messages` as `route` wants them. Conditioning a conditioned prompt starts from its original."""
    route = RouteAction.parse(route)
    original = unconditioned(messages)
    wording = load_wording() if templates is None else templates
    described = style == "rlla" or (style == "auto" and prompt_style(original) == "rlla")
    kind: Style = "rlla" if described else "chat"
    tools = sort_tools(route, families)
    hard = hard or route is RouteAction.ANSWER
    if mode == "append":
        said = wording.render(kind, route, "append", _template_values(tools, hard, named=True))
        return ConditionedPrompt(_append_to_last(original, said), None, tools.rest if hard else ())
    if described:
        return ConditionedPrompt(
            _rewrite_tool_blocks(original, route, families, hard, wording), tools.offered(hard=hard)
        )
    said = wording.render(kind, route, "note", _template_values(tools, hard))
    return ConditionedPrompt(_with_note(original, said), tools.offered(hard=hard))


def unconditioned(messages: Sequence[Message]) -> Sequence[Message]:
    """The original of a conditioned prompt, or of a conversation that began with one; others as they are."""
    if not any(isinstance(message, RoutedMessage) for message in messages):
        return messages
    originals = (m._original if isinstance(m, RoutedMessage) else m for m in messages)
    return [message for message in originals if message is not None]


def prompt_style(messages: Sequence[Message]) -> Style:
    """How a prompt tells of its tools."""
    described = any(m.role in _SYSTEM and TOOL_ENTRY.search(m.content or "") for m in messages)
    return "rlla" if described else "chat"


def _template_values(
    tools: ToolPartition, hard: bool, *, named: bool = False, entries: str = "", avoided: str = ""
) -> dict[str, Any]:
    """What templates may speak of. Hidden tools are not named: a model cannot avoid what it does not know of."""
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
    """Every system message that describes tools, with its block as the route wants it."""
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
        if not block:  # nor the empty lines around it
            head, tail = f"{head.rstrip()}\n\n".lstrip(), tail.lstrip()
        note = wording.render("rlla", route, "note", values).strip("\n")
        body = head + block + tail
        out.append(RoutedMessage.replacing(message, f"{body.rstrip()}\n\n{note}" if note else body))
    return out


def _block_values(
    entries: Sequence[re.Match[str]], route: RouteAction, families: Mapping[str, Family], hard: bool
) -> dict[str, Any]:
    """The entries of a block, sorted: each by itself, for a block may describe a tool twice, or an unknown one."""
    places = sort_tools(
        route, {str(place): family_of_call(entry[1].strip(), families) for place, entry in enumerate(entries)}
    )
    offered = places.offered(hard=True)
    return _template_values(
        ToolPartition(*(_entry_names(entries, part) for part in (places.first, places.others, places.rest))),
        hard,
        entries=_renumbered(entries, offered, 1),
        avoided="" if hard else _renumbered(entries, places.rest, 1 + len(offered)),
    )


def _block_bounds(text: str, entries: Sequence[re.Match[str]]) -> tuple[int, int, int]:
    """Where the block begins, with its heading if it has one; where its first entry does; where its last one ends."""
    first = entries[0].start()
    heading = _HEADING.search(text[:first])
    return heading.start() if heading else first, first, entries[-1].end()


def _entry_names(entries: Sequence[re.Match[str]], places: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entries[int(place)][1].strip() for place in places))


def _renumbered(entries: Sequence[re.Match[str]], places: Sequence[str], start: int) -> str:
    """Entries as they are written, under new numbers."""
    return "\n".join(_NUMBER.sub(f"{n}. ", entries[int(place)][0]) for n, place in enumerate(places, start))


def _with_note(messages: Sequence[Message], note: str) -> Sequence[Message]:
    """The note at the end of the first system message, or as one where there is none."""
    note = note.strip("\n")
    if not note:
        return messages
    out = list(messages)
    place = next((i for i, message in enumerate(out) if message.role in _SYSTEM), None)
    if place is None:
        return [RoutedMessage.replacing(None, note), *out]
    before = (out[place].content or "").rstrip()
    out[place] = RoutedMessage.replacing(out[place], f"{before}\n\n{note}" if before else note)
    return out


def _append_to_last(messages: Sequence[Message], said: str) -> Sequence[Message]:
    """`said` behind the last message's own words: what stands before it keeps its tokens."""
    if not said or not messages:
        return messages
    *before, last = messages
    return [*before, RoutedMessage.replacing(last, f"{last.content or ''}{said}")]
