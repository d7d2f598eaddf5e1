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

from toolwise.advantages import Gae, Gigpo, Grpo, ReinforcePlusPlus, Rlvcr
from toolwise.advantages.token_rewards import token_k1
from toolwise.errors import ToolwiseError
from toolwise.learner.actor import Actor
from toolwise.learner.kl import KlCoefficient
from toolwise.learner.kl_reward import KlRewardEstimator
from toolwise.protocols import MeasuredEstimator
from toolwise.types import AnnotatedRollout, CreditedRollout, RolloutThinking


def annotated(score: float, reference: Sequence[Sequence[float]], *, name: str = "r") -> AnnotatedRollout:
    """A rollout with one turn per entry, whose tokens were all sampled at a log-prob of −1."""
    turns = [([5] * (3 + turn), [6] * len(part), [-1.0] * len(part)) for turn, part in enumerate(reference)]
    plain = credit(turns, 0.0, name=name).annotated
    scored = replace(plain.scored, result=plain.scored.result.model_copy(update={"score": score}))
    return replace(plain, scored=scored, ref_logprobs=tuple(np.array(part, np.float32) for part in reference))


def test_k1_of_each_token() -> None:
    parts = token_k1(annotated(0.0, [[-1.0, -3.0], [0.0]]))
    assert [part.tolist() for part in parts] == [[0.0, 2.0], [-1.0]]


def test_old_log_probs_of_the_learner_come_before_those_of_the_rollout() -> None:
    given = annotated(0.0, [[-1.0, -3.0]])
    assert token_k1(replace(given, old_logprobs=(np.array([-2.0, -2.0], np.float32),)))[0].tolist() == [-1.0, 1.0]


def test_an_estimator_over_scores_sees_each_score_less_its_cost() -> None:
    """Scores 1 and 0, costs 0.1·3 and 0.1·(−2): 0.7 against 0.2."""
    group = [annotated(1.0, [[-2.0, -3.0]], name="a"), annotated(0.0, [[0.0, 0.0]], name="b")]
    priced = KlRewardEstimator(Grpo(norm_by_std=False), KlCoefficient(0.1))
    first, second = priced(group)
    assert [a.tolist() for a in first.advantages] == [pytest.approx([0.25, 0.25])]
    assert [a.tolist() for a in second.advantages] == [pytest.approx([-0.25, -0.25])]
    assert priced.credit(group)[1]["kl/cost"] == pytest.approx(0.05)


def test_the_original_score_is_kept() -> None:
    group = [annotated(1.0, [[-2.0]], name="a"), annotated(0.0, [[0.0]], name="b")]
    credited = KlRewardEstimator(Grpo(), KlCoefficient(0.1))(group)
    assert [c.annotated for c in credited] == group
    assert [c.annotated.scored.score for c in credited] == [1.0, 0.0]


def test_an_estimator_over_token_rewards_charges_each_token() -> None:
    given = replace(annotated(1.0, [[-2.0, -1.5]]), values=(np.zeros(2, np.float32),))
    [found] = KlRewardEstimator(Gae(lam=1.0, whiten=False), KlCoefficient(0.1))([given])
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
        first, second = KlRewardEstimator(estimator, KlCoefficient(0.1))(group)
        assert [step.return_to_go for step in first.steps] == pytest.approx([0.8, 1.0])
        assert [step.return_to_go for step in second.steps] == pytest.approx([0.8, 0.8])
        assert [float(a[0]) for a in first.advantages] == pytest.approx([0.0, 0.1])
        assert [float(a[0]) for a in second.advantages] == pytest.approx([0.0, -0.1])


def test_the_current_coefficient_is_used() -> None:
    group = [annotated(1.0, [[-2.0]], name="a"), annotated(1.0, [[-1.0]], name="b")]
    coefficient = KlCoefficient(0.0)
    priced = KlRewardEstimator(Grpo(norm_by_std=False), coefficient)
    assert float(priced(group)[0].advantages[0][0]) == 0.0
    coefficient.value = 1.0
    assert float(priced(group)[0].advantages[0][0]) == pytest.approx(-0.5)


def test_it_delegates_to_the_inner_estimator() -> None:
    priced = KlRewardEstimator(Gae(), KlCoefficient(0.1))
    assert priced.needs == {"values", "ref_logprobs"}
    assert isinstance(priced, MeasuredEstimator)
    assert (priced.min_group_size, priced.learns_from_equal_scores(1.0)) == (1, True)
    assert (KlRewardEstimator(Grpo(), KlCoefficient(0.1)).min_group_size) == 2


@pytest.mark.filterwarnings("ignore")
def test_the_estimator_s_metrics_are_passed_on() -> None:
    group = [annotated(1.0, [[-2.0]], name="a"), annotated(0.0, [[-1.0]], name="b")]
    _, metrics = KlRewardEstimator(Gigpo(), KlCoefficient(0.1)).credit(group)
    assert "gigpo/frac_singleton" in metrics
    assert "kl/cost" in metrics
    assert KlRewardEstimator(ReinforcePlusPlus(), KlCoefficient(0.1)).credit(group)[1].keys() == {"kl/cost"}


def test_reference_log_probs_are_required() -> None:
    bare = replace(annotated(1.0, [[-1.0]]), ref_logprobs=None)
    with pytest.raises(ToolwiseError, match="rollout r has no reference log-probs"):
        KlRewardEstimator(Grpo(), KlCoefficient(0.1))([bare])


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
    priced = KlRewardEstimator(Grpo(norm_by_std=False), actor.kl)
    gradient, _ = gradients(actor, priced(actor.annotate(drawn)))

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
    for found, base in zip(KlRewardEstimator(rlvcr, KlCoefficient(0.01))(group), (0.03, -0.03), strict=True):
        assert found.advantages[0].tolist() == pytest.approx([base + 1.0] * 3 + [base] * 3)


@dataclass(frozen=True)
class Labelled:
    """A user's estimator with a field that happens to share one of our names."""

    trajectory: bool = True
    needs: frozenset[Any] = frozenset()

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return Grpo(norm_by_std=False)(rollouts)


class Plain:
    """An estimator that is not a dataclass."""

    inner = Labelled()
    needs: frozenset[Any] = frozenset()

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]:
        return self.inner(rollouts)


@pytest.mark.parametrize("estimator", [Labelled(), Plain()])
def test_a_custom_estimator_sees_scores_minus_their_cost(estimator: Any) -> None:
    group = [annotated(1.0, [[-2.0, -3.0]], name="a"), annotated(0.0, [[0.0, 0.0]], name="b")]
    first, second = KlRewardEstimator(estimator, KlCoefficient(0.1))(group)
    assert [float(c.advantages[0][0]) for c in (first, second)] == pytest.approx([0.25, -0.25])
