"""Starts a training run from its inputs: in this process, or on a cluster if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolwise.concurrency.deadlines import run_async
from toolwise.config.schema import RunConfig
from toolwise.protocols import Callback
from toolwise.rollout.agents.agent_pool import AgentPool
from toolwise.training.inputs import RunInputs
from toolwise.training.run import Run, assemble
from toolwise.training.run_folder import RunResult
from toolwise.training.startup import show_startup
from toolwise.training.trackers.observers import Observers, ObserverSource
from toolwise.training.trainer import Training


def launch_training(
    inputs: RunInputs,
    sources: Sequence[ObserverSource],
    folder: Path,
    *,
    resume: bool,
    callbacks: Sequence[Callback],
    **parts: Any,
) -> RunResult:
    """Build the run from its inputs and train it. `parts` are those of `assemble`."""
    trainer = inputs.config.trainer

    def observe() -> Observers:
        observers = Observers(limit_s=trainer.observer_timeout_s)
        undo.callback(observers.close)
        observers.create(sources)
        return observers

    def build() -> Run:
        agent = parts.get("agent")
        if agent is not None:  # also when the run starts again after its processes have ended
            agent = replace(agent, pool=AgentPool(agent.pool.config))
        with show_startup(enabled=trainer.console):
            run = assemble(driver_config(inputs.config), **{**parts, "agent": agent})
        return replace(run, config=inputs.recorded)

    def start(run: Run, resume: bool) -> Training:
        observers = created.pop() if created else observe()  # of the first start, or of a later one
        training = Training(run, folder, resume=resume, callbacks=callbacks, observers=observers)
        undo.pop_all()
        return training

    with ExitStack() as undo:  # if the run cannot start
        undo.callback(inputs.discard)
        inputs.write()
        created = [observe()]
        if inputs.recorded.cluster.enabled:
            from toolwise.cluster.session import train_on_cluster

            return run_async(train_on_cluster(build, start, inputs.recorded, folder, resume=resume))
        training = start(build(), resume)
    return run_async(training.run_training())


def driver_config(config: RunConfig) -> RunConfig:
    """For the process of the run: on a cluster the workers have the vLLM servers."""
    if not config.cluster.enabled or config.rollout.engine != "vllm":
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "toolwise"})})
