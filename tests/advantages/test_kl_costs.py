"""KL in the reward: what each estimator sees, worked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import LR, changed, credit, gradients, tiny_model
from rlvcr_cases import thinking_step

from toolwise.advantages import Gae, Gigpo, Grpo, Rlvcr, cost_metrics, credit_rollout, total_rewards
from toolwise.advantages.step_rewards import token_k1
from toolwise.errors import ToolwiseError
from toolwise.learner.actor import Actor
from toolwise.protocols import AdvantageEstimator
from toolwise.types import AnnotatedRollout, CreditedBatch, RewardSettings, RolloutThinking


def annotated(score: float, reference: Sequence[Sequence[float]], *, name: str = "r") -> AnnotatedRollout:
    """A rollout with one turn per entry, whose tokens were all sampled at a log-prob of −1."""
    turns = [([5] * (3 + turn), [6] * len(part), [-1.0] * len(part)) for turn, part in enumerate(reference)]
    plain = credit(turns, 0.0, name=name).annotated
    scored = replace(plain.scored, result=plain.scored.result.model_copy(update={"score": score}))
    return replace(plain, scored=scored, ref_logprobs=tuple(np.array(part, np.float32) for part in reference))


def charged(coefficient: float, rollouts: Sequence[AnnotatedRollout]) -> list[AnnotatedRollout]:
    """The rollouts as the learner annotates them if KL is part of the reward."""
    return [replace(r, kl_coef=coefficient) for r in rollouts]


def test_k1_of_each_token() -> None:
    parts = token_k1(annotated(0.0, [[-1.0, -3.0], [0.0]]))
    assert [part.tolist() for part in parts] == [[0.0, 2.0], [-1.0]]


def test_old_log_probs_of_the_learner_come_before_those_of_the_rollout() -> None:
    given = annotated(0.0, [[-1.0, -3.0]])
    assert token_k1(replace(given, old_logprobs=(np.array([-2.0, -2.0], np.float32),)))[0].tolist() == [-1.0, 1.0]


def test_an_estimator_over_scores_sees_each_score_less_its_cost() -> None:
    """Scores 1 and 0, costs 0.1·3 and 0.1·(−2): 0.7 against 0.2."""
    group = [annotated(1.0, [[-2.0, -3.0]], name="a"), annotated(0.0, [[0.0, 0.0]], name="b")]
    group = charged(0.1, group)
    first, second = Grpo(norm_by_std=False)(group).rollouts
    assert [a.tolist() for a in first.advantages] == [pytest.approx([0.25, 0.25])]
    assert [a.tolist() for a in second.advantages] == [pytest.approx([-0.25, -0.25])]
    assert cost_metrics(group)["kl/cost"] == pytest.approx(0.05)


def test_the_original_score_is_kept() -> None:
    group = [annotated(1.0, [[-2.0]], name="a"), annotated(0.0, [[0.0]], name="b")]
    credited = Grpo()(charged(0.1, group)).rollouts
    assert [c.annotated for c in credited] == charged(0.1, group)
    assert [c.annotated.scored.score for c in credited] == [1.0, 0.0]


def test_an_estimator_over_token_rewards_charges_each_token() -> None:
    given = replace(annotated(1.0, [[-2.0, -1.5]]), values=(np.zeros(2, np.float32),))
    [found] = Gae(lam=1.0, whiten=False)(charged(0.1, [given])).rollouts
    assert found.advantages[0].tolist() == pytest.approx([1.0 - 0.1 - 0.05, 1.0 - 0.05])


def test_an_estimator_over_steps_charges_each_step() -> None:
    """Two rollouts of two steps in the same two states, all worth 1 at the end: 0.1 · 2 nats in the first step of one,
    in the second of the other. G is 0.8 and 1 for the one, 0.8 and 0.8 for the other; the scores are equal."""
    group = [annotated(1.0, [[-3.0], [-1.0]], name="a"), annotated(1.0, [[-1.0], [-3.0]], name="b")]
    for rollout in group:
        for place, step in enumerate(rollout.scored.steps):
            step.observation_data = place
    inner = Gigpo(omega=0.0, gamma=1.0, normalization="mean_norm", state_anchor=str)
    for estimator in (inner, Rlvcr(trajectory=inner)):
        first, second = estimator(charged(0.1, group)).rollouts
        assert [step.return_to_go for step in first.steps] == pytest.approx([0.8, 1.0])
        assert [step.return_to_go for step in second.steps] == pytest.approx([0.8, 0.8])
        assert [float(a[0]) for a in first.advantages] == pytest.approx([0.0, 0.1])
        assert [float(a[0]) for a in second.advantages] == pytest.approx([0.0, -0.1])


def test_the_learner_s_current_coefficient_is_used() -> None:
    actor = Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "reward", "kl_coef": 0.5}}))
    scored = [credit([([5, 6, 7], [8], [-1.0])], 0.0).annotated.scored]
    assert actor.annotate(scored)[0].kl_coef == 0.5
    actor.kl.value = 0.25
    [rollout] = actor.annotate(scored)
    assert rollout.kl_coef == 0.25
    assert rollout.ref_logprobs is not None
    assert (
        Actor(tiny_model(), changed(LR, {"algorithm": {"kl": "loss", "kl_coef": 0.5}})).annotate(scored)[0].kl_coef
        is None
    )


def test_without_kl_in_the_reward_there_is_no_metric() -> None:
    assert cost_metrics([]) == cost_metrics([annotated(1.0, [[-2.0]])]) == {}


def test_reference_log_probs_are_required() -> None:
    bare = replace(annotated(1.0, [[-1.0]]), ref_logprobs=None)
    with pytest.raises(ToolwiseError, match="rollout r has no reference log-probs"):
        Grpo()(charged(0.1, [bare]))


def test_the_penalty_follows_the_gradient_of_kl() -> None:
    """One-token rollouts, each token as often as the policy samples it: the update's gradient is that of β·KL."""
    model, prompt = tiny_model(), [5, 6, 7]
    actor = Actor(model, changed(LR, {"algorithm": {"kl": "reward", "kl_coef": 0.5}}, max_grad_norm=1e9, dual_clip=0))
    with torch.no_grad():
        for weight in model.parameters():  # now the policy has left its reference
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    logp = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1).detach()
    counts = (1000 * logp.exp()).round().int().tolist()
    drawn = [
        credit([(prompt, [token], [float(logp[token])])], 0.0, name=f"{token}/{i}").annotated.scored
        for token, count in enumerate(counts)
        for i in range(count)
    ]
    gradient, _ = gradients(actor, Grpo(norm_by_std=False)(actor.annotate(drawn)).rollouts)

    assert actor.reference is not None
    ref = torch.log_softmax(actor.reference(torch.tensor([prompt])).logits[0, -1], -1)
    model = tiny_model()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    logp = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    (0.5 * (logp.exp() * (logp - ref)).sum()).backward()
    truth = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    assert float(torch.nn.functional.cosine_similarity(gradient, truth, dim=0)) > 0.99
    assert float(gradient.norm() / truth.norm()) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("gate", ["signed", "success"])
