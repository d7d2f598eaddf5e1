"""The demo's recipe: tasks from the small world, the model that ships, and settings for two CPU cores."""

from __future__ import annotations

from pathlib import Path

from toolwise.config import RunConfig
from toolwise.demo.tasks import write_rows

TRAIN_TASKS, HELD_OUT_TASKS = 2000, 240


def demo_settings(out: Path, seed: int) -> dict[str, object]:
    """The configuration of a run in `out`, on tasks that `write_tasks` puts there."""
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
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "kwargs": {"price_per_call": 0.1}},
        "actor": {"lr": 1e-4, "warmup_steps": 3, "mini_batches": 2, "micro_batch_tokens": 4096},
        "validation": {"every": 4},
        "trainer": {"total_steps": 40, "save_every": 5},
    }


def write_tasks(config: RunConfig) -> None:
    """The tasks that the configuration names, drawn by its seed."""
    assert config.data.train is not None
    assert config.data.val is not None
    write_rows(config.data.train, TRAIN_TASKS, seed=config.seed, split="train")
    write_rows(config.data.val, HELD_OUT_TASKS, seed=config.seed, split="heldout")
