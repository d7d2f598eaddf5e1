"""Formats that leave text unchanged: `none`, and `openai`, where calls arrive structured, separate from the text."""

from __future__ import annotations

from toolwise.rollout.parsers.json_calls import ParsedReply, replace_surrogates


def parse_plain_text(text: str) -> ParsedReply:
    """No parsing. `none`: only the reward reads the calls, as for RLLA's tasks. `openai`: the server has parsed the
    calls already, and tags in the text mean nothing."""
    return replace_surrogates(text), []
