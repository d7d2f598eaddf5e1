"""The actor: its log-probs agree with the policy's, and updates depend on the rollouts alone."""

from __future__ import annotations

import asyncio
import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    LR,
    PAD,
    changed,
    credit,
    current_logprobs,
    drawn,
    gradients,
    same,
    sample,
    tiny_model,
    weights,
)
from precision import assert_fp32_close
from selection import quick_first
from transformers import LlamaForCausalLM

from toolwise.advantages import Grpo
from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import make_rows
from toolwise.errors import CheckpointError, ConfigError, ToolwiseError
from toolwise.learner.actor import Actor
from toolwise.learner.losses import PpoClip
from toolwise.learner.rows import build_rows
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.policies.transformers_generation import generate_batch
from toolwise.protocols import Sampling
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.routers import DirectRouter
from toolwise.tools.catalog import build_tools
from toolwise.training import checkpoint
from toolwise.training.checkpoint import StateRegistry
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    ScoredRollout,
    Task,
)

torch.set_num_threads(1)


# The same weights give the same log-probs in the learner and in the policy.


def real_rollouts(temperature: float) -> tuple[Any, list[CreditedRollout]]:
    """Episodes with real tools, sampled by the local policy from the bundled model."""
    model, chat = load_model("builtin:small", device="cpu")
    policy = LocalPolicy(model, chat, Sampling(temperature, max_new_tokens=24))
    scheduler = RolloutScheduler(policy, build_tools(["calculator", "search"]), max_episode_steps=4)
    tasks = [
        Task(
            task_id=str(place),
            prompt=row["prompt"],
            tools_kwargs=row["extra_info"]["tools_kwargs"],
            ground_truth=row["reward_model"]["ground_truth"],
        )
        for place, row in enumerate(make_rows(6, seed=0, split="train"))
    ]
    rollouts = asyncio.run(scheduler.roll_out(DirectRouter(0).decide(tasks, 2, 0)))
    scored = [ScoredRollout(r, EvaluateResult(score=float(i % 2)), r.steps) for i, r in enumerate(rollouts)]
    return model, Grpo()([AnnotatedRollout(s) for s in scored]).rollouts


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_ratio_is_one_for_the_same_weights_at_any_temperature(temperature: float) -> None:
    model, credited = real_rollouts(temperature)
    rows = build_rows(credited)
    assert any(len(c.steps) > 1 for c in credited)
    assert len(rows) == len(credited)  # every multi-turn rollout is one row
    actor = Actor(model, RunConfig(rollout={"temperature": temperature}))
    logprobs, old = current_logprobs(actor, credited), drawn(credited)
    assert len(logprobs) == sum(r.rollout.usage.sampled_tokens for r in credited) > 100
    assert_fp32_close(logprobs, old)
    assert torch.exp(logprobs - old) == pytest.approx(torch.ones(len(old)), abs=1e-4)
    elsewhere = current_logprobs(Actor(model, RunConfig(rollout={"temperature": 1.0})), credited)
    assert (elsewhere - old).abs().max() > 0.1
    metrics = actor.update(credited)
    assert metrics["canary/logprob_gap_max"] < 1e-4
    assert metrics["canary/logprob_gap_mean"] <= metrics["canary/logprob_gap_max"]
    assert metrics["actor/clip_frac"] == 0.0
    assert metrics["actor/kl"] == pytest.approx(0.0, abs=1e-4)


def test_log_probs_do_not_depend_on_the_rest_of_the_batch() -> None:
    model = tiny_model()
    actor = Actor(model, RunConfig())
    credited = sample(model, [1.0] * 4)
    together = current_logprobs(actor, credited)
    apart = torch.cat([current_logprobs(actor, [c]) for c in credited])
    assert_fp32_close(together, apart)


def test_forward_agrees_with_a_plain_pass_through_the_whole_model() -> None:
    model = tiny_model()
    [credited] = sample(model, [1.0])
    [row] = build_rows([credited])
    logits = copy.deepcopy(model).double()(torch.tensor(row.ids)[None]).logits[0].detach()
    plain = torch.log_softmax(logits / 0.5, -1)
    expected = [plain[at - 1, row.ids[at]].item() for at in range(1, len(row)) if row.sampled[at]]
    actor = Actor(model, RunConfig(rollout={"temperature": 0.5}))
    assert_fp32_close(current_logprobs(actor, [credited]), expected)


