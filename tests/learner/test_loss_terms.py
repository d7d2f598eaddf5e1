"""The per-token loss, worked by hand, and metrics that add up over micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from learner_cases import changed, credit

from toolwise.config.schema import RunConfig
from toolwise.learner.batch import Batch, build_batch
from toolwise.learner.loss_terms import LossTerms, MetricSums, metric_names, policy_loss_terms
from toolwise.learner.losses import PpoClip

PLAIN = RunConfig()
PPO = PpoClip()
NOW = torch.tensor([-1.0, -2.0])
ENTROPY = torch.tensor([0.5, 0.7])
BOTH = torch.tensor([0, 1])


def batch(**columns: Any) -> Batch:
    """One rollout of two tokens, sampled at −1.1 and −2.0, with an advantage of 2."""
    found = build_batch([credit([([5, 6], [7, 8], [-1.1, -2.0])], 2.0)])
    return replace(found, **{name: torch.tensor(values) for name, values in columns.items()})


def test_the_rollouts_log_probs_are_old_and_nothing_else_is_weighed() -> None:
    terms = policy_loss_terms(PLAIN, PPO, 0.0, batch(), BOTH, NOW, ENTROPY)
    assert terms.policy.tolist() == pytest.approx([-2.0 * math.exp(0.1), -2.0], rel=1e-5)
    assert torch.equal(terms.total, terms.policy)
    assert terms.metrics["kl"].tolist() == pytest.approx([-0.1, 0.0], abs=1e-6)
    assert "importance_weight" not in terms.metrics


def test_recomputed_ones_are_old_and_the_rest_is_a_weight() -> None:
    settings = changed(PLAIN, old_logprobs="recompute", importance_cap=1.2)
    terms = policy_loss_terms(settings, PPO, 0.0, batch(old_logprobs=[-1.05, -1.0]), BOTH, NOW, ENTROPY)
    assert terms.metrics["importance_weight"].tolist() == pytest.approx([math.exp(0.05), 1.2], rel=1e-5)
    ratios = [math.exp(0.05), math.exp(-1.0)]
    expected = [-2.0 * r * w for r, w in zip(ratios, [math.exp(0.05), 1.2], strict=True)]
    assert terms.policy.tolist() == pytest.approx(expected, rel=1e-5)


def test_in_a_single_step_the_log_probs_of_now_are_old() -> None:
    now = NOW.clone().requires_grad_()
    terms = policy_loss_terms(changed(PLAIN, old_logprobs="recompute"), PPO, 0.0, batch(), BOTH, now, ENTROPY)
    terms.policy.sum().backward()
    assert terms.metrics["kl"].tolist() == [0.0, 0.0]
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([-2.0 * math.exp(0.1), -2.0], rel=1e-5)


def test_entropy_and_kl_are_added_to_the_total_and_not_to_the_policy_loss() -> None:
    settings = changed(PLAIN, {"algorithm": {"kl": "loss", "kl_estimator": "k2"}}, entropy_coef=0.1)
    terms = policy_loss_terms(settings, PPO, 0.5, batch(ref_logprobs=[-3.0, -2.0]), BOTH, NOW, ENTROPY)
    added = (terms.total - terms.policy).tolist()
    assert added == pytest.approx([-0.05 + 0.5 * 2.0, -0.07], rel=1e-5)


def test_kl_in_the_reward_adds_nothing_here() -> None:
    config = changed(PLAIN, {"algorithm": {"kl": "reward"}})
    terms = policy_loss_terms(config, PPO, 0.5, batch(ref_logprobs=[-3.0, -2.0]), BOTH, NOW, ENTROPY)
    assert torch.equal(terms.total, terms.policy)


def test_metrics_of_micro_batches_add_up() -> None:
    whole, parts = (MetricSums(torch.device("cpu"), metric_names(PLAIN.actor, PPO)) for _ in range(2))
    weights = torch.tensor([0.25, 0.75])
    terms = policy_loss_terms(PLAIN, PPO, 0.0, batch(), BOTH, NOW, ENTROPY)
    whole.add(terms, weights, 7)
    for at in (0, 1):
        one = LossTerms(terms.policy[at : at + 1], terms.total, {k: v[at : at + 1] for k, v in terms.metrics.items()})
        parts.add(one, weights[at : at + 1], 3 + at)
    assert parts.means(2) == pytest.approx(whole.means(2))
    assert whole.means(2)["entropy"] == pytest.approx(0.6)
    assert whole.means(2)["computed_tokens"] == 7.0
    assert whole.means(2)["loss"] == pytest.approx(-0.5 * math.exp(0.1) - 1.5, rel=1e-5)


def test_no_rows_give_the_same_names_and_zeros() -> None:
    empty = MetricSums(torch.device("cpu"), metric_names(PLAIN.actor, PPO)).means(0)
    assert set(empty) == {"loss", "computed_tokens", "entropy", "clip_frac", "kl"}
    assert set(empty.values()) == {0.0}
