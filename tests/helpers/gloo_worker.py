"""Data-parallel processes, run by test_distributed.py as `gloo_worker.py WORLD FOLDER`.

The first one forks the others, so that torch is imported once.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.distributed as dist
from learner_cases import LR, changed, sample, tiny_model
from safetensors.torch import save_file

from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.types import CreditedRollout

WIDE = changed(
    LR,
    {"algorithm": {"kl": "loss", "kl_coef": 0.1}, "critic": {"max_grad_norm": 1e9}},
    max_grad_norm=1e9,
    entropy_coef=0.01,
    loss_length=16,
)
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "token": ({"loss_aggregation": "token"}, None),
    "step": ({"loss_aggregation": "step"}, None),
    "rollout": ({"loss_aggregation": "rollout"}, None),
    "constant": ({"loss_aggregation": "constant"}, None),
    "cut": ({"micro_batch_tokens": 30}, None),
    "alone": ({}, 0),  # one process has all rollouts, the other none
    "many": ({"mini_batches": 3, "mismatch_check": "off"}, None),
}
"""Settings, and who has the rollouts: everybody a share, or one alone."""


@cache
def rollouts() -> list[CreditedRollout]:
    """Rollouts of different lengths, with returns for a critic."""
    found = sample(tiny_model(), [1.0, -0.5, 2.0, -1.5, 0.3], groups_of=2)
    return [
        replace(c, returns=tuple(np.linspace(0, i + 1, len(a), dtype=np.float32) for a in c.advantages))
        for i, c in enumerate(found)
    ]


def learn(case: str, rank: int, world: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    settings, owner = CASES[case]
    whole = rollouts()
    mine = whole[rank::world] if owner is None else whole if rank == owner else []
    critic = Critic(tiny_model(), WIDE)
    actor = Actor(tiny_model(), changed(WIDE, **settings), critic=critic)
    annotated = actor.annotate([c.annotated.scored for c in mine])
    metrics = actor.update([replace(c, annotated=a) for c, a in zip(mine, annotated, strict=True)])
    found = {}
    for name, optimizer in (("actor", actor.optimizer), ("critic", critic.optimizer)):
        # After one step, AdamW's first moment is a tenth of the gradient.
        states = [optimizer.adamw.state[master]["exp_avg"].flatten() for master in optimizer.masters]
        found[f"{name}.gradient"] = 10 * torch.cat(states)
        found[f"{name}.weights"] = torch.cat([master.detach().flatten() for master in optimizer.masters])
    return found, metrics


def learn_all(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    for case in CASES:
        tensors, metrics = learn(case, rank, world)
        save_file(tensors, folder / f"{case}-{rank}.safetensors")
        (folder / f"{case}-{rank}.json").write_text(json.dumps(metrics), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    others = [
        multiprocessing.get_context("fork").Process(target=learn_all, args=(rank, world, folder))
        for rank in range(1, world)
    ]
    for other in others:
        other.start()
    learn_all(0, world, folder)
    for other in others:
        other.join()
    sys.exit(any(other.exitcode for other in others))


if __name__ == "__main__":
    main()