# What an update depends on, and what it does not.


@pytest.mark.parametrize("aggregation", ["token", "step", "rollout", "constant"])
@pytest.mark.parametrize("micro_batch_tokens", quick_first([1, 60, 100_000], [60]))
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    micro_batch_tokens: int, aggregation: Any, share_prefixes: bool
) -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -0.5, 2.0, -1.5, 0.3, -0.2], temperature=1.2, groups_of=3)
    settings = changed(
        LR,
        {"rollout": {"temperature": 1.2}},
        entropy_coef=0.01,
        loss_aggregation=aggregation,
        loss_length=16,
        max_grad_norm=1e9,
        share_prefixes=share_prefixes,
    )

    def run(tokens: int) -> tuple[torch.Tensor, float]:
        return gradients(Actor(copy.deepcopy(model), changed(settings, micro_batch_tokens=tokens)), credited)

    expected, expected_loss = run(200)
    gradient, loss = run(micro_batch_tokens)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_shared_prefixes_give_the_same_loss_and_gradient_with_fewer_tokens() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -0.5, 2.0, -1.5, 0.3, -0.2, 0.7, 0.1], groups_of=4)
    shared, flat = (Actor(copy.deepcopy(model), changed(LR, share_prefixes=share)) for share in (True, False))
    expected, expected_loss = gradients(flat, credited)
    gradient, loss = gradients(shared, credited)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    fresh = [Actor(copy.deepcopy(model), changed(LR, share_prefixes=share)) for share in (True, False)]
    computed = [actor.update(credited)["actor/computed_tokens"] for actor in fresh]
    assert computed[0] < computed[1]


def test_activation_checkpointing_changes_nothing_but_memory() -> None:
    model = tiny_model(attention_dropout=0.5)
    credited = sample(model, [1.0, -0.5, 2.0])
    plain, again = (Actor(copy.deepcopy(model), changed(LR, activation_checkpointing=c)) for c in (False, True))
    expected, _ = gradients(plain, credited)
    gradient, _ = gradients(again, credited)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-7)
    greedy = Sampling(do_sample=False, max_new_tokens=8)
    said = [
        list(generate_batch(actor.model, [[5, 6, 7]], [greedy], pad_id=PAD, policy_version=0)[0].token_ids)
        for actor in (plain, again)
    ]
    assert said[0] == said[1]  # generation still uses its cache


def test_the_loss_is_the_mean_over_sampled_tokens() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -0.5])
    counts = [sum(len(a) for a in c.advantages) for c in credited]
    expected = -(counts[0] * 1.0 + counts[1] * -0.5) / sum(counts)
    assert gradients(Actor(model, LR), credited)[1] == pytest.approx(expected, rel=1e-5)


def test_rows_without_sampled_tokens_change_nothing() -> None:
    credited = sample(tiny_model(), [1.0, -1.0, 0.5, 0.2])
    masked = credit([([5, 6, 7], [], [])], 3.0)
    settings = changed(LR, mini_batches=2, micro_batch_tokens=40)
    plain, with_masked = (Actor(tiny_model(), settings) for _ in range(2))
    metrics = plain.update(credited)
    assert with_masked.update([masked, *credited, masked]) == metrics
    assert same(weights(plain.model), weights(with_masked.model))


def test_fully_masked_rows_alone_give_finite_metrics_and_no_update() -> None:
    actor = Actor(tiny_model(), changed(LR, weight_decay=0.0))
    before = weights(actor.model)
    metrics = actor.update([credit([([5, 6, 7], [], [])], 3.0)])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/updates"] == 0.0
    assert same(weights(actor.model), before)


def test_an_empty_update_still_advances_the_version() -> None:
    actor = Actor(tiny_model(), LR)
    assert actor.update([]) == {"actor/updates": 0.0}
    assert actor.version == 1


