"""Builds a run's learner from its configuration and the policy's model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.actor import Actor
from toolwise.learner.actor_settings import ActorSettings
from toolwise.learner.critic import Critic, CriticSettings
from toolwise.learner.forward import can_share_prefixes
from toolwise.learner.lora import LoraSettings
from toolwise.protocols import AdvantageEstimator, PolicyLoss


def build_learner(
    config: RunConfig,
    model: Any,
    estimator: AdvantageEstimator,
    *,
    load_critic: Callable[[str], Any],
    extra_parameters: Sequence[Any] = (),
    loss: PolicyLoss | None = None,
) -> Actor:
    """Return the actor, with a critic and a reference if needed. `load_critic` loads the model at `critic.path`;
    `extra_parameters` are weights outside `model` that the actor's optimiser updates too; `loss` replaces PPO's."""
    critic = None
    if "values" in estimator.needs:
        path = config.critic.path
        trunk = load_critic(path) if path else copy.deepcopy(model)
        _check_vocabulary(trunk, model, path)
        critic = Critic(trunk, critic_settings(config, per=estimator.per))
    settings = actor_settings(config)
    # A model that our attention does not support runs on padded rows, where shared prefixes would exceed the budget.
    settings = replace(settings, share_prefixes=settings.share_prefixes and can_share_prefixes(model))
    return Actor(
        model,
        settings,
        needs=estimator.needs,
        critic=critic,
        extra_parameters=extra_parameters,
        loss=loss,
    )


def actor_settings(config: RunConfig) -> ActorSettings:
    actor, algorithm = config.actor, config.algorithm
    lora = actor.lora
    return ActorSettings(
        lr=actor.lr,
        lr_schedule=actor.lr_schedule,
        warmup_steps=actor.warmup_steps,
        schedule_steps=actor.schedule_steps or config.trainer.total_steps,
        min_lr_ratio=actor.min_lr_ratio,
        weight_decay=actor.weight_decay,
        max_grad_norm=actor.max_grad_norm,
        spike_factor=actor.spike_factor or None,
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        dual_clip=actor.dual_clip or None,
        entropy_coef=actor.entropy_coef,
        ppo_epochs=actor.ppo_epochs,
        mini_batches=actor.mini_batches,
        loss_aggregation=actor.loss_aggregation,
        loss_length=actor.loss_length,
        old_logprobs=actor.old_logprobs,
        importance_cap=actor.importance_cap,
        kl=algorithm.kl,
        kl_estimator=algorithm.kl_estimator,
        kl_coef=algorithm.kl_coef,
        kl_target=algorithm.kl_target,
        kl_horizon=algorithm.kl_horizon,
        micro_batch_tokens=actor.micro_batch_tokens,
        share_prefixes=actor.share_prefixes,
        logit_chunk_tokens=actor.logit_chunk_tokens,
        activation_checkpointing=actor.activation_checkpointing,
        canary=actor.canary,
        lora=LoraSettings(lora.rank, lora.alpha, tuple(lora.target_modules), config.seed) if lora.rank else None,
        temperature=config.rollout.temperature,
        seed=config.seed,
    )


def critic_settings(config: RunConfig, *, per: Any = "token") -> CriticSettings:
    critic = config.critic
    return CriticSettings(
        lr=critic.lr,
        lr_schedule=critic.lr_schedule,
        warmup_steps=critic.warmup_steps,
        schedule_steps=config.trainer.total_steps,
        weight_decay=critic.weight_decay,
        max_grad_norm=critic.max_grad_norm,
        spike_factor=config.actor.spike_factor or None,
        value_clip=critic.value_clip or None,
        epochs=critic.epochs,
        mini_batches=critic.mini_batches,
        per=per,
        micro_batch=actor_settings(config).micro_batch,
        seed=config.seed,
    )


def _check_vocabulary(trunk: Any, model: Any, path: str) -> None:
    size, policy_size = (int(m.get_input_embeddings().weight.shape[0]) for m in (trunk, model))
    if size < policy_size:
        raise ConfigError(
            f"critic.path: {path} has a vocabulary of {size} tokens and the policy {policy_size}; use a model with the "
            "same vocabulary"
        )
