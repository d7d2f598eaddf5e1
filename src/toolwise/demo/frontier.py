"""The last part of the demo: a quick cost-score frontier of its router, from few tasks and samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from toolwise.agent.calibration import store_calibration
from toolwise.agent.loader import find_router, load_router
from toolwise.data import load_tasks
from toolwise.errors import ConfigError
from toolwise.frontier.evaluation import FrontierEvaluation, evaluate_frontier

BUDGETS = tuple(tenths / 10 for tenths in range(9))
CLASSIFIER_TASKS = 600
"""Training tasks that the baseline classifiers are fitted to."""


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
        load_tasks(config.data.val, limit=min(tasks, config.data.val_limit or tasks)),
        BUDGETS,
        # Not the folder that `toolwise eval` uses for the same checkpoint: it makes more samples.
        out / "frontier" / f"{model.parent.name}-small",
        train_tasks=load_tasks(config.data.train, limit=CLASSIFIER_TASKS),
        draws=draws,
        replicates=replicates,
        seed=config.seed,
        on_done=on_done,
    )
    frontier.write(out, config.name)
    store_calibration(model, frontier.calibration)
    return frontier
