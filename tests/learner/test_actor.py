"""The actor: what it computes agrees with what the policy sampled, and what it learns depends on that alone."""

from __future__ import annotations

import asyncio
import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from toolwise import checkpoint
from toolwise.advantages import Grpo
from toolwise.checkpoint import Registry
from toolwise.demo.tasks import make_rows
from toolwise.errors import CheckpointError
from toolwise.learner.actor import Actor, ActorSettings
from toolwise.learner.rows import Row, build_rows
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.policies.decoding import generate_batch
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.direct import DirectRouter
from toolwise.tools.catalog import build_tools
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    Usage,
)

torch.set_num_threads(1)
PAD = 0
LR = ActorSettings(lr=1e-2)


def tiny_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 48,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "pad_token_id": PAD,
            "eos_token_id": 1,
        }
        | changes
    )
    return LlamaForCausalLM(config).eval()


def credit(turns: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]], advantage: float) -> CreditedRollout:
    """A rollout of (seen, sampled, log-probs) turns."""
    steps = tuple(
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={"prompt_ids": list(seen), "token_ids": list(ids), "logprobs": list(logprobs)},
        )
        for index, (seen, ids, logprobs) in enumerate(turns)
    )
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    rollout = Rollout("r", "g", 0, 0, task, None, steps, task.prompt, StopReason.ANSWERED, Usage())
    advantages = tuple(np.full(len(ids), advantage, dtype=np.float32) for _, ids, _ in turns)
    return CreditedRollout(
        AnnotatedRollout(ScoredRollout(rollout, EvaluateResult(score=0.0), steps)), steps, advantages
    )


def sample(
    model: Any, advantages: Sequence[float], *, seed: int = 0, temperature: float = 1.0
) -> list[CreditedRollout]:
    """Two-turn episodes of different lengths, drawn from `model`, with tokens from outside between the turns."""
    rng = np.random.default_rng(seed)
    found = []
    for place, advantage in enumerate(advantages):
        seen = rng.integers(2, 48, 3 + 5 * (place % 4)).tolist()
        turns = []
        for turn in range(2):
            sampling = Sampling(temperature, max_new_tokens=2 + place % 3, seed=100 * seed + 10 * place + turn)
            [out] = generate_batch(model, [seen], [sampling], pad_id=PAD, policy_version=0)
            turns.append((seen, list(out.token_ids), list(out.logprobs)))
            seen = [*seen, *out.token_ids, *rng.integers(2, 48, 4).tolist()]
        found.append(credit(turns, advantage))
    return found


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def gradients(actor: Actor, credited: Sequence[CreditedRollout]) -> tuple[torch.Tensor, float]:
    """The whole gradient that one update accumulates, before clipping, and its loss."""
    found: dict[int, torch.Tensor] = {}

    def keep(place: int) -> Any:
        return lambda p: found.__setitem__(place, p.grad.detach().clone())

    hooks = [p.register_post_accumulate_grad_hook(keep(i)) for i, p in enumerate(actor.model.parameters())]
    metrics = actor.update(credited)
    for hook in hooks:
        hook.remove()
    return torch.cat([found[i].flatten() for i in sorted(found)]), metrics["actor/loss"]


def forward(actor: Actor, credited: Sequence[CreditedRollout]) -> torch.Tensor:
    with torch.no_grad():
        return actor.forward(build_rows(credited))[0]


# The same weights give the same log-probs, here and where tokens are drawn.


def real_rollouts(temperature: float) -> tuple[Any, int, list[CreditedRollout]]:
    """Episodes with real tools, by the policy that training uses, over the model that ships."""
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
    return model, chat.pad_id, Grpo()([AnnotatedRollout(s) for s in scored])


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_ratio_is_one_for_the_same_weights_at_any_temperature(temperature: float) -> None:
    model, pad, credited = real_rollouts(temperature)
    rows = build_rows(credited)
    assert any(len(c.steps) > 1 for c in credited)
    assert len(rows) == len(credited)  # every multi-turn rollout is one row
    actor = Actor(model, ActorSettings(temperature=temperature), pad_id=pad)
    with torch.no_grad():
        logprobs, _, old, _ = actor.forward(rows)
    assert len(logprobs) == sum(r.rollout.usage.sampled_tokens for r in credited) > 100
    assert (logprobs - old).abs().max() < 1e-4
    assert torch.exp(logprobs - old) == pytest.approx(torch.ones(len(old)), abs=1e-4)
    with torch.no_grad():
        elsewhere = Actor(model, ActorSettings(temperature=1.0), pad_id=pad).forward(rows)[0]
    assert (elsewhere - old).abs().max() > 0.1
    metrics = actor.update(credited)
    assert metrics["canary/logprob_gap_max"] < 1e-4
    assert metrics["canary/logprob_gap_mean"] <= metrics["canary/logprob_gap_max"]
    assert metrics["actor/clip_frac"] == 0.0
    assert metrics["actor/kl"] == pytest.approx(0.0, abs=1e-4)


