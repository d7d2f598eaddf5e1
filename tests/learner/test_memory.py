"""Passes that run out of memory: redone as a whole in smaller micro-batches, with the gradients and metrics of an
undisturbed update."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import LR, changed, gradients, same, sample, tiny_model, weights
from precision import assert_fp32_close
from selection import quick_first

from toolwise.learner import actor as actor_module
from toolwise.learner import critic as critic_module
from toolwise.learner import memory
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.learner.forward import TrunkForward
from toolwise.learner.memory import LearnerMemoryError, MicroBatchLimit
from toolwise.learner.packing import Packed
from toolwise.types import CreditedRollout

torch.set_num_threads(1)
ADVANTAGES = [1.0, -0.5, 2.0, -1.5, 0.3, -0.2]
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB"


@pytest.fixture(autouse=True)
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MIN_TOKENS", 8)


def run_out(
    monkeypatch: pytest.MonkeyPatch, refuses: Callable[[int, int], bool], module: Any = actor_module
) -> list[int]:
    """Forward passes for which `refuses(number, tokens)` raise like a full GPU. Returns the tokens of all passes."""
    passes: list[int] = []

    class Refusing(TrunkForward):
        def __call__(self, packed: Packed) -> torch.Tensor:
            passes.append(packed.T)
            if refuses(len(passes), packed.T):
                raise torch.OutOfMemoryError(MESSAGE)
            return super().__call__(packed)

    if module is actor_module:
        monkeypatch.setattr(module, "TrunkForward", Refusing)
    else:
        monkeypatch.setattr(module, "hidden_states", lambda model, packed: Refusing(model)(packed))
    return passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("failing", quick_first([1, 2, 3], [2]))
def test_the_gradients_are_those_of_an_undisturbed_update(
    failing: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever micro-batch fails: what the ones before it added is discarded."""
    model = tiny_model().to(dtype)
    credited = sample(model, [*ADVANTAGES, *ADVANTAGES])
    settings = changed(LR, micro_batch_tokens=60, max_grad_norm=1e9, entropy_coef=0.01)
    calm, short = (Actor(copy.deepcopy(model), settings) for _ in range(2))
    half = Actor(copy.deepcopy(model), changed(settings, micro_batch_tokens=30))
    expected = half.update(credited)
    undisturbed = calm.update(credited)
    passes = run_out(monkeypatch, lambda number, tokens: number == failing)
    metrics = short.update(credited)
    assert metrics.pop("actor/out_of_memory") == 1.0
    assert metrics.pop("actor/micro_batch_tokens") == 30.0
    assert max(passes[failing:]) <= 30 < max(passes[:failing])
    assert metrics == expected  # bit by bit those of an update that began with 30
    assert same(weights(short.model), weights(half.model))
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "actor/update_norm"):
        assert metrics[name] == pytest.approx(undisturbed[name], rel=tolerance)


def test_a_device_for_few_tokens_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    credited = sample(model, ADVANTAGES)
    settings = changed(LR, micro_batch_tokens=100_000, max_grad_norm=1e9)
    gradient, loss = gradients(Actor(copy.deepcopy(model), settings), credited)
    short = Actor(copy.deepcopy(model), settings)
    passes = run_out(monkeypatch, lambda number, tokens: tokens > 40)
    found, found_loss = gradients(short, credited)
    assert float((found - gradient).norm() / gradient.norm()) < 1e-5
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert sum(tokens > 40 for tokens in passes) <= 2
    passes.clear()
    metrics = short.update(credited)
    assert metrics["actor/out_of_memory"] == 0.0
    assert max(passes) <= 40
    assert all(p.grad is None for p in short.model.parameters())


def test_annotations_are_redone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    credited = sample(model, ADVANTAGES)
    scored = [c.annotated.scored for c in credited]
    settings = changed(LR, {"algorithm": {"kl": "reward"}}, old_logprobs="recompute", ppo_epochs=2)
    expected = Actor(copy.deepcopy(model), settings).annotate(scored)
    short = Actor(copy.deepcopy(model), settings)
    run_out(monkeypatch, lambda number, tokens: tokens > 40)
    for one, other in zip(expected, short.annotate(scored), strict=True):
        for name in ("old_logprobs", "ref_logprobs"):
            for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
                assert_fp32_close(a, b)


