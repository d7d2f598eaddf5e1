"""Asynchronous training of real, tiny runs: the results of the synchronous loop without staleness, bounded staleness
with it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_cases import all_the_same, async_run, by_length, by_place, tiny_run, train

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.training.async_check import check_async


@pytest.mark.parametrize(
    ("reward", "algorithm"),
    [
        (by_place, {}),
        pytest.param(all_the_same, {"zero_std_groups": "refill", "max_refills": 1}, marks=pytest.mark.long),
        pytest.param(by_length, {"adv_estimator": "gae"}, marks=pytest.mark.long),
        pytest.param(by_length, {"adv_estimator": "gigpo"}, marks=pytest.mark.long),
        pytest.param(by_length, {"adv_estimator": "hgpo"}, marks=pytest.mark.long),
    ],
)
def test_without_staleness_the_results_are_those_of_the_synchronous_loop(
    reward: Any, algorithm: dict[str, Any]
) -> None:
    """Bit for bit: weights, rollouts, advantages and the metrics of learning."""
    sections: Any = {"algorithm": algorithm, "deterministic": True}
    found = []
    for run in (tiny_run(reward, trainer={"total_steps": 2}, **sections), async_run(0, reward, **sections)):
        results = train(run, 2)
        found.append((run.learner.weights_checksum(), results, run.batches.state_dict(), run.queue.state_dict()))
    (plain, steps, *state), (ours, async_steps, *async_state) = found
    assert ours == plain
    assert async_state == state
    for left, right in zip(steps, async_steps, strict=True):
        assert [s.rollout.rollout_id for s in left.scored] == [s.rollout.rollout_id for s in right.scored]
        assert [s.rollout.batch_data_id for s in left.scored] == [s.rollout.batch_data_id for s in right.scored]
        assert [s.score for s in left.scored] == [s.score for s in right.scored]
        for name in ("actor/loss", "actor/grad_norm", "groups/dropped", "groups/batches", "tokens/sampled"):
            assert left.metrics.get(name) == right.metrics.get(name), name
        assert right.metrics["staleness/max"] == 0.0


def test_with_staleness_each_token_has_its_version_and_none_is_too_old() -> None:
    run = async_run(1, algorithm={"zero_std_groups": "keep"})
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"engine": "transformers"}}, 'rollout.engine = "transformers": use "toolwise"'),
    ({"data": {"drop_last": False}}, "data.drop_last = false"),
    ({"router": {"enable": True, "train_actor": False}}, "router.train_actor = false"),
    ({"router": {"enable": True, "backbone": "full"}}, "shares the actor's weights"),
    ({"actor": {"ppo_epochs": 2}}, "2 optimizer steps on a batch that may be stale"),
    (
        {"router": {"enable": True, "budgets": [{"unit": "cost", "limit": 1.0}]}},
        "router.budgets without router.budget_window",
    ),
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
