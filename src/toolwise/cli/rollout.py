"""`toolwise rollout`: roll out a configuration's tasks without training, show the rollouts and write them to a file."""

from __future__ import annotations

import json
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.cli.evaluate import resolve_model
from toolwise.cli.train import OverridesOption
from toolwise.terminal import print_line

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.protocols import AgentPolicy
    from toolwise.rollout.request import AsyncRolloutRequest
    from toolwise.terminal.display import Console, Status
    from toolwise.tools.base import BaseTool
    from toolwise.types import Rollout, ScoredRollout, Task


MISSING_TOOLS_HINT = (
    "add them to `tools` in the configuration (--set 'tools=[\"NAME\"]'), or set multi_turn.enable=false to run "
    "without tools"
)


class PolicyKind(StrEnum):
    LOCAL = "local"
    OPENAI = "openai"
    SCRIPTED = "scripted"


def rollout(
    source: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="TOML or YAML configuration file, or a run folder.", show_default=False),
    ],
    count: Annotated[
        int, typer.Option("-n", "--tasks", min=1, help="Number of tasks, taken from the start of the file.")
    ] = 16,
    each: Annotated[int, typer.Option("--per-task", min=1, help="Rollouts per task.")] = 1,
    policy: Annotated[
        PolicyKind, typer.Option(help="What generates replies: a local model, a server, or a script.")
    ] = PolicyKind.LOCAL,
    base_url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server, including /v1.")] = "",
    model: Annotated[str, typer.Option(help="Model folder, or the name of the model on the server.")] = "",
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the server's API key.")] = "",
    script: Annotated[Path | None, typer.Option(help="JSON list of replies, for --policy scripted.")] = None,
    data: Annotated[Path | None, typer.Option(help="Task file (default: data.val, or data.train).")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: runs/rollouts-TIME).")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily instead of sampling.")] = False,
    overrides: OverridesOption = None,
) -> None:
    """Roll out tasks without training, show the rollouts as they finish, and save them as JSONL."""
    from toolwise.api import new_run_folder
    from toolwise.config.schema import load_config
    from toolwise.training.records import write_records

    if source.is_dir() and policy is PolicyKind.LOCAL:
        config, model = resolve_model(source, model or None, overrides or [])
    else:
        config = load_config(source / "config.toml" if source.is_dir() else source, overrides or [])
    tasks = _tasks(config, data)[:count]
    tools = _tools(config, tasks, model if policy is PolicyKind.LOCAL else None)
    agent_policy = _policy(config, policy, model, base_url, api_key_env, script)
    folder = out or new_run_folder("rollouts")
    scored = _roll_out(config, agent_policy, tools, tasks, each, do_sample=config.rollout.do_sample and not greedy)
    write_records(folder, "rollouts", scored, [])
    _summarize(scored)
    print_line(f"wrote {folder / 'rollouts.jsonl'}")


def _tasks(config: RunConfig, data: Path | None) -> list[Task]:
    from toolwise.data import load_tasks
    from toolwise.errors import ConfigError

    file = data or config.data.val or config.data.train
    if file is None:
        raise ConfigError("the configuration sets neither data.val nor data.train: add --data FILE")
    return load_tasks(file)


def _tools(config: RunConfig, tasks: list[Task], model: str | None) -> dict[str, BaseTool]:
    """Build the configured tools; fail if one that a task needs, or that `model` was trained with, is missing."""
    from toolwise.models import locate
    from toolwise.tools.catalog import build_tools
    from toolwise.tools.tool_record import check_recorded_tools
    from toolwise.training.tasks import check_task_tools

    tools = build_tools(config.tools)
    for task in tasks:
        check_task_tools(task, tools, env=config.env.name)
    if model is not None and config.multi_turn.enable:
        check_recorded_tools(Path(locate(model or config.model.path)), tools, MISSING_TOOLS_HINT)
    return tools


