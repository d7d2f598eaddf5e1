"""Building a learner from a configuration: nothing unneeded is built."""

from __future__ import annotations

from typing import Any

import pytest
from learner_cases import tiny_model

from toolwise.advantages import Gae, Grpo
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.builder import build_learner
from toolwise.learner.losses import PpoClip


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def build(given: RunConfig, estimator: Any, model: Any = None) -> Any:
    return build_learner(given, model or tiny_model(), estimator, load_critic=lambda path: tiny_model(vocab_size=9))


def test_grpo_alone_has_neither_critic_nor_reference() -> None:
    actor = build(RunConfig(), Grpo())
    assert (actor.critic, actor.reference) == (None, None)
    assert actor.loss == PpoClip(0.2, 0.2, 3.0)


@pytest.mark.parametrize("per", ["token", "turn"])
def test_an_estimator_that_needs_values_gets_a_critic_with_weights_of_its_own(per: Any) -> None:
    model = tiny_model()
    actor = build(RunConfig(), Gae(per=per), model)
    assert actor.critic.per == per
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
