"""Creates a run's estimator and policy loss: built-in ones by name, those of a user by reference, class or object. Also
the thinking stage: the model that writes and scores thoughts, and the budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, get_args

from toolwise.advantages import MonitoredEstimator, Rlvcr, build_estimator
from toolwise.config.components import create, is_factory
from toolwise.config.correction import CorrectionName
from toolwise.config.imports import did_you_mean, load_reference
from toolwise.config.loader import build_config
from toolwise.config.router import BudgetConfig, RouterConfig
from toolwise.config.schema import ActorConfig, RunConfig
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, Annotation, ModelPolicy, PolicyLoss, PrefixEngine, Router, Sampling
from toolwise.routing.budget import FollowedMultiplier, Multiplier
from toolwise.routing.cost import PricesCost, build_cost
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.meters import THINKING_METER
from toolwise.thinking.alternatives import AlternativeWriter
from toolwise.thinking.levels import DEFAULT_LEVELS, END_THINK, load_levels
from toolwise.thinking.stage import ThinkingStage
from toolwise.thinking.thinking_model import EngineModel, PolicyWithScorer, ThinkingModel
from toolwise.training.trackers.observers import qualified_name
from toolwise.types import RewardSettings
from toolwise.untrusted.user_code import describe_at

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
    check = partial(_check_estimator, config)
    estimator: AdvantageEstimator = _load(source, algorithm.estimator_kwargs, _ESTIMATOR, AdvantageEstimator, check)
    return estimator


def load_loss(config: RunConfig, given: LossSpec | None = None) -> PolicyLoss | None:
    """The policy loss of a user, or a built-in one `given` by name; None for the one that the configuration names."""
    source, built_in = config.actor.policy_loss if given is None else given, ("ppo", *get_args(CorrectionName))
    if isinstance(source, str) and source in built_in:
        if config.actor.policy_loss_kwargs:
            raise ConfigError(
                f"actor.policy_loss_kwargs are for a loss of your own; {source} has actor.clip_ratio_low, … and "
                "[actor.correction]"
            )
        return None if source == config.actor.policy_loss else _built_in_loss(config.actor, source)
    if isinstance(source, str) and ":" not in source:
        raise ConfigError(
            f"{_LOSS} is {source!r}; use {', '.join(built_in)} or package.module:Name{did_you_mean(source, built_in)}"
        )
    loss: PolicyLoss = _load(source, config.actor.policy_loss_kwargs, _LOSS, PolicyLoss, _check_loss)
    return loss


def _built_in_loss(actor: ActorConfig, name: str) -> PolicyLoss:
    from toolwise.learner.corrections import build_loss

    return build_loss(actor, name)


def _name(source: Any) -> str:
    return source if isinstance(source, str) else qualified_name(source)


def _load(source: Any, kwargs: Mapping[str, Any], key: str, base: type, check: Callable[[Any, str], None]) -> Any:
    """The object itself, or one that the class or function creates with `kwargs`."""
    target, where = load_reference(source, what=key) if isinstance(source, str) else source, f"{key}: {_name(source)}"
    target = create(target, kwargs if isinstance(source, str) or is_factory(target) else {}, where)
    try:
        missing = [name for name in vars(base) if not name.startswith("_") and not hasattr(target, name)]
        missing += [] if callable(target) else ["__call__"]
        if missing:
            raise ConfigError(f"{where} has no {', '.join(missing)}; subclass toolwise.{base.__name__}")
        check(target, where)
    except ConfigError:
        raise
    except Exception as fault:  # in a property
        raise ConfigError(f"{where} failed: {describe_at(fault)}") from fault
    return target


def _check_loss(loss: PolicyLoss, where: str) -> None:
    names = loss.metric_names
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: metric_names is {names!r:.80}; use a tuple of names")
    if taken := _TAKEN_NAMES.intersection(names):
        raise ConfigError(f"{where}: every loss has a metric {min(taken)}; rename yours")


def _check_estimator(config: RunConfig, estimator: AdvantageEstimator, where: str) -> None:
    needs, rewards, size, known = estimator.needs, estimator.rewards, estimator.min_group_size, get_args(Annotation)
    for name, valid, hint in (
        ("needs", isinstance(needs, frozenset) and needs <= set(known), f"a frozenset of {', '.join(known)}"),
        ("rewards", rewards is None or isinstance(rewards, RewardSettings), "a toolwise.RewardSettings or None"),
        ("min_group_size", isinstance(size, int) and size >= 1, "1 or more"),
        ("per", estimator.per in ("token", "turn"), '"token" or "turn"'),
    ):
        if not valid:
            raise ConfigError(f"{where}: {name} is {getattr(estimator, name)!r:.80}; use {hint}")
    algorithm = config.algorithm
    for name in (field.name for field in fields(RewardSettings)):
        if getattr(algorithm, name) not in (getattr(RewardSettings(), name), getattr(rewards, name, None)):
            raise ConfigError(
                f"algorithm.{name} applies to the built-in estimators: leave it out, and set {name} in the `rewards` "
                f"of {where.partition(': ')[2]}"
            )
    charged = ['algorithm.kl = "reward"'] if algorithm.kl == "reward" else []
    if algorithm.rlvcr.enable and algorithm.rlvcr.subtract_thinking_cost:
        charged.append("algorithm.rlvcr.subtract_thinking_cost")
    if rewards is None and charged:
        raise ConfigError(
            f"{charged[0]} would have no effect: {where} declares no `rewards`; compute rewards with "
            "toolwise.advantages.total_rewards and set rewards = RewardSettings()"
        )


def build_thinking_stage(config: RunConfig, policy: ModelPolicy, router: Router | None = None) -> ThinkingStage | None:
    """None if `algorithm.rlvcr.enable` is false. `router` is the run's, whose λ the price of thinking may follow."""
    rlvcr = config.algorithm.rlvcr
    if not rlvcr.enable:
        return None
    sampling = Sampling(
        temperature=config.rollout.temperature,
        max_new_tokens=rlvcr.max_thought_tokens,
        do_sample=config.rollout.do_sample,
        seed=config.seed,
    )
    levels = DEFAULT_LEVELS if rlvcr.levels is None else load_levels(rlvcr.levels)
    multiplier: Multiplier | FollowedMultiplier | None = None
    if rlvcr.budget.unit and isinstance(router, InferenceRouter):
        price = thinking_price(config.router, rlvcr.budget.unit)
        multiplier = FollowedMultiplier(router.budgets, rlvcr.budget.unit, price)
    if (budget := rlvcr.budget).limit is not None:
        settings = {**budget.model_dump(exclude={"price"}), "unit": "tokens", "initial": budget.price}
        multiplier = Multiplier(build_config(BudgetConfig, settings, source="algorithm.rlvcr.budget"))
    return ThinkingStage(
        AlternativeWriter(thinking_model(policy, config.actor), policy.chat, levels, sampling),
        rlvcr,
        multiplier,
        total_steps=config.trainer.total_steps,
        seed=config.seed,
    )


