"""Estimates scale the measurements to the size of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from toolwise.checks.dry_run.trial import RolloutTrial, UpdateTrial, estimate_time


def run_with(**changes: Any) -> Any:
    """As much of a run as an estimate of its time looks at: 10 steps of 8 tasks, 16 held-out tasks."""
    config = SimpleNamespace(
        data=SimpleNamespace(batch_size=8),
        rollout=SimpleNamespace(n=4),
        actor=SimpleNamespace(ppo_epochs=changes.get("ppo_epochs", 1)),
        critic=SimpleNamespace(epochs=1),
        trainer=SimpleNamespace(total_steps=10),
        validation=SimpleNamespace(before=True, every=changes.get("every", 0)),
    )
    return SimpleNamespace(config=config, validation_tasks=[None] * 16, learner=SimpleNamespace(critic=None))


TRIAL: Any = RolloutTrial([None, None], [None] * 8, rollout_s=2.0, score_s=0.5)  # type: ignore[list-item]
UPDATE = UpdateTrial(seconds=1.5, gradient_s=1.0, peak_bytes=None, tokens=100)


def test_a_step_is_four_times_two_tasks() -> None:
    time = estimate_time(run_with(), TRIAL, UPDATE)
    assert time.rollout.tolist() == [2.0, 8.0]
    assert (time.score_s, time.update_s) == (2.0, 6.0)
    assert time.step.tolist() == [10.0, 16.0]


def test_validations_and_steps_add_up() -> None:
    time = estimate_time(run_with(every=5), TRIAL, UPDATE)
    assert time.validation[1] == pytest.approx(3 * (2 * 2.0 + 2 * 0.5))  # before, at 5 and at 10
    assert time.total[1] == pytest.approx(10 * 16.0 + time.validation[1])
    assert time.total[0] == pytest.approx(10 * 10.0 + time.validation[0])


def test_each_epoch_computes_the_gradients_again() -> None:
    assert estimate_time(run_with(ppo_epochs=3), TRIAL, UPDATE).update_s == pytest.approx(4 * 3.5)


def test_without_an_update_there_is_none_to_wait_for() -> None:
    assert estimate_time(run_with(), TRIAL, None).update_s == 0.0
