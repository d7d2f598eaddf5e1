"""`toolwise run`: ask a trained, routed agent one question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolwise.cli.train import OverridesOption
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.agent.agent import AgentAnswer


def run(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Run folder, checkpoint, or exported model.")],
    question: Annotated[str, typer.Argument(help="Question to ask.")],
    budget: Annotated[
        float | None, typer.Option(min=0, help="Average cost allowed per question; the router keeps to it.")
    ] = None,
    route: Annotated[
        Literal["auto", "answer", "search", "calculate"],
        typer.Option(help="Force a route; auto lets the router choose."),
    ] = "auto",
    cap: Annotated[
        float | None,
        typer.Option("--max-cost", min=0, help="Maximum cost of this question; tool calls beyond it are refused."),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Ask a trained agent one question: the router picks a route, the model answers with the tools it allows."""
    from toolwise.agent.agent import RoutedAgent
    from toolwise.agent.loader import read_documents

    texts = None if documents is None else read_documents(documents)
    tools = [] if tools == ["none"] else tools
    agent = RoutedAgent.load(source, tools=tools, documents=texts, overrides=overrides or [])
    answer = agent.ask(question, budget=budget, route=route, cap=cap, seed=seed, do_sample=do_sample)
    if as_json:
        print_json(_to_json(answer))
    else:
        _show(answer)


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


def _show(answer: AgentAnswer) -> None:
    route_probs = ", ".join(f"{name} {share:.2f}" for name, share in answer.route_probs.items())
    print_line(f"route: {answer.route}  ({route_probs})")
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
