"""Validation: one greedy rollout per held-out task, without training."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import make_rows
from toolwise.errors import RewardError
from toolwise.training.evaluate import validate
from toolwise.training.run import Run, assemble
from toolwise.types import ScoredRollout, Task

torch.set_num_threads(1)


def length_of_reply(messages: Any, ground_truth: Any) -> float:
    return float(len(messages[-1].content or ""))


def tasks(count: int, split: str) -> list[Task]:
    return [
        Task(task_id=f"{split}-{place}", prompt=row["prompt"], tools_kwargs=row["extra_info"]["tools_kwargs"])
        for place, row in enumerate(make_rows(count, seed=0, split=split))
    ]


def tiny_run(reward: Any = length_of_reply, held_out: int = 5, **validation: Any) -> Run:
    settings = {
        "model": {"device": "cpu"},
        "tools": ["calculator", "search"],
        "data": {"batch_size": 2},
        "rollout": {"n": 4, "max_new_tokens": 16, "temperature": 3.0},
        "multi_turn": {"max_turns": 2},
        "validation": validation,
        "reward": {"sandbox": {"tier": "off"}},
    }
    return assemble(
        RunConfig.model_validate(settings),
        tasks=tasks(4, "train"),
        validation_tasks=tasks(held_out, "heldout"),
        reward=reward,
    )


def said(scored: list[ScoredRollout]) -> list[list[str | None]]:
    return [[m.content for m in s.rollout.messages] for s in scored]


def test_one_rollout_a_held_out_task_in_order() -> None:
    found = asyncio.run(validate(tiny_run()))
    assert [s.rollout.task.task_id for s in found] == [f"heldout-{place}" for place in range(5)]
    assert all(s.result.has_valid_score for s in found)
    assert len({s.rollout.rollout_id for s in found}) == 5


def test_nothing_is_learned_and_no_data_is_used_up() -> None:
    run = tiny_run()
    before = [p.detach().clone() for p in run.learner.model.parameters()]
    state = run.batches.state_dict()
    asyncio.run(validate(run))
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.model.parameters(), strict=True))
    assert run.batches.state_dict() == state
    assert (run.learner.version, run.progress.step) == (0, 0)


def test_it_is_greedy_unless_do_sample_is_set() -> None:
    run = tiny_run()
    first = said(asyncio.run(validate(run)))
    assert said(asyncio.run(validate(run, step=9))) == first  # other seeds
    sampled = tiny_run(do_sample=True)
    drawn = said(asyncio.run(validate(sampled)))
    assert drawn != first
    assert said(asyncio.run(validate(sampled, step=9))) != drawn


def test_no_held_out_tasks_no_rollouts() -> None:
    assert asyncio.run(validate(tiny_run(held_out=0))) == []


def broken(messages: Any, ground_truth: Any) -> float:
    raise RuntimeError("down")


def test_a_reward_that_fails_too_often_stops_validation_too() -> None:
    with pytest.raises(RewardError, match="broken failed on 5 of 5 rollouts"):
        asyncio.run(validate(tiny_run(broken)))
