"""The demo's recipe: tasks from the small world, the model that ships, a router with a budget; for two CPU cores."""

from __future__ import annotations

from pathlib import Path

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import write_rows

TRAIN_TASKS, HELD_OUT_TASKS = 4000, 240
ROUTABLE_KINDS = ("known", "lookup", "arithmetic")
"""What one route can settle. Two-step questions need both families in turn, and so have no route."""
BUDGET = 0.5
"""Calls a question, on average. Two of three questions need one, so the router has to choose whom to disappoint."""


def demo_config(out: Path, seed: int) -> dict[str, object]:
    """The configuration of a run in `out`, on tasks that `write_tasks` puts there."""
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
        # Right or wrong is all that the reward says: what calls cost is the budget's business.
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
    """The tasks that the configuration names, drawn by its seed."""
    assert config.data.train is not None
    assert config.data.val is not None
    write_rows(config.data.train, TRAIN_TASKS, seed=config.seed, split="train", kinds=ROUTABLE_KINDS)
    write_rows(config.data.val, HELD_OUT_TASKS, seed=config.seed, split="heldout", kinds=ROUTABLE_KINDS)
