"""`toolwise check env`: an environment tried out against what rollouts rely on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.check.marks import verdict_text
from toolwise.cli.reward_options import KwargsOption, read_kwargs
from toolwise.errors import ConfigError, DataError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.checks.env.check import EnvCheck
    from toolwise.types import Task


def check_env(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="path.py:Class, module:Class, gymnasium:ID, gsm8k or tools.")
    ],
    kwargs: KwargsOption = None,
    data: Annotated[
        Path | None, typer.Option(help="A file of tasks; the environment is made for one of them.", show_default=False)
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which task of --data, from 0.")] = 0,
    tool: Annotated[list[str] | None, typer.Option(help="A tool on offer; repeatable.", show_default=False)] = None,
    action: Annotated[
        list[str] | None,
        typer.Option(help="A valid action to try: text, or a call as JSON; repeatable.", show_default=False),
    ] = None,
    gold: Annotated[
        Path | None,
        typer.Option(help="Actions that reach the goal: a JSON list, or one action a line.", show_default=False),
    ] = None,
    gold_reward: Annotated[
        float | None, typer.Option(help="What gold actions earn at least. [default: more than 0]", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the episodes.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of an episode at most.")] = 20,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="How long one reset, step or close may take.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Try an environment out: life cycle, types, determinism, states, endings, invalid and gold actions, deadlines."""

    from toolwise.checks.env.check import check_env as check
    from toolwise.envs.catalog import build_env_factory
    from toolwise.tools import build_tools

    factory = build_env_factory(reference, read_kwargs(kwargs), tools=build_tools(tool or []))
    task = _task(data, row)
    found = check(
        lambda: factory(task),
        name=reference,
        actions=[_read_action(text, "--action") for text in action or ()],
        gold=_read_gold(gold) if gold is not None else None,
        gold_reward=gold_reward,
        seed=seed,
        max_steps=steps,
        step_timeout_s=timeout_s,
    )
    if as_json:
        print_json(found.to_json())
    else:
        _show(found)
    if not found.ok:
        raise typer.Exit(1)


def _task(data: Path | None, row: int) -> Task:
    from toolwise.types import Task

    if data is None:
        return Task(task_id="check", prompt=[])
    from toolwise.data import load_tasks

    tasks = load_tasks(data, limit=row + 1)
    if row >= len(tasks):
        raise DataError(f"{data} has {len(tasks)} rows, and row {row} (from 0) is not one of them")
    return tasks[row]


def _read_gold(path: Path) -> list[Any]:
    """A JSON list, or an action a line: JSON where it is an object or a list, else the text itself."""
    import json

    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            actions = json.loads(text)
        except (ValueError, RecursionError) as fault:
            raise DataError(f"{path} is no JSON: {fault}") from None
        if not isinstance(actions, list):
            raise DataError(f"{path} must hold a list of actions")
    else:
        actions = [line.strip() for line in text.splitlines() if line.strip()]
    if not actions:
        raise DataError(f"{path} has no actions in it")
    return [_read_action(action, f"{path}, action {i}") for i, action in enumerate(actions)]


def _read_action(given: Any, where: str) -> Any:
    import json

    from pydantic import ValidationError

    from toolwise.checks.env.env_trial import as_action

    if isinstance(given, str):
        if given[:1] not in ("{", "["):
            return given
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return given
    calls = given if isinstance(given, list) else [given]
    if not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f'{where}: {given!r:.60} is no action; write text, or {{"name": …, "arguments": {{…}}}}')
    try:
        return as_action(given)
    except ValidationError as fault:
        raise ConfigError(f"{where}: {given!r:.60} is no call: {fault.errors()[0]['msg']}") from None


def _show(check: EnvCheck) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console

    table = Table(title=check.env)
    for column in ("", "", "what was seen"):
        table.add_column(column)
    for finding in check.findings:
        table.add_row(finding.name, verdict_text(finding.verdict), finding.says)
    Console().print(table)
    wrong = [finding.name for finding in check.findings if finding.verdict == "wrong"]
    print_line(f"wrong: {', '.join(wrong)}" if wrong else "nothing is wrong with it")
