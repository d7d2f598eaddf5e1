"""A rollout worker: engine, tools, environments and reward sandbox in one process, which answers tickets with finished
groups and installs weights between the steps of its engine."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from toolwise.cluster.interface import ClusterError, Payload, RefusedError
from toolwise.cluster.node_files import unpack_settings
from toolwise.cluster.node_log import LogLines
from toolwise.cluster.plain_data import from_payload
from toolwise.cluster.rollout_codec import ROUTER, group_to_payload, ticket_from_payload
from toolwise.cluster.weight_transfer import install, transferred_weights
from toolwise.config.imports import load_reference
from toolwise.config.schema import RunConfig
from toolwise.engine import Engine
from toolwise.engine.weight_swap import replace_weights
from toolwise.errors import PolicyError
from toolwise.learner.fingerprint import fingerprint
from toolwise.learner.lora import Adapters
from toolwise.protocols import ReloadingEngine
from toolwise.rewards.combine import CompositeReward
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.turn_router import TurnRouter
from toolwise.training.rollout_setup import RolloutSetup, setup_rollouts, tools_and_scoring
from toolwise.types import RouteDecision

BUILD_AGENT = "toolwise.serve.gateway.builder:build_outside_agent"
"""By reference: what serves an agent of the user's own is above this package."""
DAMAGED = -1
"""The version of a worker whose weights are not those of any version: it takes a whole copy alone."""


class RolloutWorker:
    """`version` is that of its weights."""

    def __init__(self, name: str, payload: Payload) -> None:
        self.name, self.version = name, 0
        self.log = LogLines()
        self._folder = TemporaryDirectory(prefix="toolwise-worker-")
        config = with_worker_threads(unpack_settings(payload, Path(self._folder.name)))
        agent = load_reference(BUILD_AGENT, what="agent.run")(config) if config.agent.enabled else None
        with tools_and_scoring(config, None, None, agent) as (tools, scoring):
            self.setup: RolloutSetup = setup_rollouts(config, [], tools, scoring, agent=agent)
        scoring.set_print_callback(self.log.add_print)
        if config.actor.lora.rank:
            Adapters(self.setup.policy.model, config.actor.lora, config.seed)
        self.scores = scores_on_workers(config, scoring.rewards)

    async def handle(self, method: str, payload: Payload) -> Payload:
        match method:
            case "roll_out":
                return await self._roll_out(payload)
            case "install":
                return await self._install(payload)
            case "report":
                return {**self._figures(), "version": self.version}
        raise ClusterError(f"a rollout worker has no {method}")

    async def _roll_out(self, payload: Payload) -> Payload:
        received, do_sample, turns = ticket_from_payload(payload)
        decision = self._with_code(received) if turns is None else self._with_turns(received, turns, payload)
        [rollouts] = [group async for group in self.setup.scheduler.groups([decision], do_sample=do_sample)]
        results = None
        if self.scores:
            results = await self.setup.scoring.evaluate(rollouts, step=int(payload["step"]))
        return {**group_to_payload(rollouts, results), **self._figures()}

    def _with_code(self, decision: RouteDecision) -> RouteDecision:
        """The decision with what cannot be sent: who answers on its route, and how it is counted and capped."""
        router = self.setup.router
        if decision.route is None or not isinstance(router, InferenceRouter):
            return decision
        built = router.conditioning.decision(
            decision.task,
            decision.route,
            group_id=decision.group_id,
            n=decision.n,
            seed=decision.seed,
            prompt_id=decision.prompt_id,
            count_usage=router._usage_counter(decision.task),
            budget=decision.budget,
        )
        return replace(decision, count_usage=built.count_usage, policy=built.policy, wrap_env=built.wrap_env)

    def _with_turns(self, decision: RouteDecision, turns: dict[str, Any], payload: Payload) -> RouteDecision:
        """The decision with the router of its turns, which is that of the driver when it decided."""
        router = self.setup.router
        assert isinstance(router, TurnRouter)
        state = from_payload({name.removeprefix(ROUTER): value for name, value in payload.items() if ROUTER in name})
        built = router.at_state(state).decision_for(decision.prompt_id, decision.task, decision.n, **turns)
        return replace(decision, turns=built.turns, count_usage=built.count_usage)

    async def _install(self, payload: Payload) -> Payload:
        policy = self.setup.policy
        version = int(payload["version"])

        def write() -> None:
            installed, expected = install(transferred_weights(policy.model), payload, self.version)
            self.version = DAMAGED
            if (found := fingerprint(policy.model)) != expected:
                raise RefusedError(f"after version {installed} the weights are {found}, and should be {expected}")
            self.version = installed

        if not isinstance(policy.engine, Engine | ReloadingEngine):
            write()
            policy.engine.weights_changed(version)
            return {"version": self.version}
        try:
            await replace_weights(policy.engine, write, version, keep_cache=self.setup.config.trainer.keep_cache)
        except PolicyError as fault:  # of its server; another worker starts another one
            self.version = DAMAGED
            raise RefusedError(f"its server did not take version {version}: {fault}") from fault
        return {"version": self.version}

    def _figures(self) -> dict[str, Any]:
        """What the driver adds to the run folder: the engine's seconds and counters, and new lines of the log."""
        policy = self.setup.policy
        counters = json.dumps({"pid": os.getpid(), **policy.metrics()}, allow_nan=False).encode()
        return {
            "busy_s": policy.engine.busy_s,
            "worker": self.name.encode(),
            "counters": counters,
            "log": self.log.take(),
        }

    def close(self) -> None:
        with self._folder:  # which is deleted, whatever fails
            self.setup.close()


def with_worker_threads(config: RunConfig) -> RunConfig:
    """Computes with as many threads as the worker has CPUs, unless the configuration says how many."""
    threads = config.model.threads or max(1, int(config.cluster.worker_cpus))
    return config.model_copy(update={"model": config.model.model_copy(update={"threads": threads})})


def scores_on_workers(config: RunConfig, rewards: CompositeReward) -> bool:
    """Whether a worker can compute the rewards of one group: not those of a function that sees the whole batch, or all
    groups of a prompt that has several routes."""
    modes = {part.reward.mode for part in rewards.parts}
    routed = config.router.enable or bool(config.router.name)
    return modes <= ({"pointwise"} if routed else {"pointwise", "group"})
