"""`toolwise serve`: an agent or a model behind OpenAI's HTTP interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from toolwise.cli.rollout import load_agent
from toolwise.cli.train import OverridesOption, TrustOption
from toolwise.terminal import print_line

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent

SourceArgument = Annotated[
    Path, typer.Argument(metavar="AGENT", help="Agent folder, run folder, checkpoint, or model.", show_default=False)
]
KeysOption = Annotated[
    list[str] | None, typer.Option(help="Environment variable with a key that clients must send; repeatable.")
]
HostsOption = Annotated[
    list[str] | None, typer.Option(help="Name under which clients reach the server; repeatable. *: any.")
]
ToolsOption = Annotated[
    list[str] | None,
    typer.Option(help="Tool to use instead of the agent's tools; repeatable. none: answer without tools."),
]
DocumentsOption = Annotated[
    Path | None,
    typer.Option(help="Documents for the search tool: text, one document per line, or .jsonl with `text`."),
]


def serve(
    source: SourceArgument,
    host: Annotated[
        str, typer.Option(help="Address to listen on; anything but the loopback needs --api-key-env.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = 8000,
    api_key_env: KeysOption = None,
    allow_host: HostsOption = None,
    mode: Annotated[
        Literal["agent", "model"], typer.Option(help="agent: the server runs the tools; model: the client does.")
    ] = "agent",
    budget: Annotated[
        float | None, typer.Option(min=0, help="Average cost allowed per question; a request may give its own.")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option(min=0, help="Maximum cost of an answer; a request may only lower it.")
    ] = None,
    name: Annotated[str, typer.Option(help="Model name in requests; by default the folder's name.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most new tokens a request may ask for.")] = None,
    max_active: Annotated[int, typer.Option(min=1, help="Requests answered at a time.")] = 256,
    max_queued: Annotated[int, typer.Option(min=0, help="Requests that wait; more get a 429.")] = 512,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer, waiting included.")] = 600.0,
    drain_s: Annotated[float, typer.Option(min=1, help="Seconds that running requests have after SIGTERM.")] = 30.0,
    stream_interval_ms: Annotated[
        float, typer.Option(min=0, max=1000, help="Collect the tokens of a stream for this time; 0: an event for each.")
    ] = 20.0,
    tools: ToolsOption = None,
    documents: DocumentsOption = None,
    overrides: OverridesOption = None,
    trust_code: TrustOption = False,
) -> None:
    """Serve an agent over HTTP for OpenAI clients. SIGTERM drains, SIGHUP loads the weights again."""
    from toolwise.remote.endpoint import read_api_key
    from toolwise.serve.limits import ServerLimits
    from toolwise.serve.service import ServiceConfig
    from toolwise.serve.service import serve as run_service

    keys = [key for variable in api_key_env or () if (key := read_api_key(variable, "--api-key-env"))]
    limits = ServerLimits(
        active=max_active, queued=max_queued, deadline_s=deadline_s, connections=max_active + max_queued + 64
    )
    config = ServiceConfig(
        name=name or source.name or str(source),
        host=host,
        port=port,
        mode=mode,
        budget=budget,
        max_cost=max_cost,
        max_new_tokens=max_tokens,
        keys=keys,
        hosts=allow_host or (),
        drain_s=drain_s,
        stream_interval_s=stream_interval_ms / 1000,
        limits=limits,
    )
    # In mode model the client brings the tools.
    given = ["none"] if mode == "model" and tools is None else tools

    def load(known: Sequence[Any] | None) -> Agent:
        return load_agent(source, given if known is None else list(known), documents, overrides, trust_code)

    def announce(url: str) -> None:
        print_line(f"serving {config.name} at {url}/v1 in mode {mode}; /health, /ready and /metrics at {url}")

    run_service(config, load, announce)