def test_the_canary_sings_when_policy_and_learner_disagree() -> None:
    credited = sample(tiny_model(), [1.0, -1.0])
    metrics = Actor(tiny_model(seed=1), ActorSettings(), pad_id=PAD).update(credited)
    assert metrics["canary/logprob_gap_mean"] > 0.1


def test_padding_does_not_change_log_probs() -> None:
    model = tiny_model()
    actor = Actor(model, ActorSettings(), pad_id=PAD)
    credited = sample(model, [1.0] * 4)
    together = forward(actor, credited)
    apart = torch.cat([forward(actor, [c]) for c in credited])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-5)
    long = Row("r", [5] * 100, [False] * 99 + [True], [0.0] * 100, [0.0] * 100)
    with torch.no_grad():
        padded = actor.forward([*build_rows(credited), long])[0][:-1]
    torch.testing.assert_close(padded, apart, rtol=0, atol=1e-5)


def test_log_probs_do_not_depend_on_which_token_pads() -> None:
    model = tiny_model()
    credited = sample(model, [1.0] * 3)
    zero, other = (forward(Actor(model, ActorSettings(), pad_id=pad), credited) for pad in (PAD, 7))
    assert torch.equal(zero, other)


def test_forward_agrees_with_a_plain_pass_through_the_whole_model() -> None:
    model = tiny_model()
    [credited] = sample(model, [1.0])
    [row] = build_rows([credited])
    logits = model(torch.tensor([row.ids])).logits[0].detach()
    plain = torch.log_softmax(logits / 0.5, -1)
    expected = [plain[at - 1, row.ids[at]].item() for at in range(1, len(row)) if row.sampled[at]]
    actor = Actor(model, ActorSettings(temperature=0.5), pad_id=PAD)
    assert forward(actor, [credited]).tolist() == pytest.approx(expected, abs=1e-5)


# What an update depends on, and what it does not.


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("micro_batch_tokens", [1, 60, 100_000])
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    micro_batch_tokens: int, entropy_coef: float
) -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -0.5, 2.0, -1.5, 0.3, -0.2], temperature=1.2)
    settings = ActorSettings(temperature=1.2, entropy_coef=entropy_coef)

    def run(tokens: int) -> tuple[torch.Tensor, float]:
        return gradients(
            Actor(copy.deepcopy(model), replace(settings, micro_batch_tokens=tokens), pad_id=PAD), credited
        )

    expected, expected_loss = run(200)
    gradient, loss = run(micro_batch_tokens)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-6
    assert loss == pytest.approx(expected_loss, rel=1e-6)


def test_the_loss_is_the_mean_over_sampled_tokens() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -0.5])
    counts = [sum(len(a) for a in c.advantages) for c in credited]
    expected = -(counts[0] * 1.0 + counts[1] * -0.5) / sum(counts)
    assert gradients(Actor(model, LR, pad_id=PAD), credited)[1] == pytest.approx(expected, rel=1e-5)


def test_rows_without_sampled_tokens_change_nothing() -> None:
    credited = sample(tiny_model(), [1.0, -1.0, 0.5, 0.2])
    masked = credit([([5, 6, 7], [], [])], 3.0)
    settings = replace(LR, mini_batches=2, micro_batch_tokens=40)
    plain, with_masked = (Actor(tiny_model(), settings, pad_id=PAD) for _ in range(2))
    metrics = plain.update(credited)
    assert with_masked.update([masked, *credited, masked]) == metrics
    assert same(weights(plain.model), weights(with_masked.model))


def test_fully_masked_rows_alone_give_finite_figures_and_move_nothing() -> None:
    actor = Actor(tiny_model(), replace(LR, weight_decay=0.0), pad_id=PAD)
    before = weights(actor.model)
    metrics = actor.update([credit([([5, 6, 7], [], [])], 3.0)])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["actor/updates"] == 0.0
    assert same(weights(actor.model), before)


