"""What an update says about each token: its gap, its entropy, and whether the loss clipped it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_cases import changed, credit, tiny_model
from precision import assert_fp32_close

from toolwise.config.schema import RunConfig
from toolwise.learner.actor import Actor
from toolwise.learner.batch import build_batch
from toolwise.learner.token_statistics import TokenStatistics

TURNS = [([5, 6], [7, 8], [-1.0, -2.0]), ([5, 6, 7, 8, 9], [10], [-0.5])]


def test_every_token_has_its_values_in_order() -> None:
    rollouts = [credit(TURNS, 1.0, name="a"), credit(TURNS[:1], -1.0, name="b")]
    statistics = TokenStatistics(build_batch(rollouts))
    order = torch.tensor([3, 0, 4, 1, 2])
    statistics.add(order, -torch.arange(5.0)[order], torch.arange(5.0)[order], {"clip_frac": (order == 4).float()})
    found = statistics.per_rollout(rollouts)
    assert found["a"].gaps.tolist() == [1.0, 1.0, -1.5]
    assert found["b"].gaps.tolist() == [-2.0, -2.0]
    assert found["a"].entropies.tolist() == [0.0, 1.0, 2.0]
    assert found["b"].clipped.tolist() == [False, True]


def test_log_probs_are_those_before_the_first_gradient_and_clips_of_any_step_count() -> None:
    rollouts = [credit(TURNS[:1], 1.0)]
    statistics, columns = TokenStatistics(build_batch(rollouts)), torch.arange(2)
    first, later = torch.tensor([-1.0, -2.0]), torch.tensor([-9.0, -9.0])
    statistics.add(columns, first, first, {"masked_frac": torch.tensor([0.0, 0.0])})
    statistics.add(columns, later, later, {"masked_frac": torch.tensor([0.0, 1.0])})
    (found,) = statistics.per_rollout(rollouts).values()
    assert found.gaps.tolist() == [0.0, 0.0]
    assert found.clipped.tolist() == [False, True]


def test_tokens_that_are_not_computed_are_nan() -> None:
    rollouts = [credit(TURNS[:1], 1.0)]
    (found,) = TokenStatistics(build_batch(rollouts)).per_rollout(rollouts).values()
    assert np.isnan(found.gaps).all()
    assert not found.clipped.any()


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_says_what_it_computed(mini_batches: int) -> None:
    """Sampled at −1 and −2 in place of the model's own log-probs, tokens have the difference as their gap."""
    actor = Actor(tiny_model(), changed(RunConfig(), mini_batches=mini_batches, ppo_epochs=2, mismatch_check="off"))
    rollouts = [credit(TURNS, 1.0, name="a"), credit(TURNS, -1.0, name="b")]
    with torch.no_grad():
        own = actor._logprobs(actor.model, build_batch(rollouts)).numpy()
    actor.update(rollouts)
    assert set(actor.updated) == {"a", "b"}
    found = actor.updated["a"]
    assert len(found.gaps) == len(found.entropies) == len(found.clipped) == 3
    assert (found.entropies > 0).all()
    if mini_batches == 1:
        assert_fp32_close(found.gaps, own[:3] - np.array([-1.0, -2.0, -0.5]), scale=float(np.abs(own[:3]).max()))


def test_an_update_of_nothing_forgets_the_one_before() -> None:
    actor = Actor(tiny_model(), changed(RunConfig(), mismatch_check="off"))
    actor.update([credit(TURNS, 1.0)])
    actor.update([])
    assert actor.updated == {}
