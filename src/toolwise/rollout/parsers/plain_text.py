"""Formats that leave text unchanged: `none`, and `openai`, where calls arrive structured, separate from the text."""

from __future__ import annotations

from toolwise.rollout.parsers.json_calls import ParsedReply, replace_surrogates


def parse_none(text: str) -> ParsedReply:
    """No parsing: for tasks whose calls are only read by the reward, such as RLLA's."""
    return replace_surrogates(text), []


def parse_openai(text: str) -> ParsedReply:
    """The server has parsed the calls already: tags in the text mean nothing."""
    return replace_surrogates(text), []
