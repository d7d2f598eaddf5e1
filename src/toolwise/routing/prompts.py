"""Conditions a prompt on a route: which tools it shows, and what it says about them.

Two styles: RLLA's system messages describe their tools in a text block, which is rewritten; chat templates render the
tools' schemas themselves, so it is enough to pass fewer of them. With mode="append" the original prompt is kept and
text is only added after it, so that its KV cache can be reused. The texts are Jinja templates in a TOML file that users
can replace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, create_model

from toolwise.config.loader import Section, build_config, read_settings
from toolwise.data.rlla_rows import TOOL_ENTRY
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.routing.families import RouteAction, family_of_call
from toolwise.routing.routes import DEFAULT_ROUTES, Route, RouteSet

WORDING_FILE = Path(__file__).with_name("wording.toml")

Style = Literal["rlla", "chat"]
Part = Literal["block", "note", "append"]
ConditioningMode = Literal["rewrite", "append"]
_HEADING = re.compile(r"^\*\*Available Tools\*\*\n(?:.*\n)?\Z", re.MULTILINE)
_NUMBER = re.compile(r"\A\d+\. ")
_SYSTEM = ("system", "developer")


@dataclass(frozen=True)
class Wording:
    """Templates by (style, route, part); a missing one renders to nothing."""

    templates: Mapping[tuple[str, str, str], str]

    def render(self, style: Style, route: str, part: Part, values: Mapping[str, Any]) -> str:
        text = self.templates.get((style, route, part), "")
        return _compile(text).render(**values) if text else ""


EMPTY_WORDING = Wording({})
"""Adds no text: tool blocks are removed and schemas hidden, nothing else."""


def load_wording(path: str | Path | None = None, routes: RouteSet = DEFAULT_ROUTES) -> Wording:
    """The shipped wording, or the notes of a user's routes, overridden by the templates in `path`; "silent" is the
    empty wording, with the notes."""
    shipped = _notes(routes) if routes.own else {} if path == "silent" else _shipped_templates()
    if path == "silent" or path is None:
        return Wording(shipped) if shipped else EMPTY_WORDING
    return Wording(shipped | _read_templates(Path(path), routes))


def _notes(routes: RouteSet) -> dict[tuple[str, str, str], str]:
    templates: dict[tuple[str, str, str], str] = {}
    for route in routes:
        if note := route.options.note:
            _check_template("router.routes", f"the note of {route.name!r}", note)
            for style in ("rlla", "chat"):
                templates[style, route.name, "note"] = note
                templates[style, route.name, "append"] = f"\n\n{note}"
    return templates


@cache
def _shipped_templates() -> dict[tuple[str, str, str], str]:
    return _read_templates(WORDING_FILE, DEFAULT_ROUTES)


class _ChatTexts(Section):
    note: str = ""
    append: str = ""


class _RllaTexts(_ChatTexts):
    block: str = ""


def _wording_file(routes: RouteSet) -> type[Section]:
    """The format of a wording file for these routes."""
    name: Any = Literal[routes.names] if routes.own else RouteAction
    empty: Any = Field(default_factory=dict)
    fields: dict[str, Any] = {"rlla": (dict[name, _RllaTexts], empty), "chat": (dict[name, _ChatTexts], empty)}
    fields["budget"] = (dict[Literal["prompt", "left"], str], empty)  # routing/budget_prompt.py
    return create_model("WordingFile", __base__=Section, **fields)


def _read_templates(path: Path, routes: RouteSet) -> dict[tuple[str, str, str], str]:
    file = build_config(_wording_file(routes), read_settings(path), source=str(path))
    templates = {
        (style, route, part): text
        for style, by_route in file
        if style != "budget"
        for route, texts in by_route.items()
        for part, text in texts.model_dump(exclude_unset=True).items()
    }
    for (style, route, part), text in templates.items():
        _check_template(str(path), f"{style}.{route}.{part}", text)
    return templates


def _check_template(path: str, where: str, text: str) -> None:
    check_text(path, where, text, {"entries": "", "avoided": "", "first": [], "others": [], "avoid": [], "hard": True})


def check_text(path: str, where: str, text: str, values: Mapping[str, Any]) -> None:
    """Raises if a template cannot be rendered with these variables."""
    from jinja2 import TemplateError

    try:
        render_text(text, values)
    except TemplateError as fault:
        raise ConfigError(f"{path}: {where}: {' '.join(str(fault).split())}") from fault


def render_text(text: str, values: Mapping[str, Any]) -> str:
    return str(_compile(text).render(**values))


@cache
def _compile(text: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The file may come from someone other than the user who runs it: sandboxed, so templates can only render text.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)


class RoutedMessage(Message):
    """A message that a route has changed or added; it remembers the original."""

    _original: Message | None = PrivateAttr(default=None)

    @classmethod
    def replacing(cls, original: Message | None, content: str) -> RoutedMessage:
        fields: dict[str, Any] = {"role": "system"}
        if original is not None:
            fields = {name: getattr(original, name) for name in cls.model_fields}
        message = cls(**{**fields, "content": content})
        message._original = original
        return message

    @property
    def original(self) -> Message | None:
        return self._original


@dataclass(frozen=True, slots=True)
class ConditionedPrompt:
    messages: Sequence[Message]
    tools: tuple[str, ...] | None = None
    """Names of the tools to show and execute, those of the route's family first; None: all tools of the task."""
    forbidden: tuple[str, ...] = ()
    """Those of them to refuse with an error that the model reads; shown only to keep the prompt unchanged."""


