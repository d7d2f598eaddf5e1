"""Which validation of a run is the best one, and when to stop waiting for a better one."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from toolwise.config.schema import RunConfig
from toolwise.config.trainer import TrainerConfig
from toolwise.training.checkpoint import ranking_key
from toolwise.training.run import Progress

log = logging.getLogger("toolwise.training.trainer")


def compare_with_best(trainer: TrainerConfig, progress: Progress, metrics: Mapping[str, float]) -> None:
    """Compare a validation with the best one before it, if anything depends on that."""
    if not (trainer.keep_best or trainer.early_stopping):
        return
    rank = ranking_key(metrics, trainer.best_metric)
    if rank is None:
        available, name = ", ".join(sorted(metrics)), trainer.best_metric.removeprefix("-")
        log.warning("trainer.best_metric is %r, but the validation reports only: %s", name, available)
    else:
        progress.compare(rank)


def early_stop(config: RunConfig, progress: Progress) -> str:
    """Why `trainer.early_stopping` ends the run now; empty if it does not."""
    trainer, count = config.trainer, progress.without_best
    if trainer.early_stopping is None or count < trainer.early_stopping:
        return ""
    at = " at equal cost" if config.router.enable and config.router.budgets else ""
    last = "the last validation is" if count == 1 else f"the last {count} validations are"
    return f"{last} not better than an earlier one ({trainer.best_metric}{at}); a higher trainer.early_stopping goes on"
