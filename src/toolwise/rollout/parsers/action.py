"""`<action>go north</action>`: what an agent does in a world of words."""

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
    """The words in the last block after the thought, and never a call.

    The action is `{"type": "text", "content": "go north"}`: the world reads the words and nothing around them. What
    the model wrote in full, its thought included, is the step's `raw_policy_output`. A block that is not closed (a
    stop string may have taken its end) goes to the end of the text; without a block all that follows the thought is
    the action, and the world's to judge.
    """
    _, body = split_reasoning(text, _MARKS)
    words = _OPENING.split(body)[-1]
    closing = _CLOSING.search(words) if len(words) < len(body) else None
    return (words[: closing.start()] if closing else words).strip(), []


def render_action(content: str, calls: Sequence[ToolCall]) -> str:
    if calls:
        raise ValueError("the action format has words for actions and none for calls; give no calls")
    return f"<action>{content}</action>"
