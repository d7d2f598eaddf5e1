"""Creates a run's estimator and policy loss: built-in ones by name, those of a user by reference, class or object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args

from toolwise.advantages import build_estimator
from toolwise.config.components import create, is_factory
from toolwise.config.imports import did_you_mean, load_reference
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, Annotation, PolicyLoss
from toolwise.training.trackers.observers import qualified_name
from toolwise.types import RewardSettings

EstimatorSpec = str | AdvantageEstimator | type[AdvantageEstimator]
LossSpec = str | PolicyLoss | type[PolicyLoss]
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", "actor.policy_loss"
_TAKEN_NAMES = frozenset({"loss", "entropy", "kl", "importance_weight", "computed_tokens"})


def load_estimator(config: RunConfig, given: EstimatorSpec | None = None) -> AdvantageEstimator:
    """The estimator named by the configuration, or the one `given` in Python. For "rlvcr", its base."""
    algorithm = config.algorithm
    source = algorithm.adv_estimator if given is None else given
    if isinstance(source, str) and ":" not in source:
        if algorithm.estimator_kwargs:
            raise ConfigError(
                f"algorithm.estimator_kwargs are for an estimator of your own; {source} has settings in [algorithm]"
            )
        settings = {**algorithm.model_dump(), "norm_by_std": algorithm.norm_adv_by_std, "per": algorithm.gae_per}
        return build_estimator(algorithm.rlvcr.base if source == "rlvcr" else source, **settings)
    estimator: AdvantageEstimator = _load(source, algorithm.estimator_kwargs, _ESTIMATOR, AdvantageEstimator)
    _check_estimator(config, estimator, f"{_ESTIMATOR}: {_name(source)}")
    return estimator


def load_loss(config: RunConfig, given: LossSpec | None = None) -> PolicyLoss | None:
    """The policy loss of a user; None for the built-in one."""
    source = config.actor.policy_loss if given is None else given
    if source == "ppo":
        if config.actor.policy_loss_kwargs:
            raise ConfigError("actor.policy_loss_kwargs are for a loss of your own; ppo has actor.clip_ratio_low, …")
        return None
    if isinstance(source, str) and ":" not in source:
        raise ConfigError(f"{_LOSS} is {source!r}; use ppo or package.module:Name{did_you_mean(source, ['ppo'])}")
    loss: PolicyLoss = _load(source, config.actor.policy_loss_kwargs, _LOSS, PolicyLoss)
    names = loss.metric_names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{_LOSS}: {_name(source)}: metric_names is {names!r:.80}; use a tuple of names")
    if taken := _TAKEN_NAMES.intersection(names):
        raise ConfigError(f"{_LOSS}: {_name(source)}: every loss has a metric {min(taken)}; rename yours")
    return loss


def _name(source: Any) -> str:
    return source if isinstance(source, str) else qualified_name(source)


def _load(source: Any, kwargs: Mapping[str, Any], key: str, base: type) -> Any:
    """The object itself, or one that the class or function creates with `kwargs`."""
    target, where = load_reference(source, what=key) if isinstance(source, str) else source, f"{key}: {_name(source)}"
    target = create(target, kwargs if isinstance(source, str) or is_factory(target) else {}, where)
    missing = [name for name in vars(base) if not name.startswith("_") and not hasattr(target, name)]
    missing += [] if callable(target) else ["__call__"]
    if missing:
        raise ConfigError(f"{where} has no {', '.join(missing)}; subclass toolwise.{base.__name__}")
    return target


def _check_estimator(config: RunConfig, estimator: AdvantageEstimator, where: str) -> None:
    rewards, size, known = estimator.rewards, estimator.min_group_size, get_args(Annotation)
    if not isinstance(estimator.needs, frozenset) or not estimator.needs <= set(known):
        raise ConfigError(f"{where}: needs is {estimator.needs!r:.80}; use a frozenset of {', '.join(known)}")
    if rewards is not None and not isinstance(rewards, RewardSettings):
        raise ConfigError(f"{where}: rewards is {rewards!r:.80}; use a toolwise.RewardSettings or None")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{where}: min_group_size is {size!r:.80}; use 1 or more")
    if estimator.per not in ("token", "turn"):
        raise ConfigError(f'{where}: per is {estimator.per!r:.80}; use "token" or "turn"')
    algorithm = config.algorithm
    for name in (field.name for field in fields(RewardSettings)):
        configured = getattr(algorithm, name)
        if configured not in (getattr(RewardSettings(), name), getattr(rewards, name, None)):
            raise ConfigError(
                f"algorithm.{name} applies to the built-in estimators: leave it out, and set {name} in the `rewards` "
                f"of {where.partition(': ')[2]}"
            )
    costs = {
        'algorithm.kl = "reward"': algorithm.kl == "reward",
        "algorithm.rlvcr.subtract_thinking_cost": algorithm.rlvcr.enable and algorithm.rlvcr.subtract_thinking_cost,
    }
    charged = [setting for setting, is_set in costs.items() if is_set]
    if rewards is None and charged:
        raise ConfigError(
            f"{charged[0]} would have no effect: {where} declares no `rewards`; compute rewards with "
            "toolwise.advantages.total_rewards and set rewards = RewardSettings()"
        )
