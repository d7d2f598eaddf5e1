"""A training run on a cluster: the same run, with workers in place of its scheduler and rewards, and learners in place
of its learner if there are several."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolwise.cluster.checks import check_cluster
from toolwise.cluster.interface import Cluster
from toolwise.cluster.learner_group import LearnerGroup, LearnersLostError
from toolwise.cluster.node_files import pack_settings
from toolwise.cluster.node_log import NodeLog
from toolwise.cluster.remote_rollouts import RemoteScheduler, RemoteScoring, RemoteWeights, RolloutWorkers
from toolwise.cluster.weight_publisher import WeightPublisher
from toolwise.cluster.worker_pool import WorkerPool
from toolwise.config.schema import RunConfig
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.training import checkpoint
from toolwise.training.evaluate import Scoring
from toolwise.training.run import Run
from toolwise.training.run_folder import RunResult
from toolwise.training.startup import announce, show_startup
from toolwise.training.trainer import Training
from toolwise.training.weight_copies import WeightCopies

if TYPE_CHECKING:
    from toolwise.learner.actor import Actor

log = logging.getLogger("toolwise.cluster")


async def train_on_cluster(
    build: Callable[[], Run], start: Callable[[Run, bool], Training], config: RunConfig, out: Path, *, resume: bool
) -> RunResult:
    """`build` the run and `start` its training on the cluster of `config`, the settings that the run records."""
    from toolwise.cluster.ray_cluster import RayCluster

    check_cluster(config)
    with show_startup(enabled=config.trainer.console):
        announce(f"starting the cluster ({config.cluster.address})")
        cluster = RayCluster(config.cluster)
    restarts = 0
    try:
        while True:
            try:
                async with running_on(cluster, build(), config, out) as run:
                    return await start(run, resume).run_training()
            except LearnersLostError as fault:
                restarts += 1
                if restarts > config.cluster.max_learner_restarts or not (out / "config.toml").is_file():
                    raise
                log.warning("%s; the learners start again from the last checkpoint", fault)
                resume = True
    finally:
        await cluster.close()


@asynccontextmanager
async def running_on(cluster: Cluster, run: Run, config: RunConfig, out: Path) -> AsyncIterator[Run]:
    """The run with its workers, which end with the block."""
    settings, files = pack_settings(config)
    config = with_server_limits(config)
    stored = await cluster.store(files, deadline_s=config.cluster.transfer_s)
    node_log = NodeLog(out, cluster.show)
    pool = WorkerPool(
        cluster,
        config.cluster,
        settings,
        stored,
        slots=slots_per_worker(config),
        call_s=config.rollout.deadline_s + config.cluster.answer_s,
        on_event=node_log.event,
    )
    workers = RolloutWorkers(
        pool,
        WeightPublisher(cluster, config.cluster, cast("Actor", run.learner).model, node_log.event),
        run.policy,
        run.progress,
        node_log,
        run.router,
    )
    learners: LearnerGroup | None = None
    try:
        with ExitStack() as undo, show_startup(enabled=config.trainer.console):
            undo.callback(run.close)  # else the training closes it
            if config.cluster.learners > 1 or saved_by_learners(out):
                announce(f"starting {config.cluster.learners} learners")
                learners = LearnerGroup(cluster, config, cast("Actor", run.learner), settings, stored)
                learners.log = node_log
                await asyncio.to_thread(learners.start)
            announce(f"starting {config.cluster.workers} rollout workers")
            await pool.start()
            undo.pop_all()
        yield replace(
            run,
            learner=run.learner if learners is None else learners,
            scheduler=RemoteScheduler(**_fields_of(RolloutScheduler, run.scheduler), workers=workers),
            scoring=RemoteScoring(**_fields_of(Scoring, run.scoring), workers=workers),
            weights=None
            if run.weights is None
            else RemoteWeights(**_fields_of(WeightCopies, run.weights), workers=workers),
        )
    finally:
        await pool.close()
        if learners is not None:
            learners.close()


def with_server_limits(config: RunConfig) -> RunConfig:
    """With the time that a worker's vLLM server takes to start and, if replies with stop strings must end before it
    takes new weights, to end them."""
    rollout, cluster = config.rollout, config.cluster
    if rollout.engine != "vllm":
        return config
    limits = {"start_s": cluster.start_s + rollout.vllm.start_s}
    if rollout.stop and config.trainer.mode == "async":
        limits["transfer_s"] = cluster.transfer_s + rollout.vllm.timeout_s
    return config.model_copy(update={"cluster": cluster.model_copy(update=limits)})


def saved_by_learners(out: Path) -> bool:
    """Whether the checkpoint that the run would resume from has the state of several learners, in parts."""
    newest = checkpoint.latest(out / "checkpoints", warnings_out=[])
    return newest is not None and "learners" in newest.part("actor")


def slots_per_worker(config: RunConfig) -> int:
    """Groups that a worker may have at once: its share of the batches under way, within `rollout.max_concurrent`, and
    `agent.max_concurrent` for an agent of the user's own."""
    if config.cluster.groups_per_worker is not None:
        return config.cluster.groups_per_worker
    groups, most = config.data.batch_size * (1 + config.trainer.allowed_staleness), config.rollout.most_concurrent
    if config.agent.enabled:
        most = min(most, config.agent.max_concurrent)
    return max(1, min(math.ceil(groups / config.cluster.workers), most // config.rollout.n))


def _fields_of(kind: Any, part: Any) -> dict[str, Any]:
    """Those of the class that a part of this process has, or inherits."""
    return {field.name: getattr(part, field.name) for field in fields(kind)}
