"""Building a learner from a configuration: every setting arrives, and nothing unneeded is built."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from learner_cases import tiny_model

from toolwise.advantages import Gae, Grpo
from toolwise.config.schema import ActorConfig, RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.actor_settings import ActorSettings
from toolwise.learner.batch import MicroBatchSettings
from toolwise.learner.builder import actor_settings, build_learner, critic_settings
from toolwise.learner.critic import CriticSettings
from toolwise.learner.lora import LoraSettings
from toolwise.learner.losses import PpoClip


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def build(given: RunConfig, estimator: Any, model: Any = None) -> Any:
    return build_learner(given, model or tiny_model(), estimator, load_critic=lambda path: tiny_model(vocab_size=9))


def test_every_setting_of_the_actor_comes_from_the_configuration() -> None:
    given = config(
        seed=3,
        rollout={"temperature": 1.3},
        trainer={"total_steps": 50},
        algorithm={"kl": "loss", "kl_coef": 0.2, "kl_estimator": "k3", "kl_target": 0.1, "kl_horizon": 7},
        actor={
            "lr": 0.5,
            "lr_schedule": "cosine",
            "warmup_steps": 2,
            "min_lr_ratio": 0.1,
            "weight_decay": 0.1,
            "max_grad_norm": 3.0,
            "spike_factor": 5.0,
            "clip_ratio_low": 0.1,
            "clip_ratio_high": 0.4,
            "dual_clip": 4.0,
            "entropy_coef": 0.02,
            "ppo_epochs": 2,
            "mini_batches": 4,
            "loss_aggregation": "constant",
            "loss_length": 99,
            "old_logprobs": "recompute",
            "importance_cap": 3.0,
            "micro_batch_tokens": 77,
            "share_prefixes": False,
            "logit_chunk_tokens": 11,
            "activation_checkpointing": True,
            "canary": "warn",
            "lora": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]},
        },
    )
    expected = ActorSettings(
        lr=0.5,
        lr_schedule="cosine",
        warmup_steps=2,
        schedule_steps=50,
        min_lr_ratio=0.1,
        weight_decay=0.1,
        max_grad_norm=3.0,
        spike_factor=5.0,
        clip_low=0.1,
        clip_high=0.4,
        dual_clip=4.0,
        entropy_coef=0.02,
        ppo_epochs=2,
        mini_batches=4,
        loss_aggregation="constant",
        loss_length=99,
        old_logprobs="recompute",
        importance_cap=3.0,
        kl="loss",
        kl_estimator="k3",
        kl_coef=0.2,
        kl_target=0.1,
        kl_horizon=7,
        micro_batch_tokens=77,
        share_prefixes=False,
        logit_chunk_tokens=11,
        activation_checkpointing=True,
        canary="warn",
        lora=LoraSettings(4, 8.0, ("q_proj",), seed=3),
        temperature=1.3,
        seed=3,
    )
    assert actor_settings(given) == expected
    default = ActorSettings()
    same = {f.name for f in fields(ActorSettings) if getattr(expected, f.name) == getattr(default, f.name)}
    assert same == {"betas"}  # else a setting that never arrives would go unnoticed


def test_the_defaults_of_the_file_are_those_of_the_learner() -> None:
    found, default = actor_settings(RunConfig()), ActorSettings()
    differ = {f.name for f in fields(ActorSettings) if getattr(found, f.name) != getattr(default, f.name)}
    assert differ == {"schedule_steps", "kl_coef"}
    assert ActorConfig().canary == "stop"


def test_zero_disables_a_limit() -> None:
    found = actor_settings(config(actor={"dual_clip": 0, "spike_factor": 0}))
    assert (found.dual_clip, found.spike_factor, found.lora) == (None, None, None)
    assert critic_settings(config(critic={"value_clip": 0})).value_clip is None


def test_every_setting_of_the_critic_comes_from_the_configuration() -> None:
    given = config(
        seed=3,
        trainer={"total_steps": 50},
        actor={"spike_factor": 5.0, "micro_batch_tokens": 77},
        critic={
            "lr": 0.5,
            "lr_schedule": "linear",
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "max_grad_norm": 3.0,
            "value_clip": 0.4,
            "epochs": 2,
            "mini_batches": 3,
        },
    )
    assert critic_settings(given, per="turn") == CriticSettings(
        lr=0.5,
        lr_schedule="linear",
        warmup_steps=2,
        schedule_steps=50,
        weight_decay=0.1,
        max_grad_norm=3.0,
        spike_factor=5.0,
        value_clip=0.4,
        epochs=2,
        mini_batches=3,
        per="turn",
        micro_batch=MicroBatchSettings(77),
        seed=3,
    )


def test_grpo_alone_has_neither_critic_nor_reference() -> None:
    actor = build(RunConfig(), Grpo())
    assert (actor.critic, actor.reference) == (None, None)
    assert actor.loss == PpoClip(0.2, 0.2, 3.0)


@pytest.mark.parametrize("per", ["token", "turn"])
def test_an_estimator_that_needs_values_gets_a_critic_with_weights_of_its_own(per: Any) -> None:
    model = tiny_model()
    actor = build(RunConfig(), Gae(per=per), model)
    assert actor.critic.settings.per == per
    assert not {w.data_ptr() for w in actor.critic.model.parameters()} & {w.data_ptr() for w in model.parameters()}


def test_kl_in_the_reward_needs_a_reference() -> None:
    actor = build(config(algorithm={"kl": "reward", "kl_coef": 0.3}), Grpo())
    assert actor.kl.value == 0.3
    assert actor.reference is not None


def test_k1_as_a_loss_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigError, match="mean gradient of zero"):
        build(config(algorithm={"kl": "loss", "kl_estimator": "k1"}), Grpo())


def test_a_critic_with_other_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="somewhere has a vocabulary of 9 tokens and the policy 48"):
        build(config(critic={"path": "somewhere"}), Gae())
