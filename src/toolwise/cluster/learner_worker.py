"""A learner: one rank of a group that divides each batch. All ranks hold the same weights, or a part of them each."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from toolwise.cluster.interface import ClusterError, Payload
from toolwise.cluster.learner_codec import (
    annotations_to_payload,
    credited_from_payload,
    scored_from_payload,
    updated_to_payload,
)
from toolwise.cluster.learner_state import LearnerState
from toolwise.cluster.node_files import unpack_settings
from toolwise.cluster.node_log import LogLines
from toolwise.cluster.plain_data import from_payload
from toolwise.cluster.rendezvous import join_group, listen
from toolwise.cluster.weight_transfer import SentWeights, install, transferred_weights
from toolwise.config.schema import RunConfig
from toolwise.learner.actor import Actor
from toolwise.learner.builder import build_learner
from toolwise.learner.fingerprint import fingerprint_of, sample_of
from toolwise.learner.sharding import gathered, is_sharded, write_whole
from toolwise.models import load_model
from toolwise.training.components import load_estimator, load_loss
from toolwise.training.rollout_setup import load_options


class LearnerWorker:
    """Its methods are called on all ranks at once: they compute together."""

    def __init__(self, name: str, payload: Payload) -> None:
        self.name, self.log = name, LogLines()
        self._folder = TemporaryDirectory(prefix="toolwise-learner-")
        self.config: RunConfig = unpack_settings(payload, Path(self._folder.name))
        torch.set_num_threads(max(1, int(self.config.cluster.learner_cpus)))
        if self.config.deterministic:
            torch.use_deterministic_algorithms(True)
        self.rank, self.ranks = 0, 1
        self._listener: socket.socket | None = None
        self._sent = SentWeights()
        """The weights that the process of the run has."""
        self._samples: dict[str, torch.Tensor] = {}
        """Of each weight, for the fingerprint."""
        self.actor: Actor
        self.state: LearnerState

    async def handle(self, method: str, payload: Payload) -> Payload:
        methods = {
            "listen": self._listen,
            "connect": self._connect,
            "annotate": self._annotate,
            "update": self._update,
            "weights": self._weights,
            "install": self._install,
            "snapshot": self._snapshot,
            "write": self._write,
            "load": self._load,
            "load_state": self._load_state,
        }
        if method not in methods:
            raise ClusterError(f"a learner has no {method}")
        reply = await asyncio.to_thread(methods[method], payload)  # calls do not overlap: the group waits for each
        return {**reply, "log": self.log.take()}

    def _listen(self, payload: Payload) -> Payload:
        """Of the first rank: listen where the ranks meet, at the address of this node and nowhere else."""
        self._listener = listen(_text(payload["store"]))
        return {"port": self._listener.getsockname()[1]}

    def _connect(self, payload: Payload) -> Payload:
        self.rank, self.ranks = int(payload["rank"]), int(payload["ranks"])
        gpus = self.config.cluster.learner_gpus > 0
        join_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",  # by gloo also weights that are kept in CPU memory
            (_text(payload["store"]), int(payload["port"])),
            _text(payload["host"]),
            self.rank,
            self.ranks,
            self._listener,
            limit_s=self.config.cluster.update_s,
        )
        path = self.config.model.path
        model, _ = load_model(path, **load_options(self.config, path))
        self.actor = build_learner(
            self.config,
            model,
            load_estimator(self.config),
            load_critic=partial(_load_critic, self.config),
            loss=load_loss(self.config),
            shard=self.config.cluster.sharding == "fsdp",
            offload=self.config.cluster.offload,
        )
        self.state = LearnerState(self.actor, self.rank, self.ranks)
        self._samples = {name: sample_of(gathered(weight)).clone() for name, weight in model.named_parameters()}
        return {"fingerprint": fingerprint_of(self._samples).encode(), "pid": os.getpid()}

    def _annotate(self, payload: Payload) -> Payload:
        return annotations_to_payload(self.actor.annotate(scored_from_payload(payload)))

    def _update(self, payload: Payload) -> Payload:
        metrics = self.actor.update(credited_from_payload(payload))
        facts = {"metrics": metrics, "kl": self.actor.kl.state_dict(), "guard": self.actor.optimizer.guard.skipped}
        checksum = b"" if is_sharded(self.actor.model) else self.actor.weights_checksum().encode()
        return {
            "facts": json.dumps(facts, allow_nan=True).encode(),
            "version": self.actor.version,
            "checksum": checksum,
            **updated_to_payload(self.actor.updated.values()),
        }

    def _weights(self, payload: Payload) -> Payload:
        """The weights, from the first rank: what changed since they were last asked for, if that is less. With adapters
        those alone. Gathered one by one, so that no other process has more than one of them whole."""
        self._sent.begin()
        for name, weight in transferred_weights(self.actor.model).items():
            whole = gathered(weight)
            if self.rank == 0:
                self._sent.add({name: whole})
                self._samples[name] = sample_of(whole).clone()
        if self.rank:
            return {}
        changes = self._sent.finish(self.actor.version, fingerprint_of(self._samples))
        return self._sent.whole() if changes is None else changes

    def _install(self, payload: Payload) -> Payload:
        """Weights of a checkpoint, in place of those of the model's folder."""
        parameters = transferred_weights(self.actor.model)
        weights = {name: gathered(weight).detach().clone() for name, weight in parameters.items()}
        version, _ = install(weights, payload, 0)
        write_whole(self.actor.model, weights)
        self.actor.optimizer.sync_masters()
        self.actor.version = version
        self._sent.version = None  # the process of the run has others
        return {}

    def _snapshot(self, payload: Payload) -> Payload:
        return {"bytes": self.state.snapshot()}

    def _write(self, payload: Payload) -> Payload:
        facts = self.state.write(Path(_text(payload["folder"])))
        return {"facts": json.dumps(facts, allow_nan=False).encode()}

    def _load(self, payload: Payload) -> Payload:
        self.state.load(Path(_text(payload["folder"])))
        return {}

    def _load_state(self, payload: Payload) -> Payload:
        """The state of a learner in one process."""
        self.actor.load_state_dict(from_payload(payload))
        return {}

    def close(self) -> None:
        self._folder.cleanup()  # first: the others may be gone, and what follows wait for them
        if dist.is_initialized():
            dist.destroy_process_group()


def _load_critic(config: RunConfig, path: str) -> Any:
    return load_model(path, **load_options(config, path))[0]


def _text(value: Any) -> str:
    return bytes(value).decode()