@pytest.mark.parametrize(("calls", "version"), [(1, 0), (2, 1)])
def test_the_version_tells_whether_a_failed_update_has_changed_weights(calls: int, version: int) -> None:
    """A run whose loss fails saves the weights only if none has changed."""
    remaining = [calls]

    class Fails(PpoClip):
        def __call__(self, *tensors: Any) -> Any:
            remaining[0] -= 1
            if not remaining[0]:
                raise ValueError("no such token")
            return super().__call__(*tensors)

    model = tiny_model()
    actor = Actor(model, changed(LR, mini_batches=2), loss=Fails())
    before = actor.weights_checksum()
    with pytest.raises(ToolwiseError, match=r"Fails failed: ValueError: no such token \("):
        actor.update(sample(model, [1.0, -1.0, 1.0, -1.0]))
    assert (actor.version, actor.weights_checksum() == before) == (version, version == 0)


def test_zero_advantages_change_no_weights() -> None:
    actor = Actor(tiny_model(), LR)
    before = weights(actor.model)
    metrics = actor.update(sample(actor.model, [0.0, 0.0]))
    assert same(weights(actor.model), before)
    assert metrics["actor/grad_norm"] == 0.0


def test_an_update_leaves_the_rollouts_alone() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -1.0])
    before = (
        [step.model_dump() for c in credited for step in c.steps],
        [a.tolist() for c in credited for a in c.advantages],
    )
    Actor(model, changed(LR, mini_batches=2)).update(credited)
    assert (
        [s.model_dump() for c in credited for s in c.steps],
        [a.tolist() for c in credited for a in c.advantages],
    ) == before


def test_a_masked_row_has_no_gradient_even_where_it_is_not_a_number() -> None:
    """NaN · 0 is NaN: masked tokens must be left out of the computation, not multiplied by 0."""
    model = tiny_model()
    credited = sample(model, [1.0, -1.0])
    masked = credit([([5, 6, 7], [], [])], float("nan"))
    expected, expected_loss = gradients(Actor(copy.deepcopy(model), LR), credited)
    gradient, loss = gradients(Actor(copy.deepcopy(model), LR), [masked, *credited])
    assert torch.equal(gradient, expected)
    assert loss == expected_loss


# One importance correction, never two.


def off_policy(shift: float, *, seed: int = 0) -> tuple[Any, list[CreditedRollout]]:
    """Rollouts whose log-probs differ by `shift` from the learner's, as if sampled elsewhere."""
    model = tiny_model()
    found = []
    for c in sample(model, [1.0, -0.5, 0.7], seed=seed):
        steps = [
            (s.policy_logprobs["prompt_ids"], s.policy_logprobs["token_ids"],
             [value + shift for value in s.policy_logprobs["logprobs"]])
            for s in c.steps if s.policy_logprobs
        ]  # fmt: skip
        found.append(credit(steps, float(c.advantages[0][0]), name=c.rollout.rollout_id))
    return model, found


WIDE = changed(LR, clip_ratio_low=0.99, clip_ratio_high=99.0, dual_clip=0, max_grad_norm=1e9)


@pytest.mark.parametrize("shift", [-0.3, 0.2])
def test_the_importance_correction_is_applied_once(shift: float) -> None:
    """π/π_rollout, or (π/π_old)·(π_old/π_rollout): the same number, since π_old is π in the first step."""
    model, credited = off_policy(shift)
    plain, _ = gradients(Actor(copy.deepcopy(model), changed(WIDE, old_logprobs="rollout")), credited)
    again, _ = gradients(Actor(copy.deepcopy(model), changed(WIDE, old_logprobs="recompute")), credited)
    torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-6)
    on_policy, _ = gradients(Actor(copy.deepcopy(model), WIDE), off_policy(0.0)[1])
    torch.testing.assert_close(plain, on_policy * math.exp(-shift), rtol=1e-4, atol=1e-6)