def test_a_masked_row_in_a_batch_has_no_gradient() -> None:
    model = tiny_model()
    rows = build_rows(sample(model, [1.0, 1.0]))
    rows[1] = replace(rows[1], sampled=[False] * len(rows[1]))
    actor = Actor(model, ActorSettings(), pad_id=PAD)
    logprobs, entropy, old, advantages = actor.forward(rows)
    assert len(logprobs) == len(entropy) == len(old) == len(advantages) == sum(rows[0].sampled)
    embedded = model.get_input_embeddings().weight
    logprobs.sum().backward()
    assert embedded.grad is not None
    only_in_masked = sorted(set(rows[1].ids) - set(rows[0].ids))
    assert only_in_masked
    assert torch.isfinite(embedded.grad).all()
    # Tied or not, an input token of the masked row alone moves no input embedding.
    assert embedded.grad[only_in_masked].abs().max() == 0.0


def test_nothing_to_learn_from_is_still_a_version() -> None:
    actor = Actor(tiny_model(), LR, pad_id=PAD)
    assert actor.update([]) == {"actor/updates": 0.0}
    assert actor.version == 1


def test_zero_advantages_move_nothing() -> None:
    actor = Actor(tiny_model(), LR, pad_id=PAD)
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
    Actor(model, replace(LR, mini_batches=2), pad_id=PAD).update(credited)
    assert (
        [s.model_dump() for c in credited for s in c.steps],
        [a.tolist() for c in credited for a in c.advantages],
    ) == before


# Learning.


def test_an_update_makes_good_tokens_likelier_and_bad_ones_less_likely() -> None:
    model = tiny_model()
    good, bad = sample(model, [1.0, -1.0], seed=3)
    actor = Actor(model, replace(LR, lr=3e-3), pad_id=PAD)
    before = forward(actor, [good]).sum(), forward(actor, [bad]).sum()
    metrics = actor.update([good, bad])
    assert forward(actor, [good]).sum() > before[0]
    assert forward(actor, [bad]).sum() < before[1]
    assert metrics["actor/updates"] == 1.0
    assert actor.version == 1


def test_tokens_from_outside_are_never_learned() -> None:
    """The tokens between two turns are read, not taught: with no advantage on the second turn, its context is moot."""
    model = tiny_model()
    [whole] = sample(model, [1.0])
    first = replace(whole, advantages=(whole.advantages[0], np.zeros_like(whole.advantages[1])))
    turns = [(s.policy_logprobs["prompt_ids"], s.policy_logprobs["token_ids"], s.policy_logprobs["logprobs"])
             for s in whole.steps if s.policy_logprobs]  # fmt: skip
    seen, ids, _ = turns[1]
    other = [*seen[:-4], *[(token + 1) % 48 for token in seen[-4:]]]
    actor = Actor(copy.deepcopy(model), ActorSettings(), pad_id=PAD)
    drawn = forward(actor, [credit([turns[0], (other, ids, [0.0] * len(ids))], 1.0)])[len(turns[0][1]) :]
    changed = credit([turns[0], (other, ids, drawn.tolist())], 1.0)
    changed = replace(changed, advantages=first.advantages)
    left, right = (gradients(Actor(copy.deepcopy(model), LR, pad_id=PAD), [c])[0] for c in (first, changed))
    assert float((left - right).norm() / left.norm()) < 1e-5


def test_the_entropy_bonus_raises_entropy() -> None:
    def entropy_after(coefficient: float) -> float:
        model = tiny_model()
        credited = sample(model, [0.0] * 4)
        actor = Actor(model, ActorSettings(lr=3e-3, entropy_coef=coefficient), pad_id=PAD)
        actor.update(credited)
        with torch.no_grad():
            return float(actor.forward(build_rows(credited))[1].mean())

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
    metrics = Actor(model, LR, pad_id=PAD).update(stale)
    assert metrics["actor/clip_frac"] == pytest.approx(1.0)
    assert metrics["actor/kl"] == pytest.approx(-1.0, abs=1e-4)
    assert same(weights(model), before)


@pytest.mark.parametrize(("epochs", "mini_batches", "updates"), [(1, 1, 1), (1, 3, 3), (2, 2, 4), (1, 99, 4)])
def test_optimiser_steps_a_batch(epochs: int, mini_batches: int, updates: int) -> None:
    actor = Actor(tiny_model(), replace(LR, ppo_epochs=epochs, mini_batches=mini_batches), pad_id=PAD)
    metrics = actor.update(sample(actor.model, [1.0, -1.0, 0.5, -0.5]))
    assert metrics["actor/updates"] == updates
    assert actor.version == 1