@dataclass(frozen=True, slots=True)
class ToolPartition:
    """Tool names, split by what a route does with them."""

    first: tuple[str, ...]
    """The route's own."""
    others: tuple[str, ...]
    """Offered too, after them: the tools of neither family, on the default routes."""
    rest: tuple[str, ...]
    """Those of other routes; all tools if the route has none."""

    def offered(self, *, hard: bool) -> tuple[str, ...]:
        return (*self.first, *self.others) if hard else (*self.first, *self.others, *self.rest)


def sort_tools(route: Route | str, families: Mapping[str, str]) -> ToolPartition:
    """Splits tools into the route's own, those it shares with others, and the rest. A name is one of the default
    routes'."""
    if not isinstance(route, Route):
        route = DEFAULT_ROUTES.find(route)
    return _partition(route, [(name, name, family) for name, family in families.items()])


def _partition(route: Route, tools: Sequence[tuple[str, str, str]]) -> ToolPartition:
    """`tools` are (key, name, family); the partition is of the keys."""
    first = [key for key, name, family in tools if route.has(name, family)]
    others = [key for key, name, family in tools if family in route.shared_families and not route.has(name, family)]
    kept = {*first, *others}
    return ToolPartition(tuple(first), tuple(others), tuple(key for key, _, _ in tools if key not in kept))


def allowed_tools(route: Route | str, families: Mapping[str, str], *, hard: bool = True) -> tuple[str, ...]:
    """Names of the tools that the model may call under a route. A route without tools allows none, hard or not."""
    if not isinstance(route, Route):
        route = DEFAULT_ROUTES.find(route)
    return sort_tools(route, families).offered(hard=hard or not route.needs_tools)


def condition(
    messages: Sequence[Message],
    route: Route | str,
    families: Mapping[str, str],
    *,
    style: Style | Literal["auto"] = "auto",
    mode: ConditioningMode = "rewrite",
    hard: bool = True,
    templates: Wording | None = None,
) -> ConditionedPrompt:
    """Conditions `messages` on `route`. A prompt that is already conditioned is conditioned from its original."""
    if not isinstance(route, Route):
        route = DEFAULT_ROUTES.find(route)
    original = unconditioned(messages)
    wording = load_wording() if templates is None else templates
    kind = prompt_style(original) if style == "auto" else style
    tools = sort_tools(route, families)
    hard = hard or not route.needs_tools
    if mode == "append":
        text = wording.render(kind, route.name, "append", _template_values(tools, hard, named=True))
        if text and original:  # everything before the text keeps its tokens
            *before, last = original
            original = [*before, RoutedMessage.replacing(last, f"{last.content or ''}{text}")]
        return ConditionedPrompt(original, None, tools.rest if hard else ())
    if kind == "rlla":
        rewritten: Sequence[Message] = _rewrite_tool_blocks(original, route, families, hard, wording)
    else:
        rewritten = _with_note(original, wording.render(kind, route.name, "note", _template_values(tools, hard)))
    return ConditionedPrompt(rewritten, tools.offered(hard=hard))


