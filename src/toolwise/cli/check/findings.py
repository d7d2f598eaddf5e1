"""Output of a check: its findings as a table, the verdict, and the exit status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer

from toolwise.terminal import print_json, print_line

_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red", "skipped": "dim"}


def report_checks(checks: Sequence[Any], as_json: Any, show: Callable[[Any], None]) -> None:
    """Print `as_json`, or, if it is None, `show` each check. Exits with status 1 if a check is not `ok`."""
    if as_json is not None:
        print_json(as_json)
    else:
        for check in checks:
            show(check)
            wrong = [finding.name for finding in check.findings if finding.verdict == "wrong"]
            print_line(f"wrong: {', '.join(wrong)}" if wrong else "no problems found")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def show_findings(title: str, findings: Sequence[Any]) -> None:
    """`findings` have a `name`, a `verdict` and what the check `says`."""
    from rich.table import Table
    from rich.text import Text

    from toolwise.terminal.display import Console

    table = Table("", "", "details", title=title)
    for finding in findings:
        table.add_row(finding.name, Text(finding.verdict, style=_STYLES[finding.verdict]), finding.says)
    Console().print(table)
