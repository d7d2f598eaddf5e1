"""Formats that leave text as it is: `none`, and `openai`, whose calls come structured and beside the text."""

from __future__ import annotations

from toolwise.rollout.parsers.json_calls import ParsedReply, replace_surrogates


def parse_none(text: str) -> ParsedReply:
    """Text is text: for tasks whose calls are only ever read by the reward, such as RLLA's."""
    return replace_surrogates(text), []


def parse_openai(text: str) -> ParsedReply:
    """The server has read the calls: text is text, and a tag in it only talk."""
    return replace_surrogates(text), []
