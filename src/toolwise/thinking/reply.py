"""Parses a reply into level, thought and action with their spans, and lists every format fault.

Accepts any text, in linear time. It finds the same action as `rollout.parsers`: what the environment received is what
is scored here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from toolwise.types import LEVEL_COUNT

Span = tuple[int, int]
"""[start, end) in characters."""
ActionKind = Literal["action", "tool_call", "answer"]


class FormatFault(StrEnum):
    """A format error in a reply."""

    NO_LEVEL = "no_level"
    REPEATED_LEVEL = "repeated_level"
    UNCLOSED_LEVEL = "unclosed_level"
    BAD_LEVEL = "bad_level"
    """Not one of 1, 2, 3, 4."""
    LATE_LEVEL = "late_level"
    """The level comes after the thought or the action it should announce."""
    NO_THOUGHT = "no_thought"
    """No thought at a level above 1."""
    EMPTY_THOUGHT = "empty_thought"
    NEEDLESS_THOUGHT = "needless_thought"
    """A thought at level 1."""
    REPEATED_THOUGHT = "repeated_thought"
    UNCLOSED_THOUGHT = "unclosed_thought"
    UNOPENED_THOUGHT = "unopened_thought"
    NESTED_TAG = "nested_tag"
    """A tag inside a thought or an action."""
    ACTION_FIRST = "action_first"
    """The action comes before the thought."""
    NO_ACTION = "no_action"
    EMPTY_ACTION = "empty_action"
    REPEATED_ACTION = "repeated_action"
    UNCLOSED_ACTION = "unclosed_action"
    """Also a `<tool_call>` without its closing tag."""
    STRAY_TEXT = "stray_text"
    """Text or tags between the parts, or after the action."""


@dataclass(frozen=True, slots=True)
class TextSpans:
    """Where the parts are in the text; None if a part is missing."""

    level: Span | None
    """Between the level's tags."""
    thought: Span | None
    """Between the thought's tags."""
    action: Span | None
    """What is scored: the text inside `<action>`, whose tag belongs to the context; or a whole tool call with its tags,
    or a whole answer, since choosing between calling and answering is part of the decision."""
    head: Span
    """Level and thought with their tags, without the white space before the action, which is part of all contexts."""


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """The parts of a reply and its format faults."""

    level: int | None
    """1 to 4; None if missing or invalid."""
    thought: str | None
    action: str | None
    kind: ActionKind | None
    faults: tuple[FormatFault, ...]
    """In the order of `FormatFault`, without repeats; empty for a valid reply."""
    spans: TextSpans

    @property
    def valid(self) -> bool:
        return not self.faults


