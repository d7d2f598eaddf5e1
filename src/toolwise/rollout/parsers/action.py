"""`<action>go north</action>`: actions in a text world."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolwise.messages import ToolCall
from toolwise.rollout.parsers.json_calls import ParsedReply, mark_pattern, split_reasoning

MARK = "<action>"

_OPENING = re.compile(MARK, re.IGNORECASE | re.ASCII)
_CLOSING = re.compile("</action>", re.IGNORECASE | re.ASCII)
_MARKS = mark_pattern(MARK)


def parse_action(text: str) -> ParsedReply:
    """Return the text of the last block after the thought, and never a call.

    The action is `{"type": "text", "content": "go north"}`: the environment sees only these words. The full output,
    including the thought, is the step's `raw_policy_output`. An unclosed block (a stop string may have removed its end)
    runs to the end of the text. Without a block, everything after the thought is the action, and the environment judges
    it.
    """
    _, body = split_reasoning(text, _MARKS)
    words = _OPENING.split(body)[-1]
    closing = _CLOSING.search(words) if len(words) < len(body) else None
    return (words[: closing.start()] if closing else words).strip(), []


def render_action(content: str, calls: Sequence[ToolCall]) -> str:
    if calls:
        raise ValueError("the action format cannot express tool calls: pass no calls")
    return f"<action>{content}</action>"
