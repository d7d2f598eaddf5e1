"""SFT: gradients of packed conversations, the weight of each token, the order of the data, and that it learns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import tiny_model
from torch.nn.functional import cross_entropy

from toolwise.config.sft import SftConfig
from toolwise.errors import CheckpointError, ConfigError, DataError, ToolwiseError
from toolwise.learner.conversations import Example, tokenize_conversation
from toolwise.learner.schedules import lr_factor
from toolwise.learner.supervised import EpochBatches, SftLearner, pack_ahead, sft_steps
from toolwise.messages import Message
from toolwise.models import load_model

torch.set_num_threads(1)


def config(**settings: Any) -> SftConfig:
    return SftConfig.model_validate({"max_grad_norm": 1e9, "spike_factor": 0.0, **settings})


def rows(lengths: Sequence[int] = (5, 17, 9, 30, 2), seed: int = 0, prefix: int = 0) -> list[Example]:
    """Rows of unequal lengths; the assistant's tokens are scattered over each, as with several turns."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, 48, prefix)
    found = []
    for length in lengths:
        ids = np.concatenate([shared, rng.integers(2, 48, length)]).astype(np.int32)
        mask = rng.random(len(ids)) < 0.4
        mask[-1] = True
        found.append(Example(ids, mask))
    return found


def plain_gradients(model: Any, examples: Sequence[Example]) -> tuple[float, dict[str, torch.Tensor]]:
    """One conversation at a time through transformers, unpacked and unpadded."""
    model.zero_grad()
    count = sum(example.targets for example in examples)
    loss = 0.0
    for example in examples:
        ids = torch.tensor(example.ids, dtype=torch.long)
        labels = torch.where(torch.tensor(example.loss_mask), ids, -100)[1:]
        logits = model(input_ids=ids[None]).logits[0, :-1]
        part = cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count
        part.backward()
        loss += part.item()
    gradients = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    model.zero_grad()
    return loss, gradients