_TAG = re.compile(r"<(?P<end>/?)(?P<name>level|think|action)>", re.IGNORECASE | re.ASCII)
_CALL = re.compile(r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>", re.IGNORECASE | re.ASCII)
_CALL_TAG = re.compile(r"<(?P<end>/?)tool_call>", re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(rf"[1-{LEVEL_COUNT}]", re.ASCII)


class _Tag(NamedTuple):
    name: str
    """level, think or action; with a leading slash for a closing tag."""
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A part with its tags, [start, end), and the span inside the tags."""

    start: int
    inside: Span
    end: int

    def contains(self, tag: _Tag) -> bool:
        return self.inside[0] <= tag.start and tag.end <= self.inside[1]


def parse_reply(text: str) -> ParsedReply:
    """Find the level, the thought and the action in `text`, and all format faults."""
    tags = [_Tag(m["end"] + m["name"].lower(), m.start(), m.end()) for m in _TAG.finditer(text)]
    faults: set[FormatFault] = set()
    thought = _find_thought(text, tags, faults)
    level = _find_level(text, tags, thought, faults)
    action, kind = _find_action(text, tags, level, thought, faults)
    if thought is not None and FormatFault.UNCLOSED_THOUGHT in faults:  # it ends where the action begins
        end = max(thought.inside[0], min(thought.end, action.start if action else thought.end))
        thought = _Block(thought.start, (thought.inside[0], end), end)
    digits = text[slice(*level.inside)].strip() if level else ""
    number = int(digits) if _NUMBER.fullmatch(digits) else None
    thought_text = text[slice(*thought.inside)].strip() if thought else None
    checks = {
        FormatFault.BAD_LEVEL: level is not None and number is None,
        FormatFault.NO_THOUGHT: thought is None and number != 1,
        FormatFault.NEEDLESS_THOUGHT: thought is not None and number == 1,
        FormatFault.EMPTY_THOUGHT: thought_text == "" and number != 1,
    }
    faults.update(fault for fault, is_found in checks.items() if is_found)
    _check_between_parts(text, tags, [b for b in (level, thought, action) if b is not None], faults)
    return ParsedReply(
        level=number,
        thought=thought_text,
        action=text[slice(*action.inside)] if action else None,
        kind=kind,
        faults=tuple(fault for fault in FormatFault if fault in faults),
        spans=TextSpans(
            level=level.inside if level else None,
            thought=thought.inside if thought else None,
            action=action.inside if action else None,
            head=(0, _head(text, [b for b in (level, thought) if b is not None], action)),
        ),
    )


def _head(text: str, blocks: list[_Block], action: _Block | None) -> int:
    """Where level and thought end; or where the action starts, if there is text between them and the action."""
    if action is None:
        return max((b.end for b in blocks), default=len(text))
    end = max((b.end for b in blocks if b.end <= action.start), default=0)
    return action.start if text[end : action.start].strip() else end


def _find_thought(text: str, tags: list[_Tag], faults: set[FormatFault]) -> _Block | None:
    """From the first opening tag to the next closing tag, as in `rollout.parsers`; unclosed, to the end of the text."""
    opening = next((tag for tag in tags if tag.name == "think"), None)
    closing = next((tag for tag in tags if tag.name == "/think" and (not opening or tag.start >= opening.end)), None)
    if opening and closing:
        return _Block(opening.start, (opening.end, closing.start), closing.end)
    if opening:
        faults.add(FormatFault.UNCLOSED_THOUGHT)
        return _Block(opening.start, (opening.end, len(text)), len(text))
    if closing:  # the opening tag may have been in the prompt
        faults.add(FormatFault.UNOPENED_THOUGHT)
        start = max((tag.end for tag in tags if tag.name == "/level" and tag.end <= closing.start), default=0)
        return _Block(start, (start, closing.start), closing.end)
    return None


def _find_level(text: str, tags: list[_Tag], thought: _Block | None, faults: set[FormatFault]) -> _Block | None:
    openings = [tag for tag in tags if tag.name == "level" and not (thought and thought.contains(tag))]
    if not openings:
        faults.add(FormatFault.NO_LEVEL)
        return None
    if len(openings) > 1:
        faults.add(FormatFault.REPEATED_LEVEL)
    first = openings[0]
    if any(tag.start < first.start and tag.name in ("think", "action") for tag in tags):
        faults.add(FormatFault.LATE_LEVEL)
    after = next((tag for tag in tags if tag.start >= first.end), None)
    if after is not None and after.name == "/level":
        return _Block(first.start, (first.end, after.start), after.end)
    faults.add(FormatFault.UNCLOSED_LEVEL)
    digits = re.compile(r"\s*\d*", re.ASCII).match(text, first.end)
    end = digits.end() if digits else first.end
    return _Block(first.start, (first.end, end), end)


def _find_action(
    text: str, tags: list[_Tag], level: _Block | None, thought: _Block | None, faults: set[FormatFault]
) -> tuple[_Block | None, ActionKind | None]:
    """The last `<action>` block after the thought; else a tool call or an answer after it."""
    if FormatFault.UNCLOSED_THOUGHT in faults:  # the thought ends where the action begins
        start = thought.inside[0] if thought else 0
    else:
        start = thought.end if thought else level.end if level else 0
    openings = [tag for tag in tags if tag.name == "action" and tag.start >= start]
    if not openings and thought:
        openings = [tag for tag in tags if tag.name == "action" and tag.end <= thought.start]
        if openings:
            faults.add(FormatFault.ACTION_FIRST)
    if not openings:
        return _find_untagged_action(text, start, faults)
    if len(openings) > 1:
        faults.add(FormatFault.REPEATED_ACTION)
    last = openings[-1]
    closing = next((tag for tag in tags if tag.name == "/action" and tag.start >= last.end), None)
    if closing is None:
        faults.add(FormatFault.UNCLOSED_ACTION)
    inside = _strip_span(text, last.end, closing.start if closing else len(text))
    if inside[0] == inside[1]:
        faults.add(FormatFault.EMPTY_ACTION)
    return _Block(last.start, inside, closing.end if closing else len(text)), "action"


def _find_untagged_action(text: str, start: int, faults: set[FormatFault]) -> tuple[_Block | None, ActionKind | None]:
    inside = _strip_span(text, start, len(text))
    if inside[0] == inside[1] or FormatFault.UNCLOSED_THOUGHT in faults:
        faults.add(FormatFault.NO_ACTION)
        return None, None
    call = _CALL.search(text, *inside)
    if call and call[0].lower() == "<tool_call>" and not [*_CALL_TAG.finditer(text, *inside)][-1]["end"]:
        faults.add(FormatFault.UNCLOSED_ACTION)
    return _Block(inside[0], inside, inside[1]), "tool_call" if call else "answer"


def _check_between_parts(text: str, tags: list[_Tag], blocks: list[_Block], faults: set[FormatFault]) -> None:
    """Check for text between and after the parts, and for tags inside them."""
    position = 0
    for block in [*sorted(blocks, key=lambda b: b.start), _Block(len(text), (len(text), len(text)), len(text))]:
        if text[position : block.start].strip():
            faults.add(FormatFault.STRAY_TEXT)
        if any(tag.name == "think" and position <= tag.start < block.start for tag in tags):
            faults.add(FormatFault.REPEATED_THOUGHT)
        if any(block.contains(tag) for tag in tags):
            faults.add(FormatFault.NESTED_TAG)
        position = max(position, block.end)


def _strip_span(text: str, start: int, end: int) -> Span:
    inside = text[start:end]
    left = start + len(inside) - len(inside.lstrip())
    return left, max(left, start + len(inside.rstrip()))
