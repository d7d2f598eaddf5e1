"""The state of one learner as parts for `shard_files`: the moments and masters of its optimisers, and the critic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolwise.cluster.shard_files import Part, PartReader, own_range, write_parts
from toolwise.errors import CheckpointError
from toolwise.learner.actor import Actor
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.sharding import local, local_range

MOMENTS = ("exp_avg", "exp_avg_sq")


class LearnerState:
    """Rank `rank` of `ranks` writes its share of each tensor, and reads what it holds: its shard, or the whole."""

    def __init__(self, actor: Actor, rank: int, ranks: int) -> None:
        self.actor, self.rank, self.ranks = actor, rank, ranks
        self._parts: dict[str, Part] = {}
        self._facts: dict[str, Any] = {}

    def snapshot(self) -> int:
        """Copy this rank's share, so that training can go on while it is written; return its size in bytes."""
        self._parts = {}
        for name, tensor, like in self._tensors():
            self._parts[name] = local_part(tensor, like, self.rank, self.ranks)
        self._facts = self._small_state()
        return sum(part.values.nbytes for part in self._parts.values())

    def write(self, folder: Path) -> dict[str, Any]:
        """Write what `snapshot` copied; return what the manifest holds besides."""
        write_parts(folder, self.rank, self.ranks, self._parts)
        self._parts = {}
        return self._facts

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read the state that another number of ranks may have written."""
        reader = PartReader(folder)
        self._load_small_state(reader.facts)
        counts: Mapping[str, Mapping[str, float]] = reader.facts["steps"]
        for owner, optimizer in self._optimizers():
            for index, master in enumerate(optimizer.masters):
                if (count := counts[owner].get(str(index))) is not None:
                    step = torch.tensor(count, dtype=torch.float32, device=master.device)
                    dtype = torch.bfloat16 if optimizer.moment_bytes == 2 else master.dtype
                    moments = {name: torch.zeros_like(master, dtype=dtype) for name in MOMENTS}
                    optimizer.adamw.state[master] = {"step": step, **moments}
        for name, tensor, like in self._tensors():
            if name not in reader.names or reader.total(name) != like.numel():
                raise CheckpointError(f"the checkpoint's learners have another {name}: resume with the same settings")
            read_into(tensor, like, reader, name)

    def _optimizers(self) -> list[tuple[str, Optimizer]]:
        critic = self.actor.critic
        return [("actor", self.actor.optimizer), *([] if critic is None else [("critic", critic.optimizer)])]

    def _tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Every tensor that a checkpoint must hold besides the model's weights: its name, the tensor, and the weight
        that it is divided like."""
        for owner, optimizer in self._optimizers():
            for index, (weight, master) in enumerate(zip(optimizer.weights, optimizer.masters, strict=True)):
                for moment in MOMENTS:
                    if (state := optimizer.adamw.state.get(master)) is not None:
                        yield f"{owner}.{index}.{moment}", state[moment], weight
                if master is not weight:
                    yield f"{owner}.{index}.master", master, weight
        if self.actor.critic is not None:
            for part in ("trunk", "head"):
                for name, weight in getattr(self.actor.critic, part).named_parameters():
                    yield f"critic.{part}.{name}", weight, weight
        if self.actor.adapters is not None:
            for name, weight in self.actor.model.named_parameters():
                if weight.requires_grad:
                    yield f"adapter.{name}", weight, weight

    def _small_state(self) -> dict[str, Any]:
        actor, critic = self.actor, self.actor.critic
        steps = {
            owner: {
                str(index): float(state["step"])
                for index, master in enumerate(optimizer.masters)
                if (state := optimizer.adamw.state.get(master)) is not None
            }
            for owner, optimizer in self._optimizers()
        }
        guards = {owner: optimizer.guard.state_dict() for owner, optimizer in self._optimizers()}
        return {
            "version": actor.version,
            "kl": actor.kl.state_dict(),
            "steps": steps,
            "guards": guards,
            "critic": critic is not None,
        }

    def _load_small_state(self, facts: Mapping[str, Any]) -> None:
        actor = self.actor
        if facts["critic"] != (actor.critic is not None):
            raise CheckpointError("the run and the checkpoint differ in `critic`: resume with the same estimator")
        actor.version = facts["version"]
        actor.kl.load_state_dict(facts["kl"])
        for owner, optimizer in self._optimizers():
            optimizer.guard.load_state_dict(facts["guards"][owner])


def local_part(tensor: Tensor, like: Tensor, rank: int, ranks: int) -> Part:
    """A copy of this rank's share of a tensor, in CPU memory: its shard, or of a whole tensor an equal range."""
    flat, total = local(tensor.detach()).reshape(-1), like.numel()
    if (held := local_range(like)) is not None:
        return Part(flat.to("cpu", copy=True), held[0], total)
    start, stop = own_range(total, rank, ranks)
    return Part(flat[start:stop].to("cpu", copy=True), start, total)


def read_into(tensor: Tensor, like: Tensor, reader: PartReader, name: str) -> None:
    start, stop = local_range(like) or (0, like.numel())
    mine = local(tensor)
    mine.copy_(reader.read(name, start, stop).reshape(mine.shape))