def test_each_epoch_goes_through_every_row_once_and_each_in_an_order_of_its_own() -> None:
    def orders(seed: int) -> list[list[tuple[int, ...]]]:
        """The rows of each optimiser step, over two updates of two epochs."""
        actor = Actor(tiny_model(), ActorSettings(lr=1e-9, ppo_epochs=2, mini_batches=4, seed=seed), pad_id=PAD)
        credited = sample(actor.model, [1.0] * 8)
        seen: list[list[tuple[int, ...]]] = []
        forward_rows = actor.forward

        def watch(rows: Sequence[Row]) -> Any:
            if torch.is_grad_enabled():  # the canary's look does not count
                seen.append(sorted(tuple(row.ids) for row in rows))
            return forward_rows(rows)

        actor.forward = watch  # type: ignore[method-assign]
        for _ in range(2):
            actor.update(credited)
        return seen

    seen = orders(seed=0)
    epochs = [seen[at : at + 4] for at in range(0, 16, 4)]
    everything = sorted(row for step in epochs[0] for row in step)
    assert len(set(everything)) == 8
    assert all(sorted(row for step in epoch for row in step) == everything for epoch in epochs)
    assert all(len(step) == 2 for epoch in epochs for step in epoch)
    assert len({str(epoch) for epoch in epochs}) == 4
    assert orders(seed=0) == seen
    assert orders(seed=1) != seen