def _policy(
    config: RunConfig, kind: PolicyKind, model: str, base_url: str, api_key_env: str, script: Path | None
) -> AgentPolicy:
    from toolwise.config.rollout import GrammarConfig
    from toolwise.errors import ConfigError
    from toolwise.training.rollout_setup import local_policy, sampling_from_config

    if kind is PolicyKind.LOCAL:
        return local_policy(config, model or config.model.path)
    if config.rollout.grammar != GrammarConfig():
        raise ConfigError(f"rollout.grammar works only with --policy local; {kind.value} cannot enforce it")
    if kind is PolicyKind.OPENAI:
        from toolwise.policies.openai.endpoint import read_api_key
        from toolwise.policies.openai.policy import OpenAIAgentPolicy

        if not base_url or not model:
            raise ConfigError("--policy openai needs --base-url URL and --model NAME")
        key = read_api_key(api_key_env, "--api-key-env")
        return OpenAIAgentPolicy(base_url, model, api_key=key, sampling=sampling_from_config(config))
    from toolwise.policies.scripted import ScriptedPolicy

    if script is None:
        raise ConfigError("--policy scripted needs --script FILE: a JSON list of replies, one per turn")
    try:
        replies = json.loads(script.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{script} is not valid JSON: {fault}") from None
    if not isinstance(replies, list) or not all(isinstance(reply, str) for reply in replies):
        raise ConfigError(f"{script} must be a JSON list of strings, one reply per turn")
    return ScriptedPolicy(replies, parser=config.rollout.tool_parser)


def _roll_out(
    config: RunConfig, policy: AgentPolicy, tools: dict[str, BaseTool], tasks: list[Task], each: int, *, do_sample: bool
) -> list[ScoredRollout]:
    from dataclasses import replace

    from toolwise.concurrency import deadlines
    from toolwise.rewards.align import align_rollouts
    from toolwise.routing.direct_router import DirectRouter
    from toolwise.terminal.display import Console, Status
    from toolwise.training.diagnosis import evaluation_findings
    from toolwise.training.rollout_setup import build_scheduler
    from toolwise.training.scoring import build_scoring
    from toolwise.types import EvaluateResult

    scoring = build_scoring(config.reward) if config.reward.function or config.reward.parts else None
    console = Console()

    async def work() -> list[ScoredRollout]:
        with Status(console) as status:
            progress = _RolloutProgress(console, status, len(tasks) * each)
            scheduler = replace(build_scheduler(config, policy, tools), on_state=progress.state)
            decisions = DirectRouter(config.seed).decide(tasks, each, 0, label="rollout")
            rollouts = await scheduler.roll_out(decisions, do_sample=do_sample, on_done=progress.done)
        if scoring is None:
            results = [EvaluateResult(is_score_valid=False, reason="no reward") for _ in rollouts]
        else:
            results = await scoring.evaluate(rollouts, step=0)
        return align_rollouts(rollouts, results)

    try:
        if scoring is not None:
            scoring.check(tasks)
        scored = deadlines.run(work())
        for finding in evaluation_findings(scoring.rewards, tasks, scored) if scoring is not None else ():
            print_line(f"WARNING {finding}", err=True)
        return scored
    finally:
        if scoring is not None:
            scoring.close()


class _RolloutProgress:
    """Shows the state of all requests in one status line, and each rollout as it ends."""

    def __init__(self, console: Console, status: Status, total: int) -> None:
        self.console, self.status, self.total = console, status, total
        self.states: dict[str, str] = {}

    def state(self, request: AsyncRolloutRequest) -> None:
        self.states[request.rollout_id] = request.state.value
        counts = Counter(self.states.values())
        summary = " · ".join(f"{name.replace('_', ' ')} {count}" for name, count in sorted(counts.items()))
        self.status.update(f"{len(self.states)} of {self.total} started: {summary}")

    def done(self, rollout: Rollout) -> None:
        from toolwise.training.records import RolloutRecord
        from toolwise.training.trackers.console import show_record
        from toolwise.types import EvaluateResult, ScoredRollout

        pending = EvaluateResult(is_score_valid=False, reason="not scored yet")
        show_record(self.console, RolloutRecord.of(ScoredRollout(rollout, pending, rollout.steps)))


def _summarize(scored: list[ScoredRollout]) -> None:
    from rich.table import Table

    from toolwise.terminal.display import Console
    from toolwise.training.metrics import summarize

    metrics = summarize(scored)
    table = Table("metric", "value")
    for name in sorted(metrics):
        table.add_row(name, f"{metrics[name]:.4g}")
    Console().print(table)
    faults = [s.rollout.fault for s in scored if s.rollout.fault]
    if faults:
        print_line(f"{len(faults)} of {len(scored)} rollouts failed; first error: {faults[0]}")
