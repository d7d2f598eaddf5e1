"""The demo's configuration: small-world tasks, the shipped model, and a router with a budget; for two CPU cores."""

from __future__ import annotations

from pathlib import Path

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import write_rows

TRAIN_TASKS, HELD_OUT_TASKS = 4000, 240
ROUTABLE_KINDS = ("known", "lookup", "arithmetic")
"""Kinds that one route can solve. Two-step questions need both tool families, so no route fits them."""
BUDGET = 0.5
"""Mean calls per question. Two of three questions need one, so the router cannot spend a call on all of them."""


def demo_config(out: Path, seed: int) -> dict[str, object]:
    """The configuration of a run in `out`, on the tasks that `write_tasks` writes there."""
    return {
        "name": "demo",
        "seed": seed,
        "model": {"path": "builtin:small"},
        "data": {
            "train": str(out / "tasks" / "train.jsonl"),
            "val": str(out / "tasks" / "heldout.jsonl"),
            "batch_size": 24,
        },
        "tools": ["calculator", "search"],
        "rollout": {"n": 9, "max_new_tokens": 48},
        "multi_turn": {"max_turns": 6},
        # The reward is correctness alone: the budget accounts for the cost of calls.
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "kwargs": {"price_per_call": 0.0}},
        "actor": {"lr": 1e-4, "warmup_steps": 3, "mini_batches": 2, "micro_batch_tokens": 4096},
        "router": {
            "enable": True,
            "cost": "calls",
            "wording": "silent",
            "hidden": 64,
            "lr": 3e-3,
            "lr_schedule": "cosine",
            "min_lr_ratio": 0.1,
            "epochs": 4,
            "entropy_coef": 0.2,
            "entropy_final": 0.05,
            "budgets": [{"limit": BUDGET, "rate": 0.3, "proportional": 0.5}],
        },
        "validation": {"every": 5},
        "trainer": {"total_steps": 70, "save_every": 5},
    }


def write_tasks(config: RunConfig) -> None:
    """Write the task files that the configuration names, generated from its seed."""
    assert config.data.train is not None
    assert config.data.val is not None
    write_rows(config.data.train, TRAIN_TASKS, seed=config.seed, split="train", kinds=ROUTABLE_KINDS)
    write_rows(config.data.val, HELD_OUT_TASKS, seed=config.seed, split="heldout", kinds=ROUTABLE_KINDS)
