"""`toolwise check tool`: a tool tried out against what rollouts rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.errors import ConfigError

if TYPE_CHECKING:
    from toolwise.tools.conformance.check import ToolCheck

MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]look[/]", "wrong": "[red]wrong[/]", "skipped": "[dim]skipped[/]"}


def check_tool(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="path.py:name, module:name, or a tool that Toolwise brings.")
    ],
    config: Annotated[
        str, typer.Option(help="The tool's configuration as JSON, as beside its name in a run's tools.")
    ] = "{}",
    call: Annotated[
        list[str] | None,
        typer.Option(help="Arguments of a call to try, as JSON; repeatable.", show_default=False),
    ] = None,
    create: Annotated[str, typer.Option(help="What a task gives to create (create_kwargs), as JSON.")] = "{}",
    timeout_s: Annotated[float, typer.Option(min=0.01, help="How long one call may take.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Try a tool out: schema, life cycle, results, instances, odd and bad arguments, cancelling, the event loop."""
    import json

    from toolwise.tools.catalog import build_tools
    from toolwise.tools.conformance.check import check_tool as check

    calls = [_object(text, "--call") for text in call or ()]
    create_kwargs = _object(create, "--create")
    tools = build_tools([{"name": reference, **_object(config, "--config")}])
    found = [check(tool, calls=calls, create_kwargs=create_kwargs, timeout_s=timeout_s) for tool in tools.values()]
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in found], ensure_ascii=False, indent=2))
    else:
        for one in found:
            _show(one)
    if not all(one.ok for one in found):
        raise typer.Exit(1)


def _object(text: str, option: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError as fault:
        raise ConfigError(f"{option} {text!r:.80} is no JSON ({fault})") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option} {text!r:.80} is no JSON object; write {{"argument": value}}')
    return value


def _show(check: ToolCheck) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(check.tool))
    for column in ("", "", "what was seen"):
        table.add_column(column)
    for finding in check.findings:
        table.add_row(finding.name, MARKS[finding.verdict], escape(finding.says))
    Console().print(table)
    wrong = [finding.name for finding in check.findings if finding.verdict == "wrong"]
    typer.echo(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong with it")
