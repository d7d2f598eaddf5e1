"""The learner on a GPU, in half precision: the whole way, with everything turned on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_cases import LR, sample, tiny_model

from toolwise.advantages import Gae
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic, CriticSettings
from toolwise.learner.pricing import PricedEstimator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aggregation", ["token", "step", "rollout", "constant"])
def test_a_whole_update(dtype: torch.dtype, aggregation: Any) -> None:
    model = tiny_model(head_dim=16).to("cuda", dtype)
    settings = replace(
        LR,
        lr=1e-3,
        kl="reward",
        kl_coef=0.1,
        kl_target=0.01,
        entropy_coef=0.01,
        old_logprobs="recompute",
        ppo_epochs=2,
        mini_batches=2,
        loss_aggregation=aggregation,
        loss_length=16,
        activation_checkpointing=True,
        canary="stop",
    )
    critic = Critic(tiny_model(head_dim=16).to("cuda", dtype), CriticSettings())
    actor = Actor(model, settings, critic=critic)
    estimator = PricedEstimator(Gae(), actor.kl)
    for step in range(3):
        scored = [c.annotated.scored for c in sample(model, [0.0] * 8, seed=step, groups_of=4)]
        scored = [replace(s, result=s.result.model_copy(update={"score": float(i % 2)})) for i, s in enumerate(scored)]
        metrics = actor.update(estimator(actor.annotate(scored)))
        assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 0.0
        assert metrics["actor/update_norm"] > 0.0
        assert metrics["canary/logprob_gap_mean"] < (1e-4 if dtype is torch.float32 else 0.05)
