"""Output of a check: its findings as a table, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.terminal import print_line

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red", "skipped": "dim"}


def show_findings(title: str, findings: Sequence[Any]) -> None:
    """`findings` have a `name`, a `verdict` and what the check `says`."""
    from rich.table import Table
    from rich.text import Text

    from toolwise.terminal.display import Console

    table = Table("", "", "details", title=title)
    for finding in findings:
        table.add_row(finding.name, Text(finding.verdict, style=_STYLES[finding.verdict]), finding.says)
    Console().print(table)


def show_verdict(findings: Sequence[Any]) -> None:
    wrong = [finding.name for finding in findings if finding.verdict == "wrong"]
    print_line(f"wrong: {', '.join(wrong)}" if wrong else "no problems found")
