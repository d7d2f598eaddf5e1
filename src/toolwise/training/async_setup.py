"""Builds what asynchronous training needs beside a run's other parts: a copy of the weights for the learner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from toolwise.config.schema import RunConfig
from toolwise.engine import Engine
from toolwise.errors import ConfigError
from toolwise.learner import distributed
from toolwise.protocols import ModelPolicy, ReloadingEngine
from toolwise.training.async_check import MODE, check_async
from toolwise.training.weight_copies import WeightCopies

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

log = logging.getLogger("toolwise.training")


def copy_weights(config: RunConfig, policy: ModelPolicy) -> WeightCopies | None:
    """The two copies of the weights; None in synchronous training, which needs one. Raises if the engine or the machine
    cannot do it."""
    if config.trainer.mode != "async":
        return None
    check_async(config)
    for refused, problem in (
        (
            not isinstance(policy.engine, Engine | ReloadingEngine),
            f"{type(policy.model).__name__}, which the engine cannot run: use a model that it supports",
        ),
        (distributed.is_distributed(), "several processes: start one"),
    ):
        if refused:
            raise ConfigError(f"{MODE} does not go with {problem}")
    copies = WeightCopies.of(cast("LocalPolicy", policy), keep_cache=config.trainer.keep_cache)
    log.info("the learner has its own copy of the weights: %.0f MB more memory", copies.bytes / 2**20)
    return copies
