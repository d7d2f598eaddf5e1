"""A model at work, without training: `toolwise rollout` rolls out tasks and writes the rollouts to a file, and
`toolwise run` asks a trained agent one question."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolwise.cli.evaluate import resolve_model
from toolwise.cli.tables import print_table
from toolwise.cli.train import OverridesOption, TrustOption
from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent
    from toolwise.agent.events import AgentAnswer
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


PolicyKind = Literal["local", "openai", "scripted"]


def rollout(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="Configuration file, agent or run folder, or model.", show_default=False),
    ],
    count: Annotated[
        int, typer.Option("-n", "--tasks", min=1, help="Number of tasks, taken from the start of the file.")
    ] = 16,
    each: Annotated[int, typer.Option("--per-task", min=1, help="Rollouts per task.")] = 1,
    policy: Annotated[
        PolicyKind, typer.Option(help="What generates replies: a local model, a server, or a script.")
    ] = "local",
    base_url: Annotated[str, typer.Option(help="URL of an OpenAI-compatible server, including /v1.")] = "",
    model: Annotated[str, typer.Option(help="Model folder, or the name of the model on the server.")] = "",
    api_key_env: Annotated[str, typer.Option(help="Environment variable that holds the server's API key.")] = "",
    script: Annotated[Path | None, typer.Option(help="JSON list of replies, for --policy scripted.")] = None,
    data: Annotated[Path | None, typer.Option(help="Task file (default: data.val, or data.train).")] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder (default: runs/rollouts-TIME).")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Decode greedily instead of sampling.")] = False,
    overrides: OverridesOption = None,
    trust_code: TrustOption = False,
) -> None:
    """Roll out tasks without training, show the rollouts as they finish, and save them as JSONL."""
    from toolwise.agent.sources import is_model
    from toolwise.api import new_run_folder
    from toolwise.config.schema import load_config
    from toolwise.data import open_tasks
    from toolwise.data.row_layout import RowLayout
    from toolwise.training.rollout_files import write_records

    if (source.is_dir() or is_model(source)) and policy == "local":
        config, model = resolve_model(source, model or None, overrides or [], trust_code=trust_code)
    else:
        config = load_config(source / "config.toml" if source.is_dir() else source, overrides or [])
    if config.agent.enabled:
        raise ConfigError("toolwise rollout plays our own loop, not an agent of your own: use toolwise eval")
    if (file := data or config.data.val or config.data.train) is None:
        raise ConfigError("the configuration sets neither data.val nor data.train: add --data FILE")
    tasks = list(open_tasks(file, limit=count, cache=config.data.cache, layout=RowLayout.of(config.data)))
    folder = out or new_run_folder("rollouts")
    scored = _roll_out(
        config,
        tasks,
        _tools(config, tasks, model if policy == "local" else None),
        _policy(config, policy, model, base_url, api_key_env, script),
        each,
        do_sample=config.rollout.do_sample and not greedy,
    )
    write_records(folder, "rollouts", scored, [])
    _summarize(scored)
    print_line(f"wrote {folder / 'rollouts.jsonl'}")


def _tools(config: RunConfig, tasks: list[Task], model: str | None) -> dict[str, BaseTool]:
    """Build the configured tools; fail if one that a task needs, or that `model` was trained with, is missing."""
    from toolwise.models import locate
    from toolwise.tools.catalog import build_tools, check_recorded_tools
    from toolwise.training.tasks import check_task_tools

    tools = build_tools(config.tools)
    for task in tasks:
        check_task_tools(task, tools, env=config.env.name)
    if model is not None and config.multi_turn.enable:
        own = model in ("", config.model.path)
        folder = locate(model or config.model.path, config.model.revision if own else "")
        check_recorded_tools(Path(folder), tools, MISSING_TOOLS_HINT)
    return tools


def _policy(
    config: RunConfig, kind: PolicyKind, model: str, base_url: str, api_key_env: str, script: Path | None
) -> AgentPolicy:
    from toolwise.config.rollout import GrammarConfig
    from toolwise.training.rollout_setup import local_policy, sampling_from_config

    if kind == "local":
        return local_policy(config, model or config.model.path)
    if config.rollout.grammar != GrammarConfig():
        raise ConfigError(f"rollout.grammar works only with --policy local; {kind} cannot enforce it")
    if kind == "openai":
        from toolwise.policies.openai.policy import OpenAIAgentPolicy
        from toolwise.remote.endpoint import read_api_key

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
    config: RunConfig, tasks: list[Task], tools: dict[str, BaseTool], policy: AgentPolicy, each: int, *, do_sample: bool
) -> list[ScoredRollout]:
    from toolwise.concurrency import deadlines
    from toolwise.rewards.align import align_rollouts
    from toolwise.routing.routers import DirectRouter
    from toolwise.terminal.display import Console, Status
    from toolwise.training.diagnosis import evaluation_findings
    from toolwise.training.evaluate import build_scoring
    from toolwise.training.rollout_setup import build_scheduler
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

    with closing(scoring) if scoring is not None else nullcontext():
        if scoring is not None:
            scoring.check(tasks)
        scored = deadlines.run(work())
        for finding in evaluation_findings(scoring.rewards, tasks, scored) if scoring is not None else ():
            print_line(f"WARNING {finding}", err=True)
        return scored


class _RolloutProgress:
    """Shows the state of all requests in one status line, and each rollout as it ends."""

    def __init__(self, console: Console, status: Status, total: int) -> None:
        self.console, self.status, self.total = console, status, total
        self.states: dict[str, str] = {}

    def state(self, request: AsyncRolloutRequest) -> None:
        self.states[request.rollout_id] = request.state.value
        counts = sorted(Counter(self.states.values()).items())
        summary = " · ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts)
        self.status.update(f"{len(self.states)} of {self.total} started: {summary}")

    def done(self, rollout: Rollout) -> None:
        from toolwise.training.records import RolloutRecord
        from toolwise.training.trackers.console import show_record
        from toolwise.types import EvaluateResult, ScoredRollout

        pending = EvaluateResult(is_score_valid=False, reason="not scored yet")
        show_record(self.console, RolloutRecord.of(ScoredRollout(rollout, pending, rollout.steps)))


def _summarize(scored: list[ScoredRollout]) -> None:
    from toolwise.training.metrics import summarize

    print_table(("metric", "value"), [(name, f"{value:.4g}") for name, value in sorted(summarize(scored).items())])
    if faults := [s.rollout.fault for s in scored if s.rollout.fault]:
        print_line(f"{len(faults)} of {len(scored)} rollouts failed; first error: {faults[0]}")


def run(
    source: Annotated[Path, typer.Argument(metavar="AGENT", help="Agent folder, run folder, checkpoint, or model.")],
    question: Annotated[str, typer.Argument(help="Question to ask.")],
    budget: Annotated[
        float | None, typer.Option(min=0, help="Average cost allowed per question; the router keeps to it.")
    ] = None,
    route: Annotated[
        str,
        typer.Option(help="Force a route (answer, search, calculate, or one of the run's own); auto: the router's."),
    ] = "auto",
    cap: Annotated[
        float | None,
        typer.Option(
            "--max-cost",
            min=0,
            help="Maximum cost of this question; tool calls beyond it are refused. Not if tokens or seconds cost.",
        ),
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(help="Tool to use instead of the run's tools; repeatable. none: answer without tools."),
    ] = None,
    documents: Annotated[
        Path | None,
        typer.Option(help="Documents for the search tool: text, one document per line, or .jsonl with `text`."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    do_sample: Annotated[bool, typer.Option("--sample", help="Sample tokens instead of decoding greedily.")] = False,
    overrides: OverridesOption = None,
    trust_code: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Ask a trained agent one question: it answers with its tools; its router, if it has one, picks a route."""
    agent = load_agent(source, tools, documents, overrides, trust_code)
    answer = agent.ask(question, budget=budget, route=route, cap=cap, seed=seed, do_sample=do_sample)
    if as_json:
        print_json(_to_json(answer))
    else:
        _show_answer(answer)
    if answer.rollout.fault and not answer.text:
        raise typer.Exit(1)


