"""`toolwise check`: check models, environments, rewards and tools before a run. One function per command.

All print alike: findings as a table, the verdict, and the exit status.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.reward import (
    AllowOption,
    KwargsOption,
    MemoryOption,
    ReadOption,
    TierOption,
    TimeoutOption,
    override_sandbox,
    read_kwargs,
)
from toolwise.cli.tables import print_table
from toolwise.errors import ConfigError, DataError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.checks.reward.check import RewardCheck
    from toolwise.types.findings import Finding

app = typer.Typer(
    name="check", help="Check models, rewards, environments and tools before a run.", no_args_is_help=True
)
_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red", "skipped": "dim"}


@app.command("env")
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
    from toolwise.data import load_tasks
    from toolwise.envs.catalog import build_env_factory
    from toolwise.tools import build_tools
    from toolwise.types import Task

    factory = build_env_factory(reference, read_kwargs(kwargs), tools=build_tools(tool or []))
    tasks = load_tasks(data, limit=row + 1) if data is not None else []
    if data is not None and row >= len(tasks):
        raise DataError(f"{data} has {len(tasks)} rows, so there is no row {row} (rows are counted from 0)")
    result = check(
        partial(factory, tasks[row] if tasks else Task(task_id="check", prompt=[])),
        name=reference,
        actions=[_read_action(text, "--action") for text in action or ()],
        gold=_read_gold(gold) if gold is not None else None,
        gold_reward=gold_reward,
        seed=seed,
        max_steps=steps,
        step_timeout_s=timeout_s,
    )
    report_checks([result], result.to_json() if as_json else None)


@app.command("model")
def check_model(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Model folder, owner/name on a hub, or builtin:small.")],
    tools: Annotated[
        list[str] | None,
        typer.Option(help="Tool the model should see: a name or path.py:name; repeatable.", show_default=False),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of the run, such as rollout.tool_parser=hermes."),
    ] = None,
    prompt: Annotated[bool, typer.Option(help="Print the prompt as the model sees it.")] = True,
    weights: Annotated[bool, typer.Option(help="Load the weights too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check a model: prompt with tools, turn ends, parser, round trip of a call, engine path, memory."""
    from toolwise.checks.contract import CheckReport
    from toolwise.config.loader import apply_overrides, build_config
    from toolwise.config.schema import RunConfig
    from toolwise.tools.catalog import build_tools
    from toolwise.training.chat_check import open_chat, show_prompt
    from toolwise.training.model_check import check_model as check
    from toolwise.training.rollout_setup import try_weights

    settings = apply_overrides({"model": {"path": path}, "tools": list(tools or ())}, overrides or ())
    config = build_config(RunConfig, settings, source="the options")
    built = build_tools(config.tools)
    chat, form = open_chat(config)
    text = show_prompt(chat, built)
    if prompt and not as_json:
        print_line(text)
    findings = check(chat, form, config, built)
    if weights and all(finding.verdict != "wrong" for finding in findings):
        findings.append(try_weights(config))
    report = CheckReport("model", path, tuple(findings))
    report_checks([report], {**report.to_json(), "prompt": text} if as_json else None)


