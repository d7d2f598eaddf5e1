"""The critic learns to predict returns, separately from the actor."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import LR, changed, credit, same, sample, tiny_model, weights
from precision import assert_fp32_close

from toolwise.advantages import Gae
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ToolwiseError
from toolwise.learner.actor import Actor
from toolwise.learner.batch import Batch, build_batch
from toolwise.learner.critic import Critic, explained_variance
from toolwise.training import checkpoint
from toolwise.types import CreditedRollout

torch.set_num_threads(1)
FAST = changed(RunConfig(), {"critic": {"lr": 1e-2, "value_clip": 0}})


def with_returns(credited: Sequence[CreditedRollout], returns: Sequence[float]) -> list[CreditedRollout]:
    return [
        replace(c, returns=tuple(np.full(len(a), value, np.float32) for a in c.advantages))
        for c, value in zip(credited, returns, strict=True)
    ]


def annotated(critic: Critic, credited: Sequence[CreditedRollout]) -> Batch:
    batch = build_batch(credited)
    return replace(batch, values=critic.values(batch))


def test_initial_values_are_zero() -> None:
    critic = Critic(tiny_model(), FAST)
    batch = build_batch(sample(tiny_model(), [1.0, -1.0]))
    assert critic.values(batch).tolist() == [0.0] * len(batch)


def test_it_learns_the_returns() -> None:
    critic = Critic(tiny_model(), FAST)
    credited = with_returns(sample(tiny_model(), [0.0, 0.0, 0.0]), [1.0, -1.0, 0.5])
    first = critic.update(annotated(critic, credited), 1)
    for step in range(2, 40):
        last = critic.update(annotated(critic, credited), step)
    assert last["critic/loss"] < 0.05 * first["critic/loss"]
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["critic/explained_variance"] > 0.9
    batch = annotated(critic, credited)
    assert batch.values is not None
    assert batch.returns is not None
    assert (batch.values - batch.returns).abs().mean() < 0.2


def test_a_value_depends_only_on_earlier_tokens() -> None:
    critic = Critic(tiny_model(), FAST)
    torch.nn.init.normal_(critic.head.weight)
    one, other = (credit([([5, 6, 7], [8, last, 11], [-1.0] * 3)], 0.0) for last in (9, 10))
    a, b = (critic.values(build_batch([c])) for c in (one, other))
    assert_fp32_close(a[:2], b[:2], scale=float(a.abs().max()))
    assert a[2].item() != pytest.approx(b[2].item(), abs=1e-4)


@pytest.mark.parametrize(
    "cut",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 40},
        {"micro_batch_tokens": 10_000, "share_prefixes": False},
    ],
)
def test_values_and_gradients_do_not_depend_on_micro_batches(cut: dict[str, Any]) -> None:
    model = tiny_model()
    credited = with_returns(sample(model, [0.0] * 4, groups_of=2), [1.0, -1.0, 0.5, 2.0])

    def run(actor: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, float]:
        critic = Critic(copy.deepcopy(model), changed(FAST, {"critic": {"max_grad_norm": 1e9}}, **actor))
        torch.manual_seed(0)
        torch.nn.init.normal_(critic.head.weight)
        batch = annotated(critic, credited)
        loss = critic.update(batch, 1)["critic/loss"]
        states = [critic.optimizer.adamw.state[m]["exp_avg"].flatten() for m in critic.optimizer.masters]
        assert batch.values is not None
        return batch.values, torch.cat(states), loss

    values, gradient, loss = run({})
    found = run(cut)
    assert_fp32_close(found[0], values, scale=float(values.abs().max()))
    assert float((found[1] - gradient).norm() / gradient.norm()) < 1e-5
    assert found[2] == pytest.approx(loss, rel=1e-5)


def test_per_turn_only_the_first_token_of_each_turn_has_a_loss() -> None:
    model = tiny_model()
    credited = sample(model, [0.0, 0.0])
    nonsense = [
        replace(c, returns=tuple(np.array([1.0, *[9e9] * (len(a) - 1)], np.float32) for a in c.advantages))
        for c in credited
    ]
    critic = Critic(copy.deepcopy(model), FAST, per="turn")
    metrics = critic.update(annotated(critic, nonsense), 1)
    assert metrics["critic/loss"] == pytest.approx(0.5)
    for step in range(2, 30):
        metrics = critic.update(annotated(critic, nonsense), step)
    assert metrics["critic/loss"] < 0.05


def test_the_value_clip_limits_the_update() -> None:
    model = tiny_model()
    credited = with_returns(sample(model, [0.0] * 4), [5.0] * 4)
    critic = Critic(model, changed(FAST, {"critic": {"lr": 0.1, "value_clip": 0.2, "epochs": 12}}))
    metrics = critic.update(annotated(critic, credited), 1)
    assert metrics["critic/clip_frac"] > 0.3


def test_it_does_not_touch_the_policy() -> None:
    model = tiny_model()
    before = weights(model)
    critic = Critic(copy.deepcopy(model), FAST)
    for step in (1, 2):  # in the first, the zero head passes no gradient to the trunk
        critic.update(annotated(critic, with_returns(sample(model, [0.0]), [1.0])), step)
    assert same(weights(model), before)
    assert not same(weights(critic.model), before)


def test_without_returns_it_says_what_is_missing() -> None:
    critic = Critic(tiny_model(), FAST)
    with pytest.raises(ToolwiseError, match="no returns"):
        critic.update(build_batch(sample(tiny_model(), [1.0])), 1)


def test_what_is_not_a_number_is_skipped_and_counted() -> None:
    critic = Critic(tiny_model(), FAST)
    before = weights(critic.model)
    batch = annotated(critic, with_returns(sample(tiny_model(), [0.0]), [math.nan]))
    assert critic.update(batch, 1)["critic/skipped_updates"] == 1.0
    assert same(weights(critic.model), before)


def learner(seed: int = 0) -> Actor:
    critic = Critic(tiny_model(seed), changed(FAST, {"critic": {"weight_decay": 0.01}}))
    return Actor(tiny_model(seed), changed(LR, lr=1e-3), needs=frozenset({"values"}), critic=critic)


def turn(actor: Actor, seed: int) -> dict[str, float]:
    """A full PPO step: annotate, GAE, update."""
    scored = [
        replace(c.annotated.scored, result=c.annotated.scored.result.model_copy(update={"score": float(i % 2)}))
        for i, c in enumerate(sample(tiny_model(), [0.0] * 4, seed=seed))
    ]
    return actor.update(Gae()(actor.annotate(scored)).rollouts)


def test_gae_and_a_critic_make_ppo() -> None:
    metrics = turn(learner(), 1)
    assert {"critic/loss", "critic/explained_variance", "actor/loss"} <= metrics.keys()
    assert metrics["critic/loss"] > 0.0


def test_resuming_between_two_updates_changes_nothing(tmp_path: Path) -> None:
    straight = learner()
    turn(straight, 1)
    expected = turn(straight, 2)
    first = learner()
    turn(first, 1)
    saved = checkpoint.save(tmp_path, 1, {"actor": first.state_dict()}, extra_files={"model": first.save_model})
    second = learner(seed=9)
    found = checkpoint.load(saved.path)
    second.load_state_dict(found.state()["actor"])
    second.load_weights(found.path / "model")
    assert turn(second, 2) == expected
    critics: list[Any] = [straight.critic, second.critic]
    assert same(weights(critics[0].trunk), weights(critics[1].trunk))
    assert same(weights(critics[0].head), weights(critics[1].head))


def test_another_critic_than_the_checkpoint_s_is_refused() -> None:
    state = learner().state_dict()
    with pytest.raises(CheckpointError, match="critic"):
        Actor(tiny_model(), LR).load_state_dict(state)
    other = Actor(tiny_model(), LR, critic=Critic(tiny_model(hidden_size=16), FAST))
    with pytest.raises(CheckpointError, match="different trunk"):
        other.load_state_dict(state)


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([1.0, 3.0])
    assert explained_variance(torch.tensor([1.0, 3.0]), returns) == pytest.approx(1.0)
    assert explained_variance(torch.tensor([7.0, 7.0]), returns) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([3.0, 1.0]), returns) == pytest.approx(-3.0)
    assert explained_variance(torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])) == 0.0
    assert explained_variance(torch.zeros(0), torch.zeros(0)) == 0.0
