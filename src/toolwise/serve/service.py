"""An agent or model as a service: loads it, warms it up, and serves it until a signal ends the process.

SIGTERM and SIGINT stop accepting connections and let requests under way finish; SIGHUP loads the weights again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from toolwise.concurrency.garbage import frozen_heap, relaxed_gc
from toolwise.concurrency.memory import keep_freed_memory
from toolwise.concurrency.tasks import spawn
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.serve.admission import Admission
from toolwise.serve.app import Served, build_app
from toolwise.serve.chat import ServedModel
from toolwise.serve.guard import ApiKeys
from toolwise.serve.limits import ServerLimits
from toolwise.serve.prometheus import ServerMetrics
from toolwise.serve.request import ChatRequest
from toolwise.serve.server import listen, server_without_signals, uvicorn_config
from toolwise.serve.weights import ReloadableWeights

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent

log = logging.getLogger("toolwise.serve")
Mode = Literal["agent", "model"]
LoadAgent = Callable[[Sequence[Any] | None], "Agent"]
"""Loads the agent, with the given tools in place of its own."""
SWITCH_INTERVAL_S = 0.0005
"""The engine's thread needs the interpreter for a moment after each step on the device; by default, it may have to wait
for 5 ms each time while events are being written."""
_SPARE_FILES = 128
_WARM_UP = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """How to serve."""

    name: str
    """The model's name in requests."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    mode: Mode = "agent"
    """agent: the server runs the tools; model: the client does."""
    budget: float | None = None
    max_cost: float | None = None
    max_new_tokens: int | None = None
    keys: Sequence[str] = field(default=(), repr=False)
    hosts: Sequence[str] = ()
    """Names under which the server may be reached, besides its address."""
    drain_s: float = 30.0
    """How long requests under way may take after SIGTERM."""
    stream_interval_s: float | None = None
    """How long the tokens of a stream are collected; 0: an event for each; None: as the engine does."""
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if self.mode == "model" and (self.budget is not None or self.max_cost is not None):
            raise ConfigError("--budget and --max-cost need --mode agent: in mode model the client runs the tools")
        ApiKeys(self.keys)  # raises if one is too weak
        if not self.keys and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: give a key with --api-key-env NAME, or use "
                "127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(
    config: ServiceConfig, load: Callable[[Sequence[Any] | None], Agent], on_start: Callable[[str], None]
) -> None:
    """Serve until a signal ends it. `load` loads the agent, with the tools of the one before if it is loaded again;
    `on_start` gets the URL."""
    keep_freed_memory()
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    metrics, admission = ServerMetrics(), Admission(config.limits, warm=False)
    weights = ReloadableWeights(_Loader(config, load), metrics)
    app = build_app(
        weights, hosts=config.hosts, limits=config.limits, keys=config.keys, admission=admission, metrics=metrics
    )
    _raise_file_limit(config.limits.connections)
    try:
        with relaxed_gc(), frozen_heap():
            asyncio.run(_run(config, app, weights, admission, on_start))
    finally:
        sys.setswitchinterval(switch_interval)
        weights.close()


class _Loader:
    """Loads what to serve; loaded again, it keeps the tools."""

    def __init__(self, config: ServiceConfig, load: LoadAgent) -> None:
        self.config, self.load = config, load
        self.tools: Sequence[Any] | None = None

    def __call__(self, version: int) -> Served:
        agent = self.load(self.tools)
        try:
            return self._serve(agent, version)
        except BaseException:
            agent.policy.close()
            raise

    def _serve(self, agent: Agent, version: int) -> Served:
        config = self.config
        agent.policy.version = version
        _set_up_engine(agent.policy.engine, config)
        if config.mode == "model":
            return ServedModel.of(agent.policy, config.name, max_new_tokens=config.max_new_tokens)
        from toolwise.serve.agent_chat import ServedAgent

        if config.budget is not None:  # clients could do nothing about it
            agent.check_budget(config.budget, config.max_cost)
        self.tools = list(agent.tools.values())
        return ServedAgent(config.name, agent, config.budget, config.max_cost, config.max_new_tokens)


def _set_up_engine(engine: Any, config: ServiceConfig) -> None:
    from toolwise.engine import Engine
    from toolwise.engine.cpu_runner import CpuRunner

    if isinstance(engine, Engine):
        if config.stream_interval_s is not None:
            engine.streams.interval_s = config.stream_interval_s
        if isinstance(engine.runner, CpuRunner):
            engine.runner.pack_weights()


async def _run(
    config: ServiceConfig,
    app: Any,
    weights: ReloadableWeights,
    admission: Admission,
    on_start: Callable[[str], None],
) -> None:
    server = server_without_signals(uvicorn_config(app, config.limits, drain_s=config.drain_s))
    loop = asyncio.get_running_loop()

    def drain() -> None:
        server.force_exit = server.should_exit  # a second signal does not wait
        server.should_exit = admission.draining = True

    with listen(config.host, config.port) as listening, _signal_handlers(loop, drain, weights):
        warming = spawn(_warm_up(weights, admission))
        host = f"[{config.host}]" if ":" in config.host else config.host
        on_start(f"http://{host}:{listening.getsockname()[1]}")
        try:
            await server.serve([listening])
        finally:
            warming.cancel()


async def _warm_up(served: Served, admission: Admission) -> None:
    """One short answer before /ready: the first request need not wait for what is built only once."""
    try:
        await served.complete(ChatRequest.model_validate(_WARM_UP | {"model": served.name}))
    except ToolwiseError as fault:
        log.error("the first answer failed: %s", fault)
        return
    admission.warm = True


@contextlib.contextmanager
def _signal_handlers(
    loop: asyncio.AbstractEventLoop, drain: Callable[[], None], weights: ReloadableWeights
) -> Iterator[None]:
    handlers: dict[int, Callable[[], Any]] = {
        signal.SIGTERM: drain,
        signal.SIGINT: drain,
        signal.SIGHUP: lambda: spawn(weights.reload()),
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _raise_file_limit(connections: int) -> None:
    """Each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        top = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
        if top < wanted:
            log.warning("only %d files may be open: more than %d connections will fail", top, top - _SPARE_FILES)