def test_the_importance_weight_is_capped_and_reported() -> None:
    model, credited = off_policy(-3.0)
    capped = changed(WIDE, old_logprobs="recompute", importance_cap=1.5)
    gradient, _ = gradients(Actor(copy.deepcopy(model), capped), credited)
    on_policy, _ = gradients(Actor(copy.deepcopy(model), WIDE), off_policy(0.0)[1])
    torch.testing.assert_close(gradient, 1.5 * on_policy, rtol=1e-4, atol=1e-6)
    metrics = Actor(copy.deepcopy(model), capped).update(credited)
    assert metrics["actor/importance_weight"] == pytest.approx(1.5)
    assert metrics["actor/clip_frac"] == 0.0


def test_old_log_probs_taken_before_the_first_step_serve_all_steps() -> None:
    """Annotated, then two epochs: the second step's ratio is against the weights before the first."""
    model, credited = off_policy(0.0)
    settings = changed(LR, lr=0.05, ppo_epochs=2, old_logprobs="recompute")
    actor = Actor(copy.deepcopy(model), settings)
    annotated = actor.annotate([c.annotated.scored for c in credited])
    assert all(a.old_logprobs is not None for a in annotated)
    with_old = [replace(c, annotated=a) for c, a in zip(credited, annotated, strict=True)]
    metrics = actor.update(with_old)
    rollout = Actor(copy.deepcopy(model), changed(settings, old_logprobs="rollout"))
    assert metrics["actor/kl"] == pytest.approx(rollout.update(credited)["actor/kl"], rel=1e-3)
    assert abs(metrics["actor/kl"]) > 1e-4


def test_several_steps_without_old_log_probs_are_rejected() -> None:
    model, credited = off_policy(0.0)
    with pytest.raises(ToolwiseError, match=r"call annotate\(\) before"):
        Actor(model, changed(LR, ppo_epochs=2, old_logprobs="recompute")).update(credited)


# Annotation: only what is needed.


def test_only_needed_annotations_are_computed() -> None:
    model = tiny_model()
    scored = [c.annotated.scored for c in sample(model, [1.0, -1.0])]
    [first, _] = Actor(model, LR).annotate(scored)
    assert (first.old_logprobs, first.ref_logprobs, first.values) == (None, None, None)
    one_step = Actor(model, changed(LR, old_logprobs="recompute"))
    assert one_step.annotate(scored)[0].old_logprobs is None  # the step's own log-probs suffice


def test_annotations_align_with_the_sampled_tokens_of_each_step() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -1.0, 0.5])
    actor = Actor(model, LR, needs=frozenset({"old_logprobs", "ref_logprobs"}))
    annotated = actor.annotate([c.annotated.scored for c in credited])
    for c, a in zip(credited, annotated, strict=True):
        assert a.old_logprobs is not None
        assert a.ref_logprobs is not None
        for step, old, ref in zip(c.steps, a.old_logprobs, a.ref_logprobs, strict=True):
            assert old.dtype == np.float32
            assert_fp32_close(old, (step.policy_logprobs or {})["logprobs"])
            assert_fp32_close(ref, old)


def test_an_estimator_that_needs_values_needs_a_critic() -> None:
    with pytest.raises(ConfigError, match="no critic"):
        Actor(tiny_model(), LR, needs=frozenset({"values"}))


# Learning.


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely() -> None:
    model = tiny_model()
    good, bad = sample(model, [1.0, -1.0], seed=3)
    actor = Actor(model, changed(LR, lr=3e-3))
    before = current_logprobs(actor, [good]).sum(), current_logprobs(actor, [bad]).sum()
    metrics = actor.update([good, bad])
    assert current_logprobs(actor, [good]).sum() > before[0]
    assert current_logprobs(actor, [bad]).sum() < before[1]
    assert metrics["actor/updates"] == 1.0
    assert actor.version == 1