def load_agent(
    source: Path, tools: list[str] | None, documents: Path | None, overrides: list[str] | None, trust_code: bool
) -> Agent:
    from toolwise.agent.agent import Agent
    from toolwise.agent.documents import read_documents

    return Agent.load(
        source,
        tools=[] if tools == ["none"] else tools,
        documents=None if documents is None else read_documents(documents),
        overrides=overrides or [],
        trust_code=trust_code,
    )


def _to_json(answer: AgentAnswer) -> dict[str, object]:
    return {
        "text": answer.text,
        "route": answer.route,
        "odds": dict(answer.route_probs),
        "cost": answer.cost,
        "calls": dict(answer.calls),
        "refused": answer.refused,
        "seconds": answer.seconds,
        "saved_s": answer.saved_s,
        "stop_reason": answer.rollout.stop_reason.value,
        "fault": answer.rollout.fault,
        "messages": [message.to_openai() for message in answer.rollout.messages],
    }


def describe_route(route: str, route_probs: Mapping[str, float]) -> str:
    odds = ", ".join(f"{name} {share:.2f}" for name, share in route_probs.items())
    return f"route: {route}  ({odds})"


def _show_answer(answer: AgentAnswer) -> None:
    if answer.route:
        print_line(describe_route(answer.route, answer.route_probs))
    for message in answer.rollout.messages:
        for call in message.tool_calls or ():
            print_line(f"  {call.name}({json.dumps(call.arguments, ensure_ascii=False)})")
        if message.role == "tool":
            print_line(f"    {message.content}")
    print_line(answer.text)
    refused = f", {answer.refused} calls refused" if answer.refused else ""
    print_line(f"cost {answer.cost:g}{refused}, {answer.seconds:.2f} s", err=True)
    if answer.saved_s is not None:
        print_line(
            f"answered directly: with all tools, such questions took {answer.with_tools_s:.2f} s, "
            f"{answer.saved_s:+.2f} s saved",
            err=True,
        )
    if answer.rollout.fault:
        print_line(f"the rollout ended with an error: {answer.rollout.fault}", err=True)