def with_returns(credited: list[CreditedRollout]) -> list[CreditedRollout]:
    return [
        replace(c, returns=tuple(np.full(len(a), 1.0 - i, np.float32) for a in c.advantages))
        for i, c in enumerate(credited)
    ]


def test_the_critic_is_redone_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    credited = with_returns(sample(model, ADVANTAGES))
    settings = changed(LR, {"critic": {"lr": 1e-2, "max_grad_norm": 1e9}}, micro_batch_tokens=60)
    found = []
    for refuses in (lambda number, tokens: False, lambda number, tokens: number in (2, 6)):
        actor = Actor(
            copy.deepcopy(model), settings, needs=frozenset({"values"}), critic=Critic(tiny_model(1), settings)
        )
        with monkeypatch.context() as patch:
            passes = run_out(patch, refuses, critic_module)
            annotated = actor.annotate([c.annotated.scored for c in credited])
            values = [replace(c, annotated=a) for c, a in zip(credited, annotated, strict=True)]
            found.append((actor.update(values), actor.critic and actor.critic.head.weight.detach().clone()))
    (calm, head), (short, redone) = found
    assert len(passes) > 6
    assert short["actor/out_of_memory"] == 2.0
    assert short["critic/loss"] == pytest.approx(calm["critic/loss"], rel=1e-4)
    assert short["critic/grad_norm"] == pytest.approx(calm["critic/grad_norm"], rel=1e-4)
    assert isinstance(head, torch.Tensor)
    assert isinstance(redone, torch.Tensor)
    torch.testing.assert_close(head, redone, rtol=1e-3, atol=1e-6)


def test_if_nothing_fits_one_line_names_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor(tiny_model(), LR)
    credited = sample(actor.model, ADVANTAGES)
    before = weights(actor.model)
    run_out(monkeypatch, lambda number, tokens: True)
    with pytest.raises(LearnerMemoryError) as caught:
        actor.update(credited)
    text = str(caught.value)
    assert "\n" not in text
    assert "Tried to allocate 2.00 GiB" in text
    for setting in (
        "actor.micro_batch_tokens", "actor.activation_checkpointing", "rollout.cache_mb", "actor.lora.rank",
        "actor.optimizer_state",
    ):  # fmt: skip
        assert setting in text
    assert same(weights(actor.model), before)
    assert actor.version == 0
    assert all(p.grad is None for p in actor.model.parameters())


def test_memory_that_can_be_reclaimed_is_before_anything_gets_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor(tiny_model(), changed(LR, micro_batch_tokens=60))
    credited = sample(actor.model, ADVANTAGES)
    left = ["the cache"]
    actor.memory.reclaim = lambda: bool(left and left.pop())
    run_out(monkeypatch, lambda number, tokens: bool(left))
    metrics = actor.update(credited)
    assert (metrics["actor/out_of_memory"], metrics["actor/micro_batch_tokens"]) == (1.0, 60.0)


def test_no_tensor_of_a_failed_pass_is_kept() -> None:
    kept: list[Any] = []

    def work(tokens: int) -> int:
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        if tokens > 20:
            raise torch.OutOfMemoryError(MESSAGE)
        return tokens

    def undo() -> None:
        assert kept[-1]() is None

    assert MicroBatchLimit(64).fit(work, [9] * 10, undo) == 16


def test_the_state_of_the_optimiser_takes_reclaimed_memory_or_fails_before_any_weight_changes() -> None:
    model = tiny_model()
    credited = sample(model, ADVANTAGES)
    outcomes = []
    for reclaimable in (1, 0):
        actor = Actor(copy.deepcopy(model), LR)
        left = [1] * reclaimable
        real = actor.optimizer._allocate_state

        def allocate(left: list[int] = left, real: Any = real, reclaimable: int = reclaimable) -> None:
            if left or not reclaimable:
                raise torch.OutOfMemoryError(MESSAGE)
            real()

        actor.optimizer._allocate_state = allocate  # type: ignore[method-assign]
        actor.memory.reclaim = lambda left=left: bool(left and left.pop())  # type: ignore[misc]
        try:
            actor.update(credited)
        except LearnerMemoryError as error:
            outcomes.append(str(error))
            assert same(weights(actor.model), weights(model))
        else:
            outcomes.append("updated")
            assert not same(weights(actor.model), weights(model))
    assert outcomes[0] == "updated"
    assert outcomes[1].startswith("out of memory: the optimizer's state does not fit")