def packed_gradients(learner: SftLearner, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Those that `update` hands to the optimiser."""
    found: dict[str, torch.Tensor] = {}

    def step(update: int) -> dict[str, float]:
        found.update({n: w.grad.clone() for n, w in learner.model.named_parameters() if w.grad is not None})
        learner.optimizer.zero_grad()
        return {"grad_norm": 0.0, "update_norm": 0.0}

    original, learner.optimizer.step = learner.optimizer.step, step  # type: ignore[method-assign, assignment]
    learner.update(learner.pack(examples))
    learner.optimizer.step = original  # type: ignore[method-assign]
    return found


# Gradients.


@pytest.mark.parametrize("prefix", [0, 12], ids=["apart", "shared prefix"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)])
def test_packed_gradients_are_those_of_one_conversation_at_a_time(
    dtype: torch.dtype, tolerance: float, prefix: int
) -> None:
    model, examples = tiny_model().to(dtype), rows(prefix=prefix)
    loss, expected = plain_gradients(model, examples)
    learner = SftLearner(model, config(micro_batch_tokens=40))
    assert len(learner.pack(examples).parts) > 1
    found = packed_gradients(learner, examples)
    assert found.keys() == expected.keys()
    if prefix:  # a norm computes in float32, so its gradients depend on what they are summed over
        tolerance = max(tolerance, 1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=10 * tolerance, atol=tolerance)
    assert learner.loss(examples) == pytest.approx(loss, rel=1e-6)


def test_gradients_of_adapters_too() -> None:
    pytest.importorskip("peft")
    model, examples = tiny_model().double(), rows()
    learner = SftLearner(model, config(lora={"rank": 2, "alpha": 8}, micro_batch_tokens=40))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zeros at first, which would leave lora_A without a gradient
                weight.copy_(torch.randn(weight.shape, generator=generator))
    _, expected = plain_gradients(model, examples)
    found = packed_gradients(learner, examples)
    assert found.keys() == expected.keys()
    assert all("lora" in name for name in found)
    assert {name.rpartition("lora_")[2][:1] for name in found} == {"A", "B"}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_gradients_of_conversations_with_tools_and_several_turns() -> None:
    from small_world_teacher import conversations

    model, chat = load_model("builtin:small", device="cpu")
    examples = [
        row
        for one in conversations(4, seed=2)
        for row in tokenize_conversation(chat, [Message.model_validate(m) for m in one["messages"]], one["tools"])
    ]
    model = model.double()
    _, expected = plain_gradients(model, examples)
    found = packed_gradients(SftLearner(model, config(micro_batch_tokens=256)), examples)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "prefix"),
    [
        ({"micro_batch_tokens": 8}, 0),
        ({"micro_batch_tokens": 8}, 6),
        ({"share_prefixes": False}, 6),
        ({"logit_chunk_tokens": 3}, 0),
        ({"activation_checkpointing": True}, 0),
    ],
    ids=str,
)
def test_how_a_step_is_computed_changes_neither_its_loss_nor_its_gradient(
    settings: dict[str, Any], prefix: int
) -> None:
    examples = rows(prefix=prefix)
    tolerance = 1e-6 if prefix else 1e-12
    whole = SftLearner(tiny_model().double(), config())
    split = SftLearner(tiny_model().double(), config(**settings))
    expected, found = packed_gradients(whole, examples), packed_gradients(split, examples)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=10 * tolerance, atol=tolerance)
    one, two = (learner.update(learner.pack(examples)) for learner in (whole, split))
    assert two["loss"] == pytest.approx(one["loss"], rel=tolerance)
    assert (one["tokens"], one["all_tokens"]) == (two["tokens"], two["all_tokens"])
    assert one["tokens"] == sum(example.targets for example in examples)
    assert one["all_tokens"] == sum(map(len, examples))


def test_a_row_without_targets_changes_nothing() -> None:
    examples = rows()
    silent = Example.of([3, 4, 5], [True, False, False])
    one, two = SftLearner(tiny_model(), config()), SftLearner(tiny_model(), config())
    expected = one.update(one.pack(examples))
    found = two.update(two.pack([*examples, silent]))
    assert found["loss"] == expected["loss"]
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_a_conversation_does_not_see_the_one_packed_before_it() -> None:
    model = tiny_model().double()
    learner = SftLearner(model, config(share_prefixes=False))
    first, second = rows((8, 11))
    other = Example((first.ids + 1) % 48, first.loss_mask)
    alone = learner.loss([second]) * second.targets
    for before in (first, other):
        together = learner.loss([before, second]) * (before.targets + second.targets)
        assert together - learner.loss([before]) * before.targets == pytest.approx(alone, rel=1e-12)


# The order of the data.


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 200), st.integers(0, 3))
def test_every_row_is_seen_once_per_epoch(lengths: list[int], batch_tokens: int, seed: int) -> None:
    batches = EpochBatches(lengths, batch_tokens, seed)
    for epoch in range(2):
        steps = [batches[epoch * len(batches) + index] for index in range(len(batches))]
        assert all(steps)
        assert sorted(row for step in steps for row in step) == list(range(len(lengths)))


@given(st.lists(st.integers(1, 20), min_size=10, max_size=60), st.integers(40, 200))
def test_the_steps_of_an_epoch_are_of_about_equal_size(lengths: list[int], batch_tokens: int) -> None:
    batches = EpochBatches(lengths, batch_tokens, 0)
    sizes = [sum(lengths[row] for row in batches[step]) for step in range(len(batches))]
    mean = sum(lengths) / len(batches)
    assert mean <= batch_tokens
    assert all(abs(size - mean) <= max(lengths) for size in sizes)


def test_the_order_depends_on_the_epoch_and_the_seed_alone() -> None:
    lengths = [3] * 40
    batches, again = EpochBatches(lengths, 30, 1), EpochBatches(lengths, 30, 1)
    assert [again[step] for step in (7, 2, 5)] == [batches[step] for step in (7, 2, 5)]
    assert [batches[step] for step in range(4)] != [batches[step] for step in range(4, 8)]
    assert [batches[0]] != [EpochBatches(lengths, 30, 2)[0]]


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        EpochBatches([], 10, 0)


def test_packing_ahead_keeps_the_order_and_passes_errors_on() -> None:
    packed: list[int] = []

    def pack(step: int) -> Any:
        packed.append(step)
        if step == 3:
            raise DataError("bad")
        return step

    ahead = pack_ahead(pack, range(5))
    assert [next(ahead) for _ in range(3)] == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(DataError, match="bad"):
        next(ahead)
    assert packed == [0, 1, 2, 3]


# Training.


def test_the_rate_warms_up_and_falls_to_its_minimum() -> None:
    settings = config(steps=100, lr=1.0, warmup=0.1, min_lr_ratio=0.1)
    learner = SftLearner(tiny_model(), settings)
    rates = [learner.optimizer.learning_rate(step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1)
    assert lr_factor(100, schedule="linear", warmup_steps=10, total_steps=100, floor=0.2) == pytest.approx(0.2)


def test_training_is_deterministic_and_learns() -> None:
    settings = config(steps=12, batch_tokens=24, lr=1e-2)
    one, two = (list(sft_steps(tiny_model(), rows(), settings)) for _ in range(2))
    assert one == two
    assert one[-1]["loss"] < one[0]["loss"]


def test_half_precision_weights_have_full_precision_masters() -> None:
    model = tiny_model().to(torch.bfloat16)
    learner = SftLearner(model, config(lr=1e-6, steps=10))
    before = [master.clone() for master in learner.optimizer.masters]
    for _ in range(3):
        metrics = learner.update(learner.pack(rows()))
    assert metrics["update_norm"] > 0
    assert all(master.dtype == torch.float32 for master in learner.optimizer.masters)
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.optimizer.masters, strict=True))


def test_half_precision_follows_the_losses_of_full_precision() -> None:
    """Updates of 1e-4 are below half a unit in the last place of most bf16 weights here."""
    settings = config(steps=20, batch_tokens=70, lr=1e-4, lr_schedule="constant")
    full, half = (
        [step["loss"] for step in sft_steps(tiny_model().to(dtype), rows(), settings)]
        for dtype in (torch.float32, torch.bfloat16)
    )
    fall = full[0] - full[-1]
    assert fall > 0.1
    assert half[0] - half[-1] == pytest.approx(fall, rel=0.2)


def test_a_gradient_that_is_not_a_number_moves_nothing() -> None:
    model = tiny_model()
    learner = SftLearner(model, config())
    learner.loss(rows())  # which checks the head, before it breaks
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out * float("nan"))
    before = [p.detach().clone() for p in model.parameters()]
    metrics = learner.update(learner.pack(rows()))
    hook.remove()
    assert np.isnan(metrics["loss"])
    assert (metrics["update_norm"], metrics["skipped_updates"]) == (0.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = SftLearner(tiny_model(), config(micro_batch_tokens=777))

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    batch = learner.pack(rows())
    monkeypatch.setattr(learner, "_forward", full)
    with pytest.raises(ToolwiseError, match="micro_batch_tokens = 777: lower it, or set activation_checkpointing"):
        learner.update(batch)
    with pytest.raises(ToolwiseError, match="ran out of memory"):
        learner.loss(rows())


def test_a_model_that_cannot_recompute_is_refused() -> None:
    model = tiny_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match="activation_checkpointing: LlamaForCausalLM does not support it"):
        SftLearner(model, config(activation_checkpointing=True))


def test_the_state_continues_where_it_was(tmp_path: Any) -> None:
    settings = config(steps=6, batch_tokens=24, lr=1e-2)
    straight = list(sft_steps(tiny_model(), rows(), settings))
    learner = SftLearner(tiny_model(), settings)
    batches = EpochBatches([len(row) for row in rows()], 24, 0)

    def update(at: SftLearner, step: int) -> dict[str, float]:
        return dict(at.update(at.pack([rows()[i] for i in batches[step]])))

    for step in range(3):
        update(learner, step)
    learner.save_model(tmp_path)
    resumed = SftLearner(tiny_model(seed=9), settings)
    resumed.load_state_dict(learner.state_dict())
    resumed.load_weights(tmp_path)
    assert [update(resumed, step) for step in range(3, 6)] == straight[3:]
    with pytest.raises(CheckpointError, match="differ in `lora`"):
        resumed.load_state_dict({**learner.state_dict(), "adapters": {}})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_in_half_precision_it_learns_as_on_the_cpu() -> None:
    settings = config(steps=12, batch_tokens=200, lr=1e-2, micro_batch_tokens=100)
    shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    examples = rows((40, 90, 17, 60, 33))
    here = list(sft_steps(tiny_model(**shape), examples, settings))
    there = list(sft_steps(tiny_model(**shape).to("cuda", torch.bfloat16), examples, settings))
    assert [step["tokens"] for step in there] == [step["tokens"] for step in here]
    assert there[0]["loss"] == pytest.approx(here[0]["loss"], abs=0.05)
    assert there[-1]["loss"] == pytest.approx(here[-1]["loss"], abs=0.3)
    assert there[-1]["loss"] < there[0]["loss"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_waits_for_the_device_at_the_end_of_a_step_only() -> None:
    """Forward and backward of all micro-batches are queued without a synchronisation."""
    model = tiny_model(hidden_size=64, num_attention_heads=4, max_position_embeddings=256).to("cuda", torch.bfloat16)
    learner = SftLearner(model, config(micro_batch_tokens=60))
    batch = learner.pack(rows((40, 50, 17, 45, 33)))
    learner.update(batch)  # compiles kernels
    queued = []
    step = learner.optimizer.step

    def recording(*arguments: Any) -> dict[str, float]:
        torch.cuda.set_sync_debug_mode("default")
        queued.append(True)
        return step(*arguments)

    learner.optimizer.step = recording  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.update(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert queued