def unconditioned(messages: Sequence[Message]) -> Sequence[Message]:
    """The original of a conditioned prompt, or of a conversation that starts with one; others unchanged."""
    if not any(isinstance(message, RoutedMessage) for message in messages):
        return messages
    originals = (m._original if isinstance(m, RoutedMessage) else m for m in messages)
    return [message for message in originals if message is not None]


def route_changes(messages: Sequence[Message]) -> list[tuple[int, Message | None]]:
    """(index, original) of the messages that a route has changed, None for one that it added; see `undo_changes`."""
    return [(index, m._original) for index, m in enumerate(messages) if isinstance(m, RoutedMessage)]


def undo_changes(messages: Sequence[Message], changes: Sequence[tuple[int, Message | None]]) -> list[Message]:
    """What `unconditioned` returns, for messages that were stored and read again: they no longer know their
    originals, so `changes` say them."""
    originals = dict(changes)
    restored = (originals.get(index, message) for index, message in enumerate(messages))
    return [message for message in restored if message is not None]


def prompt_style(messages: Sequence[Message]) -> Style:
    return "rlla" if any(m.role in _SYSTEM and TOOL_ENTRY.search(m.content or "") for m in messages) else "chat"


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
    messages: Sequence[Message], route: Route, families: Mapping[str, str], hard: bool, wording: Wording
) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        text = message.content or ""
        entries = list(TOOL_ENTRY.finditer(text)) if message.role in _SYSTEM else []
        if not entries:
            out.append(message)
            continue
        values = _block_values(entries, route, families, hard)
        first, end = entries[0].start(), entries[-1].end()
        heading = _HEADING.search(text[:first])
        begin = heading.start() if heading else first
        block = wording.render("rlla", route.name, "block", values).strip("\n")
        if ("rlla", route.name, "block") not in wording.templates and values["entries"] + values["avoided"]:
            block = text[begin:first] + "\n".join(filter(None, (values["entries"], values["avoided"])))
        head, tail = text[:begin], text[end:]
        if not block:  # also drop the empty lines around it
            head, tail = f"{head.rstrip()}\n\n".lstrip(), tail.lstrip()
        note = wording.render("rlla", route.name, "note", values).strip("\n")
        body = head + block + tail
        out.append(RoutedMessage.replacing(message, f"{body.rstrip()}\n\n{note}" if note else body))
    return out


def _block_values(
    entries: Sequence[re.Match[str]], route: Route, families: Mapping[str, str], hard: bool
) -> dict[str, Any]:
    """Template variables of a block. Entries are sorted by index: a block may repeat a tool or name an unknown one."""
    names = [entry[1].strip() for entry in entries]
    partition = _partition(route, [(str(i), name, family_of_call(name, families)) for i, name in enumerate(names)])
    offered, parts = partition.offered(hard=True), (partition.first, partition.others, partition.rest)
    return _template_values(
        ToolPartition(*(tuple(dict.fromkeys(names[int(i)] for i in part)) for part in parts)),
        hard,
        entries=_renumbered(entries, offered, 1),
        avoided="" if hard else _renumbered(entries, partition.rest, 1 + len(offered)),
    )


def _renumbered(entries: Sequence[re.Match[str]], indices: Sequence[str], start: int) -> str:
    """The entries verbatim, with new numbers."""
    return "\n".join(_NUMBER.sub(f"{n}. ", entries[int(index)][0]) for n, index in enumerate(indices, start))


def _with_note(messages: Sequence[Message], note: str) -> Sequence[Message]:
    """Adds the note to the end of the first system message, or as a new one if there is none."""
    note = note.strip("\n")
    if not note:
        return messages
    index = next((i for i, message in enumerate(messages) if message.role in _SYSTEM), None)
    if index is None:
        return [RoutedMessage.replacing(None, note), *messages]
    text = (messages[index].content or "").rstrip()
    changed = RoutedMessage.replacing(messages[index], f"{text}\n\n{note}" if text else note)
    return [*messages[:index], changed, *messages[index + 1 :]]
