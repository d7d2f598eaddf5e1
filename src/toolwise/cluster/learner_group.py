"""Several learners as one: divides each batch among the ranks, and has their weights after each update."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from toolwise.cluster.interface import (
    CallTimeoutError,
    Cluster,
    ClusterError,
    Payload,
    Process,
    ProcessDiedError,
    Resources,
    Stored,
)
from toolwise.cluster.learner_codec import (
    annotations_from_payload,
    credited_to_payload,
    divide,
    scored_to_payload,
    token_count,
    updated_from_payload,
)
from toolwise.cluster.node_log import NodeLog
from toolwise.cluster.plain_data import to_payload
from toolwise.cluster.shard_files import write_manifest
from toolwise.cluster.weight_transfer import bits_of, install, transferred_weights, whole_copy
from toolwise.concurrency.tasks import all_tasks, wait_all
from toolwise.config.schema import RunConfig
from toolwise.learner.actor import Actor
from toolwise.learner.fingerprint import fingerprint
from toolwise.learner.rows import require_tokens
from toolwise.models.loader import load_weights
from toolwise.protocols import Learner, Metrics
from toolwise.types import AnnotatedRollout, CreditedRollout, ScoredRollout, ThinkingByRollout, UpdatedTokens

STATE_FOLDER = "learners"
"""Within the model's folder of a checkpoint."""
STOP_S = 5.0
CONNECTION_LOST = ("/gloo/", "NCCL error", "torch.distributed.Dist")
"""In errors of a learner that lost the connection to another one, which has died or hangs."""
T = TypeVar("T")


class LearnersLostError(ClusterError):
    """A learner died or hangs: the group must start again, from the last checkpoint."""


