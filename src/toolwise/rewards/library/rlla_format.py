"""The RLLA text format: required tags, well-formedness and tool calls. Used by the reward in `rlla`."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.rewards.transcript import top_level_blocks

RllaCall = dict[str, Any]
"""A call in RLLA form: a string `name` and an object `parameters`."""

_TAGS = ("tool_call", "response")
_BODY = {
    frozenset[str](): "",
    frozenset({"tool_call"}): r"\n<tool_call>\n.*\n</tool_call>",
    frozenset({"response"}): r"\n<response>.*</response>",
    frozenset({"tool_call", "response"}): r"\n<tool_call>\n.*\n</tool_call>\n<response>.*</response>",
}
_AFTER_THOUGHT = {tags: re.compile(body, re.DOTALL) for tags, body in _BODY.items()}
_FULL_ANSWER = {tags: re.compile("<think>.*?</think>" + body, re.DOTALL) for tags, body in _BODY.items()}


def required_tags(ground_truth: str, *, literal: bool = False) -> frozenset[str]:
    """Which of tool_call and response the gold answer has. `literal` also finds them in its thought."""
    if literal:
        return frozenset(tag for tag in _TAGS if f"<{tag}>" in ground_truth)
    tags = frozenset(block.tag for block in top_level_blocks(ground_truth)) & frozenset(_TAGS)
    if not tags and any(f"<{tag}>" in _after_thought(ground_truth) for tag in _TAGS):
        raise DataError(f"ground truth {ground_truth[-80:]!r} has an unclosed tag; close it")
    return tags


def is_well_formed(text: str, tags: frozenset[str], *, literal: bool = False) -> bool:
    """Whether `text` is a thought followed by exactly one pair of each of `tags`, and nothing else.

    Tags are counted after the leading thought, which may contain them; `literal` (upstream's rule) counts those too.
    """
    if literal:
        return _one_pair_each(text, tags) and _FULL_ANSWER[tags].fullmatch(text) is not None
    head, closed, rest = text.partition("</think>")
    if not head.startswith("<think>") or not closed or "<think>" in rest or "</think>" in rest:
        return False
    return _one_pair_each(rest, tags) and _AFTER_THOUGHT[tags].fullmatch(rest) is not None


def _one_pair_each(text: str, tags: frozenset[str]) -> bool:
    return all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags)


def first_thought(text: str) -> str | None:
    """The text of the first thought; None if there is none or it is not closed."""
    _, opened, rest = text.partition("<think>")
    thought, closed, _ = rest.partition("</think>")
    return thought if opened and closed else None


def _after_thought(text: str) -> str:
    return text.partition("</think>")[2] if text.startswith("<think>") and "</think>" in text else text


def read_calls(text: str) -> list[RllaCall]:
    """The calls in the last top-level tool_call block, one JSON object per line. Raises ValueError if unreadable."""
    blocks = [block.inner for block in top_level_blocks(text) if block.tag == "tool_call"]
    if not blocks:
        raise ValueError("there is no tool_call block")
    # Not splitlines: a JSON string may contain other line separators.
    return [_read_call(line) for line in blocks[-1].strip().split("\n")]


def _read_call(line: str) -> RllaCall:
    try:
        call = json.loads(line, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("a call is nested too deeply") from None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"a call without a name: {line.strip()[:80]}")
    if not isinstance(call.get("parameters"), dict):
        raise ValueError(f"a call without parameters: {line.strip()[:80]}")
    return call


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def to_rlla_text(message: Message) -> str:
    """A message in RLLA's text format.

    Calls that the policy's parser removed from the text are put back in one block, one per line. Their original layout
    is unknown and not judged.
    """
    text = message.content or ""
    if not message.tool_calls:
        return text
    lines = [
        json.dumps({"name": call.name, "parameters": call.arguments}, ensure_ascii=False)
        if call.name or not isinstance(call.arguments, str)
        else call.arguments
        for call in message.tool_calls
    ]
    head, closed, rest = text.partition("</think>")
    thought, answer = (head + closed, rest.strip()) if closed else ("", text.strip())
    block = "<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"
    return "\n".join(part for part in (thought, block, answer) if part)