def thinking_model(policy: ModelPolicy, actor: ActorConfig) -> ThinkingModel:
    """The policy's engine if it can both generate and score; else the policy with a scoring pass of the learner."""
    if isinstance(policy.engine, PrefixEngine):
        return EngineModel(policy.engine, stop_strings=(END_THINK,))
    from toolwise.learner.continuation_scores import ContinuationScorer

    return PolicyWithScorer(policy, ContinuationScorer(policy.model, actor))


def with_rlvcr(config: RunConfig, trajectory: AdvantageEstimator) -> AdvantageEstimator:
    """Add the thinking advantage to another estimator's, or only its metrics, as configured."""
    rlvcr = config.algorithm.rlvcr
    if config.algorithm.adv_estimator != "rlvcr" and not rlvcr.enable:
        return trajectory
    return build_estimator(
        Rlvcr if config.algorithm.adv_estimator == "rlvcr" else MonitoredEstimator,
        **rlvcr.model_dump(),
        trajectory=trajectory,
        seed=config.seed,
        importance_cap=config.actor.importance_cap,
        compare_equal_scores=rlvcr.steps != "mixed" and rlvcr.share > 0.0,
    )


def thinking_price(router: RouterConfig, unit: str) -> float:
    """The price of a thinking token in a unit of the router's price list; raises if it has none."""
    where = f"algorithm.rlvcr.budget.unit is {unit!r}"
    if not router.enable or unit not in {budget.unit for budget in router.budgets}:
        raise ConfigError(f"{where}, but the router has no budget in it: add one to router.budgets, or set limit")
    cost = build_cost(router, {})
    if not isinstance(cost, PricesCost) or not (price := cost.unit_price(unit, THINKING_METER)):
        raise ConfigError(f"{where}, in which thinking costs nothing: set router.prices.{unit}.{THINKING_METER}")
    return price


def check_thinking(config: RunConfig) -> None:
    """Raise if thinking settings contradict each other."""
    algorithm = config.algorithm
    if algorithm.rlvcr.enable and algorithm.rlvcr.budget.unit:
        thinking_price(config.router, algorithm.rlvcr.budget.unit)
    if algorithm.adv_estimator != "rlvcr":
        return
    if not algorithm.rlvcr.enable:
        raise ConfigError(
            "algorithm.adv_estimator is rlvcr but algorithm.rlvcr.enable is false: no alternatives would be written; "
            f"set enable = true, or adv_estimator = {algorithm.rlvcr.base!r}"
        )
    if algorithm.rlvcr.combine == "reweight" and algorithm.kl == "reward":
        raise ConfigError(
            "algorithm.rlvcr.combine is reweight, whose added rows have no reward to subtract a KL from: use "
            'kl = "loss", or combine = "additive"'
        )
