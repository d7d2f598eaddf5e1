"""Formats that leave text as it is: `none`, and `openai`, whose calls come structured and beside the text."""

from __future__ import annotations

from toolwise.rollout.parsers.reading import Parsed, clean


def parse_none(text: str) -> Parsed:
    """Text is text: for tasks whose calls are only ever read by the reward, such as RLLA's."""
    return clean(text), []


def parse_openai(text: str) -> Parsed:
    """The server has read the calls: text is text, and a tag in it only talk."""
    return clean(text), []
