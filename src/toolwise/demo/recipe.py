"""The demo's configuration: small-world tasks, the shipped model, and a router with a budget; for two CPU cores.

Its last part is a quick cost-score frontier of the router, from few tasks and samples.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toolwise.agent.inference import store_calibration
from toolwise.agent.loader import load_router
from toolwise.agent.sources import find_router
from toolwise.config.schema import RunConfig
from toolwise.data import open_tasks
from toolwise.demo.tasks import write_rows
from toolwise.errors import ConfigError
from toolwise.frontier.evaluation import FrontierEvaluation, evaluate_frontier

TRAIN_TASKS, HELD_OUT_TASKS = 5000, 240
CALIBRATION_SHARE = 0.6
"""3,000 tasks. The demo learns from 24 tasks in each of 70 steps: 1,680 of the other 2,000."""
BUDGETS = tuple(tenths / 10 for tenths in range(9))
CLASSIFIER_TASKS = 600
"""Training tasks that the baseline routers are fitted to and tuned on."""
TUNING_TASKS = 96
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
        # Every rollout of a question that a route without tools cannot answer scores 0: without a price, nothing keeps
        # the actor from calling tools there that it learned to use on other routes. Malformed calls count as spent.
        "algorithm": {"invalid_action_penalty": 0.1},
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
            "calibration": CALIBRATION_SHARE,
            "calibration_rollouts": 384,
        },
        "validation": {"every": 20},
        "trainer": {"total_steps": 70, "save_every": 5},
    }


def write_tasks(config: RunConfig) -> None:
    """Write the task files that the configuration names, generated from its seed."""
    assert isinstance(config.data.train, Path)
    assert isinstance(config.data.val, Path)
    write_rows(config.data.train, TRAIN_TASKS, seed=config.seed, split="train", kinds=ROUTABLE_KINDS)
    write_rows(config.data.val, HELD_OUT_TASKS, seed=config.seed, split="heldout", kinds=ROUTABLE_KINDS)


async def evaluate_small_frontier(
    out: Path,
    *,
    tasks: int = 120,
    draws: int = 4,
    replicates: int = 300,
    on_done: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> FrontierEvaluation:
    """Evaluate the last checkpoint in `out`; write frontier.json and frontier.png there, thresholds to the checkpoint.

    After an interruption, a second call reuses the finished rollouts. `toolwise eval RUN --budgets …` makes a full one.
    """
    config, model = find_router(out)
    if config.data.val is None or config.data.train is None:
        raise ConfigError(f"{out}/config.toml has no data.train or no data.val; a frontier needs both")
    frontier = await evaluate_frontier(
        load_router(out, config=config),
        open_tasks(config.data.val, limit=min(tasks, config.data.val_limit or tasks)),
        BUDGETS,
        # Not the folder that `toolwise eval` uses for the same checkpoint: it makes more samples.
        out / "frontier" / f"{model.parent.name}-small",
        train_tasks=open_tasks(config.data.train, limit=CLASSIFIER_TASKS),
        tuning_rows=TUNING_TASKS,
        draws=draws,
        replicates=replicates,
        seed=config.seed,
        source=out,
        on_done=on_done,
    )
    frontier.write(out, config.name)
    store_calibration(model, frontier.calibration)
    return frontier
