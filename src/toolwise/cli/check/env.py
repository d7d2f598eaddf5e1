"""`toolwise check env`: test an environment against what rollouts rely on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.check.findings import report_checks, show_findings
from toolwise.cli.reward_options import KwargsOption, read_kwargs
from toolwise.errors import ConfigError, DataError

if TYPE_CHECKING:
    from toolwise.types import Task


def check_env(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="path.py:Class, module:Class, gymnasium:ID, gsm8k or tools.")
    ],
    kwargs: KwargsOption = None,
    data: Annotated[
        Path | None, typer.Option(help="Task file; the environment is built for one of its tasks.", show_default=False)
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Index of the task in --data, starting at 0.")] = 0,
    tool: Annotated[
        list[str] | None, typer.Option(help="Tool the environment offers; repeatable.", show_default=False)
    ] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="Valid action to try: text, or a tool call as JSON; repeatable.", show_default=False),
    ] = None,
    gold: Annotated[
        Path | None,
        typer.Option(
            help="File of actions that reach the goal: a JSON list, or one action per line.", show_default=False
        ),
    ] = None,
    gold_reward: Annotated[
        float | None,
        typer.Option(help="Minimum reward the gold actions must earn (default: more than 0).", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the episodes.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps per episode.")] = 20,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Timeout of one reset, step or close, in seconds.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Test an environment: life cycle, types, determinism, state keys, endings, invalid and gold actions, timeouts."""
    from toolwise.checks.env.check import check_env as check
    from toolwise.envs.catalog import build_env_factory
    from toolwise.tools import build_tools

    factory = build_env_factory(reference, read_kwargs(kwargs), tools=build_tools(tool or []))
    task = _task(data, row)
    result = check(
        lambda: factory(task),
        name=reference,
        actions=[_read_action(text, "--action") for text in action or ()],
        gold=_read_gold(gold) if gold is not None else None,
        gold_reward=gold_reward,
        seed=seed,
        max_steps=steps,
        step_timeout_s=timeout_s,
    )
    report_checks(
        [result], result.to_json() if as_json else None, lambda report: show_findings(report.name, report.findings)
    )


def _task(data: Path | None, row: int) -> Task:
    from toolwise.types import Task

    if data is None:
        return Task(task_id="check", prompt=[])
    from toolwise.data import load_tasks

    tasks = load_tasks(data, limit=row + 1)
    if row >= len(tasks):
        raise DataError(f"{data} has {len(tasks)} rows, so there is no row {row} (rows are counted from 0)")
    return tasks[row]


def _read_gold(path: Path) -> list[Any]:
    """Read a JSON list, or one action per line: JSON if the line is an object or a list, plain text otherwise."""
    import json

    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            actions = json.loads(text)
        except (ValueError, RecursionError) as fault:
            raise DataError(f"{path} is not valid JSON: {fault}") from None
        if not isinstance(actions, list):
            raise DataError(f"{path} must contain a JSON list of actions")
    else:
        actions = [line.strip() for line in text.splitlines() if line.strip()]
    if not actions:
        raise DataError(f"{path} contains no actions")
    return [_read_action(action, f"{path}, action {i}") for i, action in enumerate(actions)]


def _read_action(action: Any, where: str) -> Any:
    import json

    from pydantic import ValidationError

    from toolwise.checks.env.env_trial import as_action

    if isinstance(action, str):
        if action[:1] not in ("{", "["):
            return action
        try:
            action = json.loads(action)
        except (ValueError, RecursionError):
            return action
    calls = action if isinstance(action, list) else [action]
    if not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f'{where}: {action!r:.60} is not an action; write text, or {{"name": …, "arguments": {{…}}}}')
    try:
        return as_action(action)
    except ValidationError as fault:
        raise ConfigError(f"{where}: {action!r:.60} is not a tool call: {fault.errors()[0]['msg']}") from None
