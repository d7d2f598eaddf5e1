"""Styling of a check's verdict in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red", "skipped": "dim"}


def verdict_text(verdict: str) -> Text:
    from rich.text import Text

    return Text(verdict, style=_STYLES[verdict])
