"""Asynchronous training with a vLLM server: weights change while replies are being written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import async_cases
import pytest
import torch
from async_cases import ROUTED, async_run, by_place, tiny_run, train
from cluster_cases import Workers
from vllm_runs import config_for
from vllm_runs import train as train_on_cluster

from toolwise.training.loop import StepResult
from toolwise.training.run import Run

KEPT = {"algorithm": {"zero_std_groups": "keep"}, "actor": {"lr": 1e-2}}


def server_run(stand_in: Any, staleness: int, steps: int, **sections: Any) -> Run:
    rollout = {"engine": "vllm", "vllm": {"base_url": stand_in.url}, "max_new_tokens": 24}
    return async_run(
        staleness, steps=steps, **{**KEPT, **sections, "rollout": {**rollout, **sections.get("rollout", {})}}
    )


def versions_of(results: list[StepResult]) -> list[list[int]]:
    """Of each turn that several versions wrote."""
    steps = (step for result in results for s in result.scored for step in s.steps)
    return [list(step.tokens.token_versions) for step in steps if step.tokens.token_versions is not None]


def largest_gap(results: list[StepResult]) -> float:
    """Of tokens of the learner's own version, which not every step has."""
    name = "canary/logprob_gap_max"
    return max(result.metrics[name] for result in results if name in result.metrics)


def test_tokens_have_their_versions_and_none_is_too_old(stand_in: Any) -> None:
    run = server_run(stand_in, 1, 3)
    results = train(run, 3)
    assert run.learner.version == run.policy.version == 3
    assert stand_in.version == "3"
    for name, parameter in run.policy.model.named_parameters():
        assert torch.equal(parameter, dict(run.learner.model.named_parameters())[name]), name
    assert max(result.metrics["staleness/max"] for result in results) == 1.0
    assert largest_gap(results) < 1e-3
    ids = [s.rollout.rollout_id for result in results for s in result.scored]
    assert len(ids) == len(set(ids)) == 3 * 2 * 2
    assert min(result.metrics["async/engine_wait"] for result in results) < 1.0


@pytest.mark.long
def test_replies_under_way_at_an_update_have_tokens_of_both_versions(stand_in: Any) -> None:
    stand_in.token_s = 0.05
    results = train(server_run(stand_in, 2, 4), 4)
    assert stand_in.interrupted > 0
    assert versions_of(results)
    assert all(versions == sorted(versions) for versions in versions_of(results))
    assert largest_gap(results) < 1e-3
    assert max(result.metrics["staleness/max"] for result in results) <= 2.0


def test_without_staleness_it_learns_what_the_synchronous_loop_learns(stand_in: Any, loaded: Any) -> None:
    """The server keeps what a run gave it, so each begins with its own."""
    rollout = {"engine": "vllm", "vllm": {"base_url": stand_in.url}, "max_new_tokens": 12}
    plain = tiny_run(by_place, trainer={"total_steps": 2}, rollout=rollout, **KEPT)
    of_plain = train(plain, 2)
    ours = async_run(0, by_place, steps=2, rollout=rollout, **KEPT)
    for left, right in zip(of_plain, train(ours, 2), strict=True):
        assert [list(s.tokens.token_ids) for r in left.scored for s in r.steps] == [
            list(s.tokens.token_ids) for r in right.scored for s in r.steps
        ]
    assert ours.learner.weights_checksum() == plain.learner.weights_checksum()


@pytest.mark.long
@pytest.mark.parametrize(
    "sections",
    [
        {"actor": {"lr": 1e-2, "lora": {"rank": 4}}},
        {**ROUTED, "router": {"enable": True, "hidden": 16, "budgets": [{"limit": 0.5}], "cost": "calls"}},
        {"rollout": {"stop": ["</answer>"]}},
        {"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {"enable": True, "max_thought_tokens": 8}}},
        {"rollout": {"max_concurrent": "auto"}},
    ],
    ids=["adapters", "router", "stop strings", "thoughts", "measured concurrency"],
)
def test_features_of_the_loop_work_with_a_server(stand_in: Any, sections: dict[str, Any]) -> None:
    stand_in.token_s = 0.002
    run = server_run(stand_in, 2, 4, **sections)
    results = train(run, 4)
    assert run.progress.step == run.queue.version == 4
    assert max(result.metrics.get("staleness/max", 0.0) for result in results) <= 2.0
    assert largest_gap(results) < 1e-3
    assert (stand_in.interrupted == 0) == ("stop" in sections.get("rollout", {}))


@pytest.mark.long
def test_workers_of_a_cluster_reload_their_servers_amid_replies(stand_in: Any, tmp_path: Path) -> None:
    stand_in.token_s = 0.05
    config = config_for(base_url=stand_in.url, trainer={"mode": "async", "max_staleness": 1, "console": False})
    results = train_on_cluster(config, tmp_path, Workers(), steps=4)
    assert max(result.metrics["staleness/max"] for result in results) == 1.0
    assert largest_gap(results) < 1e-3
    assert stand_in.interrupted > 0
    assert int(stand_in.version) >= 3


@pytest.mark.long
def test_a_run_resumes_with_a_server_whose_weights_are_others(
    stand_in: Any, tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    rollout = {"engine": "vllm", "vllm": {"base_url": stand_in.url}, "n": 2, "max_new_tokens": 12}
    trainer = {"mode": "async", "max_staleness": 1, "total_steps": 2}
    reward = {"function": f"{Path(async_cases.__file__)}:by_length", "sandbox": {"tier": "off"}}
    settings = {"rollout": rollout, "trainer": trainer, "reward": reward, **KEPT}
    ended = cli("train", make_config(tmp_path, settings), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    with torch.no_grad():
        for weight in stand_in.model.parameters():
            weight.zero_()
    ended = cli("resume", tmp_path / "run", "--set", "trainer.total_steps=4")
    assert ended.status == 0, ended.err
    assert stand_in.version == "4"
