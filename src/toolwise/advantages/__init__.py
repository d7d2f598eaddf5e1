"""Advantage estimators, one file each; an estimator's config class is the estimator.

To add one, write its file, a test and a line in `ESTIMATORS`. One of your own needs none of that: docs/algorithms.md.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from toolwise.advantages.anchors import StateAnchor, last_messages, last_observation
from toolwise.advantages.assign import credit, credit_rollout, credit_steps, credit_tokens
from toolwise.advantages.gae import Gae, compute_gae_advantage_return
from toolwise.advantages.gigpo import (
    Gigpo,
    SingletonAnchorsWarning,
    apply_gigpo_to_batch_steps,
    system_apply_gigpo_to_batch_steps,
)
from toolwise.advantages.grpo import Grpo, Rloo, compute_grpo_outcome_advantage
from toolwise.advantages.hdpo import Hdpo
from toolwise.advantages.hgpo import Hgpo
from toolwise.advantages.pareto import Pareto
from toolwise.advantages.reinforce import ReinforcePlusPlus, compute_reinforce_plus_plus_outcome_advantage
from toolwise.advantages.rlvcr import MonitoredEstimator, Rlvcr
from toolwise.advantages.rlvcr_tensors import compute_rlvcr_outcome_advantage
from toolwise.advantages.step_rewards import cost_metrics, episodes_from_rollouts, token_rewards_of, total_rewards
from toolwise.config.imports import did_you_mean
from toolwise.errors import ConfigError

if TYPE_CHECKING:
    from toolwise.protocols import AdvantageEstimator

ESTIMATORS: dict[str, type[AdvantageEstimator]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "gigpo": Gigpo,
    "hgpo": Hgpo,
    "gae": Gae,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "rlvcr": Rlvcr,
    "hdpo": Hdpo,
    "pareto": Pareto,
}
COMPARE_COSTS = frozenset({"hdpo", "pareto"})
"""Those that also compare what rollouts cost, and so learn from equal rewards."""


def build_estimator(kind: str | type[AdvantageEstimator], **settings: Any) -> AdvantageEstimator:
    """Builds a built-in estimator from the `settings` that it has a field for; None keeps the field's default."""
    if isinstance(kind, str) and kind not in ESTIMATORS:
        known = f"choose one of {', '.join(ESTIMATORS)}, or package.module:Name"
        raise ConfigError(f"algorithm.adv_estimator is {kind!r}; {known}{did_you_mean(kind, ESTIMATORS)}")
    estimator_class: Any = ESTIMATORS[kind] if isinstance(kind, str) else kind
    options = {field.name: settings.get(field.name) for field in fields(estimator_class)}
    estimator: AdvantageEstimator = estimator_class(**{name: v for name, v in options.items() if v is not None})
    return estimator


__all__ = [
    "COMPARE_COSTS",
    "ESTIMATORS",
    "Gae",
    "Gigpo",
    "Grpo",
    "Hdpo",
    "Hgpo",
    "MonitoredEstimator",
    "Pareto",
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
    "cost_metrics",
    "credit",
    "credit_rollout",
    "credit_steps",
    "credit_tokens",
    "episodes_from_rollouts",
    "last_messages",
    "last_observation",
    "system_apply_gigpo_to_batch_steps",
    "token_rewards_of",
    "total_rewards",
]
