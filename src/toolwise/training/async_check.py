"""Refuses settings that asynchronous training cannot do, before any work is done."""

from __future__ import annotations

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError

MODE = 'trainer.mode = "async"'


def check_async(config: RunConfig) -> None:
    """Raise with one line for the first setting that does not go with `trainer.mode = "async"`."""
    if config.trainer.mode != "async":
        return
    actor, router, staleness = config.actor, config.router, config.trainer.max_staleness
    for refused, problem in (
        (config.rollout.engine != "toolwise", f'rollout.engine = "{config.rollout.engine}": use "toolwise"'),
        (not config.data.drop_last, "data.drop_last = false: its batches must all have data.batch_size tasks"),
        (not router.train_actor, "router.train_actor = false: there are no weights to publish"),
        (
            router.enable and (router.backbone != "frozen" or router.optimizer == "actor"),
            'a router that shares the actor\'s weights or optimizer: set router.backbone = "frozen" and '
            'router.optimizer = "own"',
        ),
        (
            bool(router.enable and router.budgets and not router.budget_window and staleness),
            "router.budgets without router.budget_window, which says what the current policy spends: set it, for "
            "example to 256",
        ),
        (
            bool(staleness and not actor.one_step and not config.trainer.several_stale_updates),
            f"{actor.ppo_epochs * actor.mini_batches} optimizer steps on a batch that may be stale, which compounds: "
            "set actor.ppo_epochs and actor.mini_batches to 1, or trainer.several_stale_updates = true",
        ),
    ):
        if refused:
            raise ConfigError(f"{MODE} does not go with {problem}")
