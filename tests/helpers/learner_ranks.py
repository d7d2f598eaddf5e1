"""Learners of a group as forked processes, run by test_learner_codec.py as `learner_ranks.py RANKS FOLDER JOB`.

With plain SGD: Adam would hide a factor in the gradients. A JOB is words joined by dashes: "shard", "lora", "trees"
(rows share prefixes), "checkpointed" (activations), "fp32" or "bf16" in place of float64, "planted", "save".
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.distributed as dist
from learner_cases import LR, changed, sample, tiny_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from toolwise.cluster.learner_codec import (
    UPDATED,
    credited_from_payload,
    credited_to_payload,
    divide,
    token_count,
    updated_from_payload,
    updated_to_payload,
)
from toolwise.cluster.learner_state import LearnerState
from toolwise.cluster.shard_files import MANIFEST, write_manifest
from toolwise.learner import distributed
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.sharding import gathered, local, write_whole
from toolwise.models import merged_weights
from toolwise.models.merged_weights import is_adapter_weight
from toolwise.types import CreditedRollout

UPDATES, RATE = 10, 0.05
WIDE = changed(
    LR,
    {"algorithm": {"kl": "loss", "kl_coef": 0.1}, "critic": {"max_grad_norm": 1e9}},
    max_grad_norm=1e9,
    entropy_coef=0.01,
    mismatch_check="off",
    share_prefixes=False,  # a divided group has other trees, whose attention is summed in fp32
)
PLANTED = {"factor": 1.0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Sgd(Optimizer):
    """Sums gradients over ranks as the optimiser does, then steps without moments."""

    @torch.no_grad()
    def step(self, update: int, suspects: Any = list) -> dict[str, float]:
        distributed.sum_gradients(self.holders)
        norm = distributed.clip_gradients(self.holders, 1e9) * PLANTED["factor"]
        gradients = [holder.grad * PLANTED["factor"] for holder in self.holders]
        self.seen = torch.cat([gathered(gradient).flatten() for gradient in gradients])
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.sub_(RATE * gradient)
        self.zero_grad()
        return {"grad_norm": norm, "update_norm": 0.0}


@cache
def rollouts() -> list[CreditedRollout]:
    """Rollouts of unequal lengths, with returns for a critic."""
    found = sample(tiny_model(), [1.0, -0.5, 2.0, -1.5, 0.3], groups_of=2)
    return [
        replace(c, returns=tuple(np.linspace(0, i + 1, len(a), dtype=np.float32) for a in c.advantages))
        for i, c in enumerate(found)
    ]


def learn(rank: int, ranks: int, job: str = "plain") -> dict[str, torch.Tensor]:
    """The gradient, its norm and the weights of each update; rollouts divided as a group divides them."""
    whole, words = rollouts(), job.split("-")
    dtype = next((DTYPES[word] for word in words if word in DTYPES), torch.float64)
    lora, shard, offload = "lora" in words, "shard" in words, "offload" in words
    config = changed(
        WIDE,
        share_prefixes="trees" in words,
        activation_checkpointing="checkpointed" in words,
        **({"lora": {"rank": 2}} if lora else {}),
    )
    sizes = [token_count(c.steps) for c in whole]
    parts = divide(whole, sizes, [c.rollout.group_id for c in whole], ranks)
    mine = credited_from_payload(credited_to_payload([whole[index] for index in parts[rank]]))
    critic = Critic(tiny_model().to(dtype), config, shard=shard, offload=offload)
    critic.head.to(torch.promote_types(dtype, torch.float32))
    actor = Actor(tiny_model().to(dtype), config, critic=critic, shard=shard, offload=offload)
    for part in (actor, critic):
        part.optimizer.__class__ = Sgd
    found: dict[str, torch.Tensor] = {}
    for update in range(1 if "bf16" in words else UPDATES):
        annotated = actor.annotate([c.annotated.scored for c in mine])
        metrics = actor.update([replace(c, annotated=a) for c, a in zip(mine, annotated, strict=True)])
        for name, owner in (("actor", actor), ("critic", critic)):
            optimizer: Any = owner.optimizer
            found[f"{name}.gradient.{update}"] = optimizer.seen.clone()
            found[f"{name}.norm.{update}"] = torch.tensor(metrics[f"{name}/grad_norm"], dtype=torch.float64)
        found[f"weights.{update}"] = flat_weights(actor)
    if shard:
        model = [weight for name, weight in actor.model.named_parameters() if not is_adapter_weight(name)]
        assert sum(local(weight).numel() for weight in model) < 1.2 * sum(weight.numel() for weight in model) / ranks
        assert not merged_weights._BY_ADAPTER
    return found


def updated_columns(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """What `Actor.updated` has after two updates of two optimizer steps, sent as a learner sends it; each row in a pass
    by itself, so that it does not matter which others the rank has."""
    whole = rollouts()
    parts = divide(whole, [token_count(c.steps) for c in whole], [c.rollout.group_id for c in whole], ranks)
    mine = [whole[index] for index in parts[rank]]
    config = changed(WIDE, micro_batch_tokens=1, ppo_epochs=2)
    actor = Actor(tiny_model().double(), config, critic=Critic(tiny_model().double(), config))
    found: dict[str, torch.Tensor] = {}
    for update in range(2):
        annotated = actor.annotate([c.annotated.scored for c in mine])
        actor.update([replace(c, annotated=a) for c, a in zip(mine, annotated, strict=True)])
        for name, tokens in updated_from_payload(updated_to_payload(actor.updated.values()), mine).items():
            for column in UPDATED:
                found[f"{update}/{name}/{column}"] = torch.from_numpy(getattr(tokens, column).copy())
    return found


@contextmanager
def reductions() -> Iterator[set[torch.dtype]]:
    """The types in which FSDP sums gradients."""
    seen: set[torch.dtype] = set()
    name = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
    reduce_scatter = getattr(dist, name)

    def record(*arguments: Any, **options: Any) -> Any:
        seen.add(options["input"].dtype if "input" in options else arguments[1].dtype)
        return reduce_scatter(*arguments, **options)

    setattr(dist, name, record)
    try:
        yield seen
    finally:
        setattr(dist, name, reduce_scatter)


def flat_weights(actor: Actor) -> torch.Tensor:
    return torch.cat([gathered(weight).detach().flatten() for weight in actor.optimizer.weights])


def adam_updates(actor: Actor, rank: int, ranks: int, count: int) -> None:
    whole = rollouts()
    parts = divide(whole, [token_count(c.steps) for c in whole], [c.rollout.group_id for c in whole], ranks)
    mine = [whole[index] for index in parts[rank]]
    for _ in range(count):
        annotated = actor.annotate([c.annotated.scored for c in mine])
        actor.update([replace(c, annotated=a) for c, a in zip(mine, annotated, strict=True)])


def save_and_go_on(rank: int, ranks: int, folder: Path, shard: bool, offload: bool) -> dict[str, torch.Tensor]:
    """Two updates by AdamW, a checkpoint, and two more; or only the latter, if there is a checkpoint. `offload`: with
    the optimizer's state in CPU memory, in fp32."""
    config = changed(WIDE, optimizer_state="cpu") if offload else WIDE
    critic = Critic(tiny_model().double(), config, shard=shard)
    actor = Actor(tiny_model().double(), config, critic=critic, shard=shard)
    masters = [master for part in (actor, critic) for master in part.optimizer.masters]
    assert not offload or not any(isinstance(master, DTensor) for master in masters)
    state = LearnerState(actor, rank, ranks)
    saved = folder.parent / "saved"
    if (saved / MANIFEST).exists():
        write_whole(actor.model, load_file(saved / "model.safetensors"))
        state.load(saved)
    else:
        adam_updates(actor, rank, ranks, 2)
        state.snapshot()
        weights = {name: gathered(weight) for name, weight in actor.model.named_parameters()}
        facts = state.write(saved)
        distributed.sum_over_ranks([0.0])
        if rank == 0:
            save_file({name: weight.detach() for name, weight in weights.items()}, saved / "model.safetensors")
            write_manifest(saved, ranks, facts)
    adam_updates(actor, rank, ranks, 2)
    return {"weights": flat_weights(actor), "critic": gathered(critic.optimizer.weights[0]).detach().clone()}


def run_rank(rank: int, ranks: int, folder: Path, job: str) -> None:
    PLANTED["factor"] = 1.0 / ranks if job == "planted" else 1.0
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    if job.startswith("save"):
        found = save_and_go_on(rank, ranks, folder, shard="shard" in job, offload="cpu" in job)
    elif job == "updated":
        found = updated_columns(rank, ranks)
    else:
        with reductions() as dtypes:
            found = learn(rank, ranks, job)
        assert dtypes == ({torch.float32 if "16" in job or "32" in job else torch.float64} if "shard" in job else set())
    save_file(found, folder / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


def main() -> None:
    ranks, folder, job = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    rollouts()
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=run_rank, args=(rank, ranks, folder, job)) for rank in range(1, ranks)]
    for other in others:
        other.start()
    run_rank(0, ranks, folder, job)
    for other in others:
        other.join()
    sys.exit(any(other.exitcode for other in others))


if __name__ == "__main__":
    main()