class LearnerGroup(Learner):
    """A `Learner` whose methods block, as those of one process do. `model` is the copy in this process: for the router
    and the thinking stage, and the source of checkpoints and of what is published."""

    def __init__(
        self, cluster: Cluster, config: RunConfig, local: Actor, settings: Payload, files: Stored | None
    ) -> None:
        """`local` is the learner of one process, for its model and to know what annotations are needed."""
        self.cluster, self.config, self.local = cluster, config, local
        self.model = local.model
        self.version = 0
        self.updated: Mapping[str, UpdatedTokens] = {}
        self.shared = config.router.enable and config.router.backbone != "frozen"
        """Whether the router in this process trains the weights, too."""
        self._version_here = 0
        """The version of the learners' weights that this process has."""
        self._taken = ""
        """Checksum of the weights that the ranks have, if they may become others here."""
        self.log: NodeLog | None = None
        """Of the run folder."""
        self._spec = settings, files
        self._ranks: list[Process] = []
        self._state: dict[str, Any] | None = None
        """Of a checkpoint of one process, until the ranks have it."""
        self._failure: ClusterError | None = None
        """The error of a learner's own code, which ended all of them."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="toolwise-learners", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start all ranks and connect them."""
        self._wait(self._start())

    def close(self) -> None:
        self._wait(self._kill())
        self._wait(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    # --- learning

    def annotate(
        self, scored: Sequence[ScoredRollout], thinking: ThinkingByRollout | None = None
    ) -> list[AnnotatedRollout]:
        require_tokens(scored)
        self._give_weights()
        columns: dict[int, dict[str, Any]] = {}
        if scored and self.local.required_annotations:
            parts = self._divide([s.steps for s in scored], [s.rollout.group_id for s in scored])
            payloads = [scored_to_payload([scored[index] for index in part]) for part in parts]
            for part, reply in zip(parts, self._call("annotate", payloads), strict=True):
                columns |= dict(zip(part, annotations_from_payload(reply), strict=True))
        kl_coef = self.local.kl.value if self.config.algorithm.kl == "reward" else None
        return [
            AnnotatedRollout(
                s, **columns.get(index, {}), thinking=(thinking or {}).get(s.rollout.rollout_id), kl_coef=kl_coef
            )
            for index, s in enumerate(scored)
        ]

    def update(self, credited: Sequence[CreditedRollout]) -> Metrics:
        self.updated = {}
        self._give_weights()
        parts = self._divide([c.steps for c in credited], [c.rollout.group_id for c in credited])
        shares = [[credited[index] for index in part] for part in parts]
        replies = self._call("update", [credited_to_payload(share) for share in shares])
        checksums = {reply["checksum"] for reply in replies}
        if self.config.cluster.sharding == "replicated" and len(checksums) > 1:
            raise ClusterError("the learners have different weights after an update: this is a bug, please report it")
        facts = json.loads(_text(replies[0]["facts"]))
        self._take_weights()
        self.local.kl.load_state_dict(facts["kl"])
        self.version = int(replies[0]["version"])
        for reply, share in zip(replies, shares, strict=True):
            self.updated = {**self.updated, **updated_from_payload(reply, share)}
        metrics: Metrics = facts["metrics"]
        return metrics | {"cluster/learner_balance": _balance(parts, credited)}

    def _divide(self, steps: Sequence[Sequence[Any]], groups: Sequence[str]) -> list[list[int]]:
        return divide(steps, [token_count(one) for one in steps], groups, self.config.cluster.learners)

    def _take_weights(self) -> None:
        """Copy the first rank's weights here. All ranks take part: of a sharded model each has a piece."""
        first = self._call("weights", [{}] * len(self._ranks))[0]
        current, self._version_here = self._version_here, -1  # unless all of it goes well
        version, expected = install(transferred_weights(self.model), first, current)
        if fingerprint(self.model) != expected:
            raise ClusterError("the learners' weights arrived changed: this is a bug, please report it")
        self._version_here = version
        self._taken = self.weights_checksum() if self.shared else ""

    def _give_weights(self) -> None:
        """Give the ranks what the router has made of the weights since they were taken here."""
        if self.shared and self._taken != (found := self.weights_checksum()):
            self._install_weights()
            self._taken = found

    def _install_weights(self) -> None:
        payload = whole_copy(bits_of(transferred_weights(self.model)), self.version, fingerprint(self.model))
        self._call("install", [payload] * len(self._ranks))

    # --- checkpoints

    def weights_checksum(self) -> str:
        return self.local.weights_checksum()

    def weights_to_save(self) -> Mapping[str, Any] | None:
        """Also has each rank copy its state, so that it can be written while training goes on."""
        weights = self.local.weights_to_save()
        if weights is not None:
            self._call("snapshot", [{}] * len(self._ranks))
        return weights

    def save_model(self, folder: Path, weights: dict[str, Any] | None = None) -> None:
        """The model as one process saves it, and a part of the optimiser's state from each rank; its manifest last."""
        if weights is None:
            self._call("snapshot", [{}] * len(self._ranks))
        self.local.save_model(folder, weights)
        state = (folder / STATE_FOLDER).absolute()
        replies = self._call("write", [{"folder": str(state).encode()}] * len(self._ranks))
        write_manifest(state, len(self._ranks), json.loads(_text(replies[0]["facts"])))

    def load_weights(self, folder: Path) -> None:
        """Load a checkpoint of any number of learners, or of one process, whose state `load_state_dict` has."""
        if self.local.adapters is None:
            load_weights(self.model, folder)
        self._install_weights()
        if self._state is None:
            self._call("load", [{"folder": str((folder / STATE_FOLDER).absolute()).encode()}] * len(self._ranks))
        else:
            self._call("load_state", [to_payload(self._state, "state")] * len(self._ranks))
            self._state = None
        if self.local.adapters is not None:
            self._take_weights()

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version, "kl": self.local.kl.state_dict(), "learners": len(self._ranks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "learners" not in state:
            if self.config.cluster.sharding != "replicated":
                raise ClusterError(
                    'the checkpoint is of a run without sharding: resume with cluster.sharding = "replicated"'
                )
            self._state = state
        self.version = state["version"]
        self.local.kl.load_state_dict(state["kl"])

    # --- processes

    def _call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        return self._wait(self._call_all(method, payloads))

    async def _call_all(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        if not self._ranks:
            raise self._failure or LearnersLostError("there are no learners")
        deadline_s = self.config.cluster.update_s
        calls = [
            self.cluster.call(process, method, payload, deadline_s=deadline_s)
            for process, payload in zip(self._ranks, payloads, strict=True)
        ]
        began, ranks = time.monotonic(), list(self._ranks)
        replies = [dict(reply) for reply in await self._all(method, calls)]
        for process, reply in zip(ranks, replies, strict=True):
            lines = _text(reply.pop("log", b""))
            if self.log is not None:
                self.log.add(process.name, lines, {})
                self.log.event(method, process.name, seconds=time.monotonic() - began)
        return list(replies)

    async def _all(self, what: str, work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Results of something that all ranks do at once. If one fails the others wait for it in vain: all are ended.
        An error that a learner raised itself would come again: it is no `LearnersLostError`."""
        tasks = [asyncio.ensure_future(one) for one in work]
        await asyncio.wait(tasks, return_when="FIRST_EXCEPTION")
        failed = [fault for task in tasks if task.done() and (fault := task.exception()) is not None]
        if not failed:
            return [task.result() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()
        if all(_is_loss(fault) for fault in failed):
            raise LearnersLostError(f"learners, {what}: {failed[0]}") from failed[0]
        own = next(fault for fault in failed if not _is_loss(fault))
        self._failure = ClusterError(f"learners, {what}: {own}")
        raise self._failure from own

    async def _start(self) -> None:
        config, count = self.config.cluster, self.config.cluster.learners
        limit_s = config.start_s

        async def start_rank(rank: int) -> Process:
            settings, files = self._spec
            process = await self.cluster.start(
                "learner",
                f"learner-{rank}",
                settings,
                Resources(config.learner_cpus, config.learner_gpus),
                deadline_s=limit_s,
                stored=files,
            )
            self._ranks.append(process)  # for `_kill`, if another one fails
            return process

        self._ranks = await self._all("start", [start_rank(rank) for rank in range(count)])
        hosts = await self._all("start", [self.cluster.address(process, deadline_s=limit_s) for process in self._ranks])
        store: Payload = {"store": hosts[0].encode()}
        [port] = await self._all("start", [self.cluster.call(self._ranks[0], "listen", store, deadline_s=limit_s)])
        connect = [
            {**store, **port, "host": host.encode(), "rank": rank, "ranks": count} for rank, host in enumerate(hosts)
        ]
        replies = await self._call_all("connect", connect)
        for process, reply in zip(self._ranks, replies, strict=True):
            if self.log is not None:
                self.log.event("start", process.name, pid=reply["pid"])
        fingerprints = [reply["fingerprint"] for reply in replies]
        if len({*fingerprints, fingerprint(self.model).encode()}) > 1:
            raise ClusterError("the learners loaded other weights than this process: is the model's folder the same?")

    async def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(self.cluster.kill(process) for process in ranks))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on the group's own event loop: that of the run may be the caller's."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _end_tasks() -> None:
    """End what still runs on this event loop, such as the watch over a process that was killed."""
    tasks = [task for task in all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await wait_all(tasks, STOP_S)


def _is_loss(fault: BaseException) -> bool:
    """Whether a call failed because a process died or hangs: its own, or another one that it computes with."""
    if isinstance(fault, ProcessDiedError | CallTimeoutError):
        return True
    text = "\n".join([str(fault), *getattr(fault, "__notes__", ())])
    return any(sign in text for sign in CONNECTION_LOST)


def _text(value: Any) -> bytes:
    assert isinstance(value, bytes)
    return value


def _balance(parts: Sequence[Sequence[int]], credited: Sequence[CreditedRollout]) -> float:
    """Tokens of the mean rank as a share of the fullest one's: 1 if all have the same work."""
    loads = [sum(token_count(credited[index].steps) for index in part) for part in parts]
    return sum(loads) / len(loads) / max(loads) if max(loads, default=0) else 1.0