@app.command("reward")
def check_reward(
    reference: Annotated[str, typer.Argument(metavar="REF", help="path.py:function or module:function.")],
    rollouts: Annotated[
        Path,
        typer.Option(help="Run folder, file of stored rollouts, or file of rows with `messages`.", show_default=False),
    ],
    kwargs: KwargsOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Check only the rollouts of this training step.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rollouts to check.")] = 512,
    gold: Annotated[
        bool, typer.Option("--gold/--no-gold", help="Check that gold answers score best; skip for shaping rewards.")
    ] = True,
    gold_template: Annotated[
        str | None,
        typer.Option(
            help="Template that turns a bare ground truth into an answer, such as 'Answer: {}'.", show_default=False
        ),
    ] = None,
    tier: TierOption = None,
    timeout_s: TimeoutOption = None,
    memory_mb: MemoryOption = None,
    read: ReadOption = None,
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check a reward on stored rollouts, in its sandbox: results, determinism, speed, spread, steps, gold answers."""
    from toolwise.checks.reward.check import check_reward as check
    from toolwise.checks.reward.stored_rollouts import read_rollouts
    from toolwise.config.schema import RewardConfig, SandboxConfig

    if gold_template is not None and "{}" not in gold_template:
        raise ConfigError(
            f"--gold-template {gold_template!r}: mark the place of the ground truth with {{}}: 'Answer: {{}}'"
        )
    config = RewardConfig(
        function=reference,
        kwargs=read_kwargs(kwargs),
        sandbox=override_sandbox(SandboxConfig(), tier, timeout_s, memory_mb, read, allow),
    )
    result = check(config, read_rollouts(rollouts, step=step, limit=limit), gold=gold, gold_form=gold_template)
    report_checks([result], result.to_json() if as_json else None, _show_reward)


@app.command("tool")
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
    report_checks(results, [result.to_json() for result in results] if as_json else None)


def show_findings(check: Any, title: str | None = None) -> None:
    """A table of `check.findings`, titled with the name of what was checked unless told otherwise."""
    from rich.text import Text

    rows = [(f.name, Text(f.verdict, style=_STYLES[f.verdict]), _details(f)) for f in check.findings]
    print_table(("", "", "details"), rows, title=title or check.name)


def report_checks(checks: Sequence[Any], as_json: Any, show: Callable[[Any], None] = show_findings) -> None:
    """Print `as_json`, or, if it is None, `show` each check. Exits with status 1 if a check is not `ok`."""
    if as_json is not None:
        print_json(as_json)
    else:
        for check in checks:
            show(check)
            print_line(_summary(check.findings))
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _details(finding: Finding) -> str:
    """What it says, and what to do about a problem."""
    problem = finding.verdict in ("warning", "wrong")
    return f"{finding.says}: {finding.cure}" if problem and finding.cure else finding.says


def _summary(findings: Sequence[Finding]) -> str:
    names = {verdict: [f.name for f in findings if f.verdict == verdict] for verdict in ("wrong", "warning")}
    parts = [f"{verdict}: {', '.join(found)}" for verdict, found in names.items() if found]
    return "; ".join(parts) or "no problems found"


def _show_reward(check: RewardCheck) -> None:
    show_findings(check, f"{check.reward} ({check.mode}) on {check.rollouts} rollouts of {check.tasks} tasks")
    for finding in check.findings:
        if finding.details:  # plain text, so that tracebacks are not wrapped and can be copied
            lines = [f"  {line}" for detail in finding.details for line in detail.splitlines()]
            print_line("\n".join([f"\n{finding.name}:", *lines, ""]))
    if check.printed:
        more = f"  … and {check.printed_more:,} more lines" if check.printed_more else ""
        print_line("\n".join(["\noutput of the reward:", *(f"  {line}" for line in check.printed), more]))
    print_line(check.sandbox)


def _read_gold(path: Path) -> list[Any]:
    """Read a JSON list, or one action per line: JSON if the line is an object or a list, plain text otherwise."""
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
    from pydantic import ValidationError

    from toolwise.checks.env.env_trial import as_action

    if isinstance(action, str) and action[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            action = json.loads(action)
    if isinstance(action, str):
        return action
    if not all(isinstance(call, dict) for call in (action if isinstance(action, list) else [action])):
        raise ConfigError(f'{where}: {action!r:.60} is not an action; write text, or {{"name": …, "arguments": {{…}}}}')
    try:
        return as_action(action)
    except ValidationError as fault:
        raise ConfigError(f"{where}: {action!r:.60} is not a tool call: {fault.errors()[0]['msg']}") from None


def _read_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{option} {text!r:.80} is not valid JSON ({fault})") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option} {text!r:.80} is not a JSON object; write {{"argument": value}}')
    return value
