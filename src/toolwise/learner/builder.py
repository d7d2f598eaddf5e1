"""Builds a run's learner from its configuration and the policy's model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.protocols import AdvantageEstimator, PolicyLoss


def build_learner(
    config: RunConfig,
    model: Any,
    estimator: AdvantageEstimator,
    *,
    load_critic: Callable[[str], Any],
    extra_parameters: Sequence[Any] = (),
    loss: PolicyLoss | None = None,
    shard: bool = False,
    offload: bool = False,
) -> Actor:
    """Return the actor, with a critic and a reference if needed. `load_critic` loads the model at `critic.path`;
    `extra_parameters` are weights outside `model` that the actor's optimiser updates too; `loss` replaces that of
    `actor.policy_loss`; `shard` divides the weights among all processes, and `offload` keeps them in
    CPU memory between their passes."""
    critic = None
    if "values" in estimator.needs:
        path = config.critic.path
        trunk = load_critic(path) if path else copy.deepcopy(model)
        _check_vocabulary(trunk, model, path)
        critic = Critic(trunk, config, per=estimator.per, shard=shard, offload=offload)
    return Actor(
        model,
        config,
        needs=estimator.needs,
        critic=critic,
        extra_parameters=extra_parameters,
        loss=loss,
        shard=shard,
        offload=offload,
    )


def _check_vocabulary(trunk: Any, model: Any, path: str) -> None:
    size, policy_size = (int(m.get_input_embeddings().weight.shape[0]) for m in (trunk, model))
    if size < policy_size:
        raise ConfigError(
            f"critic.path: {path} has a vocabulary of {size} tokens and the policy {policy_size}; use a model with the "
            "same vocabulary"
        )
