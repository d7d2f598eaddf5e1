"""Advantage estimators, one file each; an estimator's config class is the estimator.

To add one, write its file, a test and a line in `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from toolwise.advantages.anchors import StateAnchor, last_messages, last_observation
from toolwise.advantages.assign import credit, learns_from_equal_scores, min_group_size
from toolwise.advantages.gae import Gae, compute_gae_advantage_return
from toolwise.advantages.gigpo import (
    Gigpo,
    SingletonAnchorsWarning,
    apply_gigpo_to_batch_steps,
    system_apply_gigpo_to_batch_steps,
)
from toolwise.advantages.grpo import Grpo, Rloo, compute_grpo_outcome_advantage
from toolwise.advantages.hgpo import Hgpo
from toolwise.advantages.reinforce import ReinforcePlusPlus, compute_reinforce_plus_plus_outcome_advantage
from toolwise.advantages.rlvcr import MonitoredEstimator, Rlvcr
from toolwise.advantages.rlvcr_tensors import compute_rlvcr_outcome_advantage
from toolwise.errors import ConfigError

if TYPE_CHECKING:
    from toolwise.protocols import AdvantageEstimator

ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "gigpo": Gigpo,
    "hgpo": Hgpo,
    "gae": Gae,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "rlvcr": Rlvcr,
}


def build_estimator(name: str, **settings: Any) -> AdvantageEstimator:
    """Builds an estimator from the `settings` that it has a field for; None keeps the field's default.

    `kl_coef` is never passed: the learner sets it when the KL penalty is part of the reward.
    """
    if name not in ESTIMATORS:
        raise ConfigError(f"algorithm.adv_estimator is {name!r}; choose one of {', '.join(ESTIMATORS)}")
    estimator_class: Any = ESTIMATORS[name]
    known = {field.name for field in fields(estimator_class)} - {"kl_coef"}
    return ESTIMATORS[name](**{key: value for key, value in settings.items() if key in known and value is not None})


__all__ = [
    "ESTIMATORS",
    "Gae",
    "Gigpo",
    "Grpo",
    "Hgpo",
    "MonitoredEstimator",
    "ReinforcePlusPlus",
    "Rloo",
    "Rlvcr",
    "SingletonAnchorsWarning",
    "StateAnchor",
    "apply_gigpo_to_batch_steps",
    "build_estimator",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_rlvcr_outcome_advantage",
    "credit",
    "last_messages",
    "last_observation",
    "learns_from_equal_scores",
    "min_group_size",
    "system_apply_gigpo_to_batch_steps",
]
