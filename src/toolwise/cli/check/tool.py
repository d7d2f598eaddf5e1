"""`toolwise check tool`: test a tool against what rollouts rely on."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from toolwise.cli.check.findings import report_checks, show_findings
from toolwise.errors import ConfigError


def check_tool(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="path.py:name, module:name, or the name of a built-in tool.")
    ],
    config: Annotated[
        str, typer.Option(help="Options of the tool as JSON, as in the `tools` of a configuration file.")
    ] = "{}",
    call: Annotated[
        list[str] | None,
        typer.Option(help="Arguments of a call to try, as a JSON object; repeatable.", show_default=False),
    ] = None,
    create_kwargs: Annotated[str, typer.Option(help="A task's create_kwargs for this tool, as JSON.")] = "{}",
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Timeout of one call, in seconds.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Test a tool: schema, life cycle, results, instances, odd and bad arguments, cancellation, event loop blocking."""
    from toolwise.checks.tool.check import check_tool as check
    from toolwise.tools.catalog import build_tools

    calls = [_read_object(text, "--call") for text in call or ()]
    options = _read_object(create_kwargs, "--create-kwargs")
    tools = build_tools([{"name": reference, **_read_object(config, "--config")}])
    results = [check(tool, calls=calls, create_kwargs=options, timeout_s=timeout_s) for tool in tools.values()]
    data = [result.to_json() for result in results] if as_json else None
    report_checks(results, data, lambda report: show_findings(report.name, report.findings))


def _read_object(text: str, option: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{option} {text!r:.80} is not valid JSON ({fault})") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option} {text!r:.80} is not a JSON object; write {{"argument": value}}')
    return value
