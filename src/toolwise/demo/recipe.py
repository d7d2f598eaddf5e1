"""The demo's recipe: tasks from the small world, the model that ships, and settings for two CPU cores."""

from __future__ import annotations

from pathlib import Path

from toolwise.config import RunConfig
from toolwise.demo.tasks import write_rows

TRAIN_TASKS, HELD_OUT_TASKS = 2000, 240


def demo_settings(out: Path, seed: int) -> dict[str, object]:
    """Writes the tasks into the run's folder and gives the configuration that trains on them."""
    return {
        "name": "demo",
        "seed": seed,
        "model": {"path": "builtin:small"},
        "data": {
            "train": str(out / "tasks" / "train.jsonl"),
            "val": str(out / "tasks" / "heldout.jsonl"),
            "batch_size": 16,
        },
        "tools": ["calculator", "search"],
        "rollout": {"n": 8, "max_new_tokens": 48},
        "multi_turn": {"max_turns": 6},
        "reward": {"function": "toolwise.demo.reward:small_world_reward"},
        "actor": {"lr": 3e-4, "warmup_steps": 3, "entropy_coef": 0.003, "mini_batches": 2},
        "validation": {"every": 10},
        "trainer": {"total_steps": 50, "save_every": 10},
    }


def write_tasks(config: RunConfig) -> None:
    assert config.data.train is not None
    assert config.data.val is not None
    write_rows(config.data.train, TRAIN_TASKS, seed=config.seed, split="train")
    write_rows(config.data.val, HELD_OUT_TASKS, seed=config.seed, split="heldout")