def test_success_is_judged_by_the_original_scores(gate: Any) -> None:
    """Both reach 1.0 and have left the reference; the KL cost is in A_traj and closes no gate."""
    group = [annotated(1.0, [[-2.0] * 6], name="a"), annotated(1.0, [[-3.0] * 6], name="b")]
    step = thinking_step(3, {1: -3.0, 2: -2.0, 3: -1.0, 4: -2.0})
    group = [replace(r, thinking=RolloutThinking((step,))) for r in group]
    rlvcr = Rlvcr(Grpo(norm_by_std=False), thinking_diversity_w=0.0, gate=gate, success_score=1.0)
    for found, base in zip(rlvcr(charged(0.01, group)).rollouts, (0.03, -0.03), strict=True):
        assert found.advantages[0].tolist() == pytest.approx([base + 1.0] * 3 + [base] * 3)


@dataclass(frozen=True)
class Mine(AdvantageEstimator):
    """A user's estimator: the total reward, costs included, as advantage."""

    rewards = RewardSettings()

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        totals = total_rewards(rollouts, self.rewards)
        return CreditedBatch([credit_rollout(r, total) for r, total in zip(rollouts, totals.tolist(), strict=True)])


def test_a_custom_estimator_gets_rewards_minus_their_cost() -> None:
    group = [annotated(1.0, [[-2.0, -3.0]], name="a"), annotated(0.0, [[0.0, 0.0]], name="b")]
    first, second = Mine()(charged(0.1, group)).rollouts
    assert [float(c.advantages[0][0]) for c in (first, second)] == pytest.approx([0.7, 0.2])
