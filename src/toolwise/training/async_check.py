"""Refuses settings that asynchronous training cannot do, before any work is done."""

from __future__ import annotations

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError

MODE = 'trainer.mode = "async"'


def check_async(config: RunConfig) -> None:
    """Raise with one line for the first setting that does not go with `trainer.mode = "async"`."""
    if config.trainer.mode != "async":
        return
    actor, staleness = config.actor, config.trainer.max_staleness
    for refused, problem in (
        (config.rollout.engine == "transformers", 'rollout.engine = "transformers": use "toolwise" or "vllm"'),
        (
            config.rollout.engine == "vllm" and config.trainer.keep_cache,
            'trainer.keep_cache and rollout.engine = "vllm", which computes prompts again: set keep_cache to false',
        ),
        (
            bool(staleness and not actor.one_step and not config.trainer.several_stale_updates),
            f"{actor.ppo_epochs * actor.mini_batches} optimizer steps on a batch that may be stale, which compounds: "
            "set actor.ppo_epochs and actor.mini_batches to 1, or trainer.several_stale_updates = true",
        ),
    ):
        if refused:
            raise ConfigError(f"{MODE} does not go with {problem}")