def test_the_rate_warms_up_over_updates() -> None:
    actor = Actor(tiny_model(), ActorSettings(lr=0.008, warmup_steps=4, mini_batches=2), pad_id=PAD)
    credited = sample(actor.model, [1.0, -1.0])
    rates = [actor.update(credited)["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.008, 0.008])
    assert actor.optimizer.param_groups[0]["lr"] == pytest.approx(0.008)


def test_dropout_does_not_put_the_ratio_off_one() -> None:
    actor = Actor(tiny_model(attention_dropout=0.5), ActorSettings(lr=1e-9), pad_id=PAD)
    metrics = actor.update(sample(actor.model, [1.0, -1.0]))
    assert metrics["actor/clip_frac"] == 0.0
    assert metrics["actor/kl"] == pytest.approx(0.0, abs=1e-5)
    assert not actor.model.training


# What is not a number is skipped and counted.


def poison(credited: CreditedRollout) -> CreditedRollout:
    return replace(credited, advantages=tuple(a * np.float32("nan") for a in credited.advantages))


def test_a_gradient_that_is_not_a_number_is_skipped_and_counted() -> None:
    actor = Actor(tiny_model(), LR, pad_id=PAD)
    good, bad = sample(actor.model, [1.0, -1.0])
    before = weights(actor.model)
    metrics = actor.update([good, poison(bad)])
    assert same(weights(actor.model), before)
    assert actor.skipped_updates == 1
    assert metrics["actor/skipped_updates"] == 1.0
    assert not math.isfinite(metrics["actor/grad_norm"])
    assert not actor.optimizer.state  # nothing was averaged in
    assert all(p.grad is None for p in actor.model.parameters())


def test_after_a_skipped_update_learning_goes_on_as_if_it_had_not_been() -> None:
    credited = sample(tiny_model(), [1.0, -1.0])
    clean, shaken = (Actor(tiny_model(), LR, pad_id=PAD) for _ in range(2))
    shaken.update([poison(c) for c in credited])
    assert shaken.update(credited)["actor/skipped_updates"] == 1.0
    clean.update(credited)
    assert same(weights(clean.model), weights(shaken.model))


def test_one_bad_mini_batch_costs_one_update_only() -> None:
    actor = Actor(tiny_model(), replace(LR, mini_batches=2), pad_id=PAD)
    good, bad = sample(actor.model, [1.0, -1.0])
    before = weights(actor.model)
    metrics = actor.update([good, poison(bad)])
    assert metrics["actor/updates"] == 2.0
    assert metrics["actor/skipped_updates"] == 1.0
    after = weights(actor.model)
    assert not same(after, before)
    assert all(torch.isfinite(w).all() for w in after)


def test_gradients_are_clipped_to_their_norm() -> None:
    """The figure is the norm before clipping; a far tighter clip gives the same direction."""
    model = tiny_model()
    credited = sample(model, [5.0, -5.0])
    loose, tight = (Actor(copy.deepcopy(model), ActorSettings(max_grad_norm=norm), pad_id=PAD) for norm in (1e9, 1e-3))
    gradient, _ = gradients(loose, credited)
    assert tight.update(credited)["actor/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert float(gradient.norm()) > 1e-3
    averages = [torch.cat([s["exp_avg"].flatten() for s in a.optimizer.state.values()]) for a in (loose, tight)]
    assert float(averages[1].norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)
    cosine = torch.nn.functional.cosine_similarity(averages[0], averages[1], dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-5)


# Half precision.


@pytest.fixture
def plain_kernels() -> Iterator[None]:
    """Some machines name bf16 instructions that they then refuse to run; torch's own kernels need none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


@pytest.mark.usefixtures("plain_kernels")
def test_half_precision_weights_do_not_swallow_small_updates() -> None:
    model = tiny_model().bfloat16()
    credited = sample(model, [1.0, -1.0, 0.5])
    before = weights(model)
    actor = Actor(model, ActorSettings(lr=1e-5), pad_id=PAD)
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
        return Actor(tiny_model().bfloat16(), ActorSettings(lr=1e-5), pad_id=PAD)

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
    assert same(straight.state_dict()["masters"], second.state_dict()["masters"])
    assert same(weights(straight.model), weights(second.model))


@pytest.mark.usefixtures("plain_kernels")
def test_weights_loaded_into_half_precision_are_what_is_trained_on(tmp_path: Path) -> None:
    """Without the state beside them, fp32 copies must follow the weights."""
    source, target = (Actor(tiny_model(seed).bfloat16(), ActorSettings(lr=1e-9), pad_id=PAD) for seed in (0, 1))
    credited = sample(source.model, [1.0, -1.0])
    source.save_model(tmp_path)
    target.load_weights(tmp_path)
    target.update(credited)
    assert same(weights(target.model), weights(source.model))


# State.


def through_disk(actor: Actor, fresh: Actor, folder: Path) -> Actor:
    """What a run does when it stops and goes on."""
    registry = Registry()
    registry.register("actor", actor)
    saved = checkpoint.save(folder, 1, registry.state_dict(), extra_files={"model": actor.save_model})
    found = checkpoint.load(saved.path)
    again = Registry()
    again.register("actor", fresh)
    again.load_state_dict(found.state())
    fresh.load_weights(found.path / "model")
    return fresh


@pytest.mark.parametrize("on_disk", [False, True])
def test_two_updates_are_one_update_saved_loaded_and_one_more(on_disk: bool, tmp_path: Path) -> None:
    settings = ActorSettings(lr=1e-2, warmup_steps=3, mini_batches=2, weight_decay=0.01, entropy_coef=0.01, seed=5)
    batches = [sample(tiny_model(), [1.0, -1.0, 0.5, -0.3], seed=seed) for seed in (1, 2)]
    straight = Actor(tiny_model(), settings, pad_id=PAD)
    straight.update(batches[0])
    expected = straight.update(batches[1])

    first = Actor(tiny_model(), settings, pad_id=PAD)
    first.update(batches[0])
    second = Actor(tiny_model(seed=9), settings, pad_id=PAD)
    if on_disk:
        second = through_disk(first, second, tmp_path)
    else:
        second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
        second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.update(batches[1]) == expected
    assert second.version == 2
    assert same(weights(straight.model), weights(second.model))


def test_the_count_of_skipped_updates_survives(tmp_path: Path) -> None:
    first = Actor(tiny_model(), LR, pad_id=PAD)
    first.update([poison(c) for c in sample(first.model, [1.0, 1.0])])
    assert through_disk(first, Actor(tiny_model(), LR, pad_id=PAD), tmp_path).skipped_updates == 1


def test_plain_transformers_loads_what_was_saved(tmp_path: Path) -> None:
    actor = Actor(tiny_model(), LR, pad_id=PAD)
    actor.update(sample(actor.model, [1.0, -1.0]))
    actor.save_model(tmp_path)
    assert same(weights(LlamaForCausalLM.from_pretrained(tmp_path)), weights(actor.model))


def test_after_loading_weights_tokens_are_drawn_from_them(tmp_path: Path) -> None:
    """No stale cache: the policy that shares the model says what a fresh one would."""
    source, target = tiny_model(0), tiny_model(1)
    greedy = Sampling(do_sample=False, max_new_tokens=12)

    def say(model: Any) -> list[int]:
        [out] = generate_batch(model, [[5, 6, 7]], [greedy], pad_id=PAD, policy_version=0)
        return list(out.token_ids)

    assert say(source) != say(target)
    source.save_pretrained(tmp_path)
    Actor(target, LR, pad_id=PAD).load_weights(tmp_path)
    assert say(source) == say(target)


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path: Path) -> None:
    tiny_model(hidden_size=16).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="holds another model") as caught:
        Actor(tiny_model(), LR, pad_id=PAD).load_weights(tmp_path)
    assert "\n" not in str(caught.value)
