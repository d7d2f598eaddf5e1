"""Asynchronous training on a GPU: the engine decodes with captured graphs, on its own weights and stream, while the
learner updates on another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_cases import async_run, by_length, tiny_run, train

from toolwise.engine import Engine
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.training.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KEEP = {"algorithm": {"zero_std_groups": "keep"}, "data": {"batch_size": 4}}
BF16 = {"model": {"device": "cuda", "dtype": "bfloat16"}}
FP32 = {"model": {"device": "cuda", "dtype": "float32"}}


def engine_of(run: Run) -> Engine:
    assert isinstance(run.policy.engine, Engine)
    return run.policy.engine


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("model", [FP32, BF16])
def test_tokens_are_fresh_enough_and_the_engine_ends_with_the_learner_s_weights(
    model: dict[str, Any], staleness: int
) -> None:
    """The mismatch check in every update compares the tokens of the learner's own version; it raises by default."""
    run = async_run(staleness, steps=8, **KEEP, **model, rollout={"n": 4, "max_new_tokens": 40})
    results = train(run, 8)
    assert isinstance(engine_of(run).runner, CudaRunner)
    assert run.policy.version == run.learner.version == 8
    for name, parameter in run.policy.model.named_parameters():
        assert torch.equal(parameter, dict(run.learner.model.named_parameters())[name].to(parameter.dtype)), name
    assert max(result.metrics["staleness/max"] for result in results) <= staleness
    assert all(0.5 < result.metrics["staleness/ess"] <= 1.0 + 1e-6 for result in results)
    ids = [s.rollout.rollout_id for result in results for s in result.scored]
    assert len(ids) == len(set(ids)) == 8 * 4 * 4


def test_without_staleness_it_learns_what_the_synchronous_loop_learns() -> None:
    """To rounding: sums of gradients on a GPU depend on the order of their parts."""
    sections: Any = {**KEEP, **FP32, "deterministic": True}
    plain = tiny_run(by_length, trainer={"total_steps": 2}, **sections)
    ours = async_run(0, by_length, steps=2, **sections)
    for left, right in zip(train(plain, 2), train(ours, 2), strict=True):
        assert [s.rollout.rollout_id for s in left.scored] == [s.rollout.rollout_id for s in right.scored]
        assert right.metrics["actor/grad_norm"] == pytest.approx(left.metrics["actor/grad_norm"], rel=1e-2)
        assert right.metrics["staleness/max"] == 0.0


def test_adapters_train_and_their_merged_weights_are_published() -> None:
    run = async_run(1, steps=4, **KEEP, **BF16, actor={"lr": 1e-2, "lora": {"rank": 4}})
    before = [parameter.clone() for parameter in run.policy.model.parameters()]
    train(run, 4)
    changed = sum(not torch.equal(old, new) for old, new in zip(before, run.policy.model.parameters(), strict=True))
    assert changed > 0
    assert run.policy.version == 4


def test_a_cache_that_fits_beside_updates_is_chosen_at_the_start() -> None:
    run = async_run(1, steps=2, **KEEP, **BF16)
    assert run.cache_memory is None
    assert run.learner.memory.reclaim() is False  # type: ignore[attr-defined]
    blocks = engine_of(run).blocks.count
    train(run, 2)
    assert engine_of(run).blocks.count == blocks


def test_a_router_reads_prompts_beside_the_update() -> None:
    router = {"enable": True, "hidden": 16}
    run = async_run(1, steps=4, **KEEP, **BF16, router=router, rollout={"n": 6, "max_new_tokens": 24})
    results = train(run, 4)
    assert run.progress.step == 4
    assert max(result.metrics["staleness/max"] for result in results) <= 1


@pytest.mark.parametrize("options", [{"deterministic": True}, {"trainer": {"keep_cache": True}}])
def test_other_schedules_and_caches(options: dict[str, Any]) -> None:
    """A fixed schedule pads every batch; a kept cache goes on across versions."""
    trainer = {"mode": "async", "max_staleness": 2, "total_steps": 6, **options.pop("trainer", {})}
    run = async_run(2, **KEEP, **FP32, trainer=trainer, rollout={"n": 4, "max_new_tokens": 40}, **options)
    results = train(run, 6)
    assert run.policy.version == run.learner.version == 6
    assert max(result.metrics["staleness/max"] for result in results) <= 2
