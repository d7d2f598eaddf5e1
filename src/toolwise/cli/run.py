"""`toolwise run`: put one question to a routed checkpoint."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.cli.train import OverridesOption
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.agent.agent import AgentAnswer


class RouteOption(StrEnum):
    AUTO = "auto"
    ANSWER = "answer"
    SEARCH = "search"
    CALCULATE = "calculate"


def run(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A run, a checkpoint, or an exported folder.")],
    question: Annotated[str, typer.Argument(help="What to ask.")],
    budget: Annotated[
        float | None, typer.Option(min=0, help="What questions may cost on average; the router is held to it.")
    ] = None,
    route: Annotated[RouteOption, typer.Option(help="Take the choice out of the router's hands.")] = RouteOption.AUTO,
    cap: Annotated[
        float | None, typer.Option(min=0, help="What this one may cost at most: calls beyond it are refused.")
    ] = None,
    tools: Annotated[
        list[str] | None,
        typer.Option(help="A tool in place of the run's own; may be given again. none: answer without."),
    ] = None,
    documents: Annotated[
        Path | None, typer.Option(help="What search searches: a text of a document a line, or .jsonl with `text`.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of whatever is left to chance.")] = 0,
    do_sample: Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the likeliest.")] = False,
    overrides: OverridesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Route a question, and answer it with the tools that the route leaves."""
    from toolwise.agent.agent import RoutedAgent
    from toolwise.agent.loader import read_documents

    found = None if documents is None else read_documents(documents)
    tools = [] if tools == ["none"] else tools
    agent = RoutedAgent.load(source, tools=tools, documents=found, overrides=overrides or [])
    answered = agent.ask(question, budget=budget, route=route.value, cap=cap, seed=seed, do_sample=do_sample)
    if as_json:
        print_json(_to_json(answered))
    else:
        _show(answered)


def _to_json(answered: AgentAnswer) -> dict[str, object]:
    return {
        "text": answered.text,
        "route": answered.route,
        "odds": dict(answered.route_probs),
        "cost": answered.cost,
        "calls": dict(answered.calls),
        "refused": answered.refused,
        "seconds": answered.seconds,
        "saved_s": answered.saved_s,
        "stop_reason": answered.rollout.stop_reason.value,
        "fault": answered.rollout.fault,
        "messages": [message.to_openai() for message in answered.rollout.messages],
    }


def _show(answered: AgentAnswer) -> None:
    route_probs = ", ".join(f"{name} {share:.2f}" for name, share in answered.route_probs.items())
    print_line(f"route: {answered.route}  ({route_probs})")
    for message in answered.rollout.messages:
        for call in message.tool_calls or ():
            print_line(f"  {call.name}({json.dumps(call.arguments, ensure_ascii=False)})")
        if message.role == "tool":
            print_line(f"    {message.content}")
    print_line(answered.text)
    refused = f", {answered.refused} calls refused" if answered.refused else ""
    print_line(f"cost {answered.cost:g}{refused}, {answered.seconds:.2f} s", err=True)
    if answered.saved_s is not None:
        print_line(
            f"answered directly: with all tools such questions took {answered.with_tools_s:.2f} s, "
            f"{answered.saved_s:+.2f} s saved",
            err=True,
        )
    if answered.rollout.fault:
        print_line(f"the rollout ended in a fault: {answered.rollout.fault}", err=True)