def test_tokens_between_turns_are_never_trained_on() -> None:
    """Tokens between turns are context, not targets: without an advantage on turn two, its context is irrelevant."""
    model = tiny_model()
    [whole] = sample(model, [1.0])
    first = replace(whole, advantages=(whole.advantages[0], np.zeros_like(whole.advantages[1])))
    turns = [(s.policy_logprobs["prompt_ids"], s.policy_logprobs["token_ids"], s.policy_logprobs["logprobs"])
             for s in whole.steps if s.policy_logprobs]  # fmt: skip
    seen, ids, _ = turns[1]
    other = [*seen[:-4], *[(token + 1) % 48 for token in seen[-4:]]]
    actor = Actor(copy.deepcopy(model), RunConfig())
    drawn = current_logprobs(actor, [credit([turns[0], (other, ids, [0.0] * len(ids))], 1.0)])[len(turns[0][1]) :]
    changed = credit([turns[0], (other, ids, drawn.tolist())], 1.0)
    changed = replace(changed, advantages=first.advantages)
    left, right = (gradients(Actor(copy.deepcopy(model), LR), [c])[0] for c in (first, changed))
    assert float((left - right).norm() / left.norm()) < 1e-5


def test_the_entropy_bonus_raises_entropy() -> None:
    def entropy_after(coefficient: float) -> float:
        model = tiny_model()
        credited = sample(model, [0.0] * 4)
        actor = Actor(model, changed(RunConfig(), lr=3e-3, entropy_coef=coefficient, mismatch_check="off"))
        actor.update(credited)
        return actor.update(credited)["actor/entropy"]

    assert entropy_after(0.1) > entropy_after(0.0) + 0.01


def test_ratios_outside_the_clip_are_counted_and_stop_pushing() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, 1.0])
    stale = [
        replace(
            c,
            steps=tuple(
                s.model_copy(update={"policy_logprobs": {**s.policy_logprobs, "logprobs": [
                    value - 1.0 for value in s.policy_logprobs["logprobs"]]}})
                for s in c.steps if s.policy_logprobs
            ),
        )
        for c in credited
    ]  # fmt: skip
    before = weights(model)
    metrics = Actor(model, LR).update(stale)
    assert metrics["actor/clip_frac"] == pytest.approx(1.0)
    assert metrics["actor/kl"] == pytest.approx(-1.0, abs=1e-4)
    assert same(weights(model), before)


@pytest.mark.parametrize(("epochs", "mini_batches", "updates"), [(1, 1, 1), (1, 3, 3), (2, 2, 4), (1, 99, 4)])
def test_number_of_optimiser_steps_per_batch(epochs: int, mini_batches: int, updates: int) -> None:
    actor = Actor(tiny_model(), changed(LR, ppo_epochs=epochs, mini_batches=mini_batches))
    metrics = actor.update(sample(actor.model, [1.0, -1.0, 0.5, -0.5]))
    assert metrics["actor/updates"] == updates
    assert actor.version == 1


