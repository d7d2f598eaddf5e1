"""Asynchronous training of real, tiny runs: the results of the synchronous loop without staleness, bounded staleness
with it, and what is refused."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from async_cases import FEATURES, all_the_same, async_run, by_length, by_place, tiny_run, train

from toolwise.config.schema import RunConfig
from toolwise.envs.base import BaseEnv
from toolwise.errors import ConfigError
from toolwise.training.async_check import check_async
from toolwise.training.async_loop import AsyncLoop

long = pytest.mark.long
QUICK = ("grpo", "short batches")
CASES = [pytest.param(name, id=name, marks=() if name in QUICK else (long,)) for name in FEATURES]


@pytest.mark.parametrize("feature", CASES)
def test_without_staleness_the_results_are_those_of_the_synchronous_loop(feature: str) -> None:
    """Bit for bit: weights, rollouts, advantages and the metrics of learning."""
    reward = {"grpo": by_place, "refills": all_the_same}.get(feature, by_length)
    sections: Any = {**FEATURES[feature], "deterministic": True}
    steps = 3 if feature == "short batches" else 2
    plain = tiny_run(reward, trainer={"total_steps": steps}, **sections)
    ours = async_run(0, reward, steps=steps, **sections)
    for left, right in zip(train(plain, steps), train(ours, steps), strict=True):
        assert [s.rollout.rollout_id for s in left.scored] == [s.rollout.rollout_id for s in right.scored]
        assert [s.rollout.batch_data_id for s in left.scored] == [s.rollout.batch_data_id for s in right.scored]
        assert [s.score for s in left.scored] == [s.score for s in right.scored]
        compared = ("actor/loss", "actor/grad_norm", "groups/dropped", "groups/batches", "tokens/sampled")
        for name in (*compared, "router/loss", "router/lambda/cost", "router/r_task"):
            assert left.metrics.get(name) == right.metrics.get(name), name
        assert right.metrics.get("staleness/max", 0.0) == 0.0
    assert ours.learner.weights_checksum() == plain.learner.weights_checksum()
    assert ours.batches.state_dict() == plain.batches.state_dict()


@long
@pytest.mark.parametrize("feature", FEATURES)
def test_everything_works_with_staleness(feature: str) -> None:
    """Trains, holds the bound, learns from each rollout once, and ends with equal weights."""
    run = async_run(2, by_length, steps=4, **FEATURES[feature])
    before = run.policy.model.get_input_embeddings().weight.clone()
    results = train(run, 4)
    assert max(result.metrics.get("staleness/max", 0.0) for result in results) <= 2.0
    ids = [s.rollout.rollout_id for result in results for s in result.scored]
    assert len(ids) == len(set(ids))
    assert run.progress.step == run.queue.version == 4
    if "router" in FEATURES[feature]:
        assert sum(result.metrics["router/prompts"] for result in results) == 4 * run.queue.per_update
    assert torch.equal(run.policy.model.get_input_embeddings().weight, before) == (
        feature in ("router alone", "adapters")
    )
    if feature != "adapters":
        for name, parameter in run.policy.model.named_parameters():
            assert torch.equal(parameter, dict(run.learner.model.named_parameters())[name]), name


def test_with_staleness_each_token_has_its_version_and_none_is_too_old() -> None:
    run = async_run(1, algorithm={"zero_std_groups": "keep"}, rollout={"max_concurrent": "auto"})
    before = run.policy.model.get_input_embeddings().weight.clone()
    results = train(run, 3)
    assert run.progress.step == run.learner.version == run.policy.version == 3
    assert not torch.equal(run.policy.model.get_input_embeddings().weight, before)
    for name, parameter in run.policy.model.named_parameters():
        assert torch.equal(parameter, dict(run.learner.model.named_parameters())[name]), name
    assert max(result.metrics["staleness/max"] for result in results) == 1.0
    for result in results:
        assert {"staleness/mean", "staleness/ess", "async/learner_wait", "async/engine_wait"} <= set(result.metrics)
        assert 0.0 < result.metrics["staleness/ess"] <= 1.0 + 1e-9
    benchmark = (Path(__file__).parents[2] / "benchmarks" / "async_loop.py").read_text()
    reported = re.findall(r'mean\("([^"]+)"\)', benchmark)
    assert len(reported) > 5
    assert set(reported) <= set(results[0].metrics), "the benchmark averages what no step reports"
    ids = [s.rollout.rollout_id for result in results for s in result.scored]
    assert len(ids) == len(set(ids)) == 3 * 2 * 2


def test_the_engine_and_the_learner_do_not_share_weights() -> None:
    run = async_run(1)
    try:
        shared = {p.data_ptr() for p in run.learner.model.parameters()} & {
            p.data_ptr() for p in run.policy.model.parameters()
        }
        assert not shared
        assert run.weights is not None
        assert run.weights.bytes == sum(p.nbytes for p in run.policy.model.parameters())
    finally:
        run.close()


@long
@pytest.mark.parametrize("keep", [False, True], ids=["computed again", "kept"])
def test_the_mismatch_check_is_right_whatever_replies_keep(keep: bool) -> None:
    """Long replies and a high learning rate: kept keys and values are of clearly other weights. What is compared must
    agree all the same."""
    trainer = {"mode": "async", "max_staleness": 2, "total_steps": 6, "keep_cache": keep}
    run = async_run(
        2,
        trainer=trainer,
        rollout={"n": 2, "max_new_tokens": 80},
        actor={"lr": 3e-3},
        algorithm={"zero_std_groups": "keep"},
    )
    assert run.weights is not None
    assert run.weights.keep_cache == keep
    results = train(run, 6)
    gaps = [r.metrics["canary/logprob_gap_max"] for r in results if "canary/logprob_gap_max" in r.metrics]
    assert gaps
    assert max(gaps) < 1e-3
    assert max(r.metrics["staleness/logprob_gap"] for r in results) > 1e-2
    assert max(r.metrics["staleness/max"] for r in results) <= 2.0
    spanning = sum(r.metrics["staleness/spanning"] for r in results)
    assert spanning > 0 or keep  # a reply that keeps its cache counts as old to its end; its next turn is new


class PatientWorld(BaseEnv):
    """One turn, which takes for ever in all but the first episodes."""

    episodes: ClassVar[int] = 0
    quick: ClassVar[int] = 4

    async def reset(self) -> str:
        PatientWorld.episodes += 1
        self.number = PatientWorld.episodes
        return "Begin."

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        await asyncio.sleep(0.0 if self.number <= self.quick else 1e6)
        return "", None, True, {}


def test_a_loop_goes_on_with_what_a_closed_one_left_under_way() -> None:
    run = async_run(1, steps=2, world=PatientWorld, algorithm={"zero_std_groups": "keep"})

    async def one_step() -> list[str]:
        loop = AsyncLoop(run)
        try:
            return [s.rollout.rollout_id for s in (await loop.train_step(run)).scored]
        finally:
            await loop.close()

    async def both() -> list[str]:
        first = await one_step()
        assert run.queue.in_progress == 2
        PatientWorld.quick = 100
        return first + await asyncio.wait_for(one_step(), 60.0)

    try:
        ids = asyncio.run(both())
    finally:
        run.close()
    assert len(ids) == len(set(ids)) == 2 * 2 * 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"engine": "transformers"}}, 'rollout.engine = "transformers": use "toolwise"'),
    ({"actor": {"ppo_epochs": 2}}, "2 optimizer steps on a batch that may be stale"),
]


@pytest.mark.parametrize(("sections", "told"), REFUSED)
def test_what_is_not_supported_is_refused_in_one_line(sections: dict[str, Any], told: str) -> None:
    config = RunConfig.model_validate({"trainer": {"mode": "async"}, **sections})
    with pytest.raises(ConfigError) as caught:
        check_async(config)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_stale_updates_run_if_asked_for() -> None:
    allowed = {"mode": "async", "several_stale_updates": True}
    check_async(RunConfig.model_validate({"trainer": allowed, "actor": {"ppo_epochs": 2}}))
    check_async(
        RunConfig.model_validate({"trainer": {"mode": "async", "max_staleness": 0}, "actor": {"ppo_epochs": 2}})
    )
