"""`toolwise check tool`: a tool tried out against what rollouts rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.check.marks import verdict_text
from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.checks.tool.check import ToolCheck


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

    from toolwise.checks.tool.check import check_tool as check
    from toolwise.tools.catalog import build_tools

    calls = [_object(text, "--call") for text in call or ()]
    create_kwargs = _object(create, "--create")
    tools = build_tools([{"name": reference, **_object(config, "--config")}])
    found = [check(tool, calls=calls, create_kwargs=create_kwargs, timeout_s=timeout_s) for tool in tools.values()]
    if as_json:
        print_json([one.to_json() for one in found])
    else:
        for one in found:
            _show(one)
    if not all(one.ok for one in found):
        raise typer.Exit(1)


def _object(text: str, option: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{option} {text!r:.80} is no JSON ({fault})") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option} {text!r:.80} is no JSON object; write {{"argument": value}}')
    return value


def _show(check: ToolCheck) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console

    table = Table(title=check.tool)
    for column in ("", "", "what was seen"):
        table.add_column(column)
    for finding in check.findings:
        table.add_row(finding.name, verdict_text(finding.verdict), finding.says)
    Console().print(table)
    wrong = [finding.name for finding in check.findings if finding.verdict == "wrong"]
    print_line(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong with it")