def test_the_rate_warms_up_over_updates() -> None:
    actor = Actor(tiny_model(), changed(LR, lr=0.008, warmup_steps=4, mini_batches=2))
    credited = sample(actor.model, [1.0, -1.0])
    rates = [actor.update(credited)["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.008, 0.008])
    assert actor.optimizer.adamw.param_groups[0]["lr"] == pytest.approx(0.008)


def test_dropout_does_not_change_the_ratio() -> None:
    actor = Actor(tiny_model(attention_dropout=0.5), changed(RunConfig(), lr=1e-9))
    metrics = actor.update(sample(actor.model, [1.0, -1.0]))
    assert metrics["actor/clip_frac"] == 0.0
    assert metrics["actor/kl"] == pytest.approx(0.0, abs=1e-5)
    assert not actor.model.training


# NaN and inf are skipped and counted.


def poison(credited: CreditedRollout) -> CreditedRollout:
    return replace(credited, advantages=tuple(a * np.float32("nan") for a in credited.advantages))


def test_a_gradient_that_is_not_a_number_is_skipped_and_counted() -> None:
    actor = Actor(tiny_model(), LR)
    good, bad = sample(actor.model, [1.0, -1.0])
    before = weights(actor.model)
    metrics = actor.update([good, poison(bad)])
    assert same(weights(actor.model), before)
    assert actor.optimizer.guard.skipped == 1
    assert metrics["actor/skipped_updates"] == 1.0
    assert not math.isfinite(metrics["actor/grad_norm"])
    assert not actor.optimizer.adamw.state  # the moments are untouched
    assert all(p.grad is None for p in actor.model.parameters())


def test_a_skipped_update_leaves_no_trace() -> None:
    credited = sample(tiny_model(), [1.0, -1.0])
    clean, shaken = (Actor(tiny_model(), LR) for _ in range(2))
    shaken.update([poison(c) for c in credited])
    assert shaken.update(credited)["actor/skipped_updates"] == 1.0
    clean.update(credited)
    assert same(weights(clean.model), weights(shaken.model))


def test_one_bad_mini_batch_costs_one_update_only() -> None:
    actor = Actor(tiny_model(), changed(LR, mini_batches=2))
    good, bad = sample(actor.model, [1.0, -1.0])
    before = weights(actor.model)
    metrics = actor.update([good, poison(bad)])
    assert metrics["actor/updates"] == 2.0
    assert metrics["actor/skipped_updates"] == 1.0
    after = weights(actor.model)
    assert not same(after, before)
    assert all(torch.isfinite(w).all() for w in after)


def test_a_skipped_update_names_its_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    actor = Actor(tiny_model(), LR)
    good, bad = sample(actor.model, [1.0, -1.0])
    actor.update([good, poison(bad)])
    assert "skipped an update of the actor: the gradient norm is nan; rollouts r1" in caplog.text
    assert "r0" not in caplog.text


def test_a_spike_is_skipped_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    actor = Actor(tiny_model(), changed(LR, lr=1e-9, spike_factor=20.0))
    calm = sample(actor.model, [1.0, -1.0, 0.5])
    for _ in range(20):
        assert actor.update(calm)["actor/skipped_spikes"] == 0.0
    before = weights(actor.model)
    wild = [replace(calm[0], advantages=tuple(a * 1000 for a in calm[0].advantages)), *calm[1:]]
    metrics = actor.update(wild)
    assert metrics["actor/skipped_spikes"] == metrics["actor/skipped_updates"] == 1.0
    assert metrics["actor/update_norm"] == 0.0
    assert same(weights(actor.model), before)
    assert "times the median" in caplog.text
    assert "rollouts r0" in caplog.text


def test_gradients_are_clipped_to_their_norm() -> None:
    """The metric is the norm before clipping; a much tighter clip gives the same direction."""
    model = tiny_model()
    credited = sample(model, [5.0, -5.0])
    loose, tight = (Actor(copy.deepcopy(model), changed(RunConfig(), max_grad_norm=norm)) for norm in (1e9, 1e-3))
    gradient, _ = gradients(loose, credited)
    assert tight.update(credited)["actor/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert float(gradient.norm()) > 1e-3
    averages = [torch.cat([s["exp_avg"].flatten() for s in a.optimizer.adamw.state.values()]) for a in (loose, tight)]
    assert float(averages[1].norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(averages[0], averages[1], dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-5)


# Half precision.


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Some machines report bf16 instructions that they cannot run; torch's own kernels need none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@pytest.mark.usefixtures("plain_kernels")
def test_half_precision_weights_do_not_lose_small_updates() -> None:
    model = tiny_model().bfloat16()
    credited = sample(model, [1.0, -1.0, 0.5])
    before = weights(model)
    actor = Actor(model, changed(RunConfig(), lr=1e-5, mismatch_check="off"))
    for _ in range(40):
        actor.update(credited)
    # Between 2^-4 and 2^-3 bf16 numbers lie 4.9e-4 apart: one step of 1e-5 is rounded away, 40 of them are not.
    pairs = [(a, b) for a, b in zip(before, weights(model), strict=True)]
    middling = [(a[at], b[at]) for a, b in pairs for at in [(a.abs() > 2**-4) & (a.abs() < 2**-3)]]
    moved = sum(int((a != b).sum()) for a, b in middling)
    assert moved > 0.2 * sum(len(a) for a, _ in middling)
    assert all(w.dtype == torch.bfloat16 for w in weights(model))


@pytest.mark.usefixtures("plain_kernels")
def test_half_precision_continues_bit_identically(tmp_path: Path) -> None:
    def fresh() -> Actor:
        return Actor(tiny_model().bfloat16(), changed(RunConfig(), lr=1e-5, mismatch_check="off"))

    credited = sample(fresh().model, [1.0, -1.0, 0.5])
    straight = fresh()
    for _ in range(6):
        straight.update(credited)
    first = fresh()
    for _ in range(3):
        first.update(credited)
    second = through_disk(first, fresh(), tmp_path)
    for _ in range(3):
        second.update(credited)
    assert same(straight.state_dict()["optimizer"]["masters"], second.state_dict()["optimizer"]["masters"])
    assert same(weights(straight.model), weights(second.model))


@pytest.mark.usefixtures("plain_kernels")
def test_weights_loaded_into_half_precision_are_what_is_trained_on(tmp_path: Path) -> None:
    """Without the optimiser state, fp32 masters must follow the loaded weights."""
    source, target = (Actor(tiny_model(seed).bfloat16(), changed(RunConfig(), lr=1e-9)) for seed in (0, 1))
    credited = sample(source.model, [1.0, -1.0])
    source.save_model(tmp_path)
    target.load_weights(tmp_path)
    target.update(credited)
    assert same(weights(target.model), weights(source.model))


# State.


def through_disk(actor: Actor, fresh: Actor, folder: Path) -> Actor:
    """What a run does when it stops and resumes."""
    state = StateRegistry({"actor": actor}).state_dict()
    saved = checkpoint.save(folder, 1, state, extra_files={"model": actor.save_model})
    found = checkpoint.load(saved.path)
    StateRegistry({"actor": fresh}).load_state_dict(found.state())
    fresh.load_weights(found.path / "model")
    return fresh


@pytest.mark.parametrize("on_disk", [False, True])
def test_resuming_between_two_updates_changes_nothing(on_disk: bool, tmp_path: Path) -> None:
    settings = changed(LR, {"seed": 5}, warmup_steps=3, mini_batches=2, weight_decay=0.01, entropy_coef=0.01)
    batches = [sample(tiny_model(), [1.0, -1.0, 0.5, -0.3], seed=seed) for seed in (1, 2)]
    straight = Actor(tiny_model(), settings)
    straight.update(batches[0])
    expected = straight.update(batches[1])

    first = Actor(tiny_model(), settings)
    first.update(batches[0])
    second = Actor(tiny_model(seed=9), settings)
    if on_disk:
        second = through_disk(first, second, tmp_path)
    else:
        second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.update(batches[1]) == expected
    assert second.version == 2
    assert same(weights(straight.model), weights(second.model))


def test_the_count_of_skipped_updates_survives(tmp_path: Path) -> None:
    first = Actor(tiny_model(), LR)
    first.update([poison(c) for c in sample(first.model, [1.0, 1.0])])
    assert through_disk(first, Actor(tiny_model(), LR), tmp_path).optimizer.guard.skipped == 1


def test_plain_transformers_loads_what_was_saved(tmp_path: Path) -> None:
    actor = Actor(tiny_model(), LR)
    actor.update(sample(actor.model, [1.0, -1.0]))
    actor.save_model(tmp_path)
    assert same(weights(LlamaForCausalLM.from_pretrained(tmp_path)), weights(actor.model))


def test_after_loading_weights_the_policy_samples_from_them(tmp_path: Path) -> None:
    """No stale cache: the policy that shares the model generates what a fresh one would."""
    source, target = tiny_model(0), tiny_model(1)
    greedy = Sampling(do_sample=False, max_new_tokens=12)

    def say(model: Any) -> list[int]:
        [out] = generate_batch(model, [[5, 6, 7]], [greedy], pad_id=PAD, policy_version=0)
        return list(out.token_ids)

    assert say(source) != say(target)
    source.save_pretrained(tmp_path)
    Actor(target, LR).load_weights(tmp_path)
    assert say(source) == say(target)


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    tiny_model(hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds a different model") as caught:
        Actor(tiny_model(), LR).load_weights(tmp_path)
    assert "\n" not in str(caught.value)
