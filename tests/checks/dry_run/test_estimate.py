"""Estimates scale the measurements to the size of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_cases import LR, changed, tiny_model

from toolwise.checks.dry_run.trial import (
    RolloutTrial,
    UpdateTrial,
    _device_peak,
    _static_parts,
    checkpoint_copy_bytes,
    estimate_time,
)
from toolwise.learner.actor import Actor
from toolwise.learner.memory_estimate import CONTEXT_BYTES, update_memory


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


def learning_run(**actor: Any) -> Any:
    """As much of a run as an estimate of its memory looks at."""
    config = changed(LR, **actor)
    learner = Actor(tiny_model().to(torch.bfloat16), config)
    return SimpleNamespace(config=config, learner=learner, cache_memory=None)


def gpu_parts(run: Any, peak_bytes: int | None, tokens: int = 100, of: int = 1000) -> dict[str, int]:
    update = UpdateTrial(seconds=1.0, gradient_s=1.0, peak_bytes=peak_bytes, tokens=tokens)
    return _device_peak(run, _static_parts(run) | {"KV cache": 77}, update, tokens=of)


def test_on_a_gpu_the_parts_add_up_to_the_formula() -> None:
    run = learning_run()
    memory = update_memory(run.learner.model, run.learner.optimizer, run.config.actor, 1000)
    parts = gpu_parts(run, peak_bytes=None)
    assert sum(parts.values()) == memory.peak + 77 + CONTEXT_BYTES
    assert parts["activations"] == memory.activations


def test_a_trial_that_took_more_than_the_formula_says_corrects_it() -> None:
    run = learning_run()
    trial = update_memory(run.learner.model, run.learner.optimizer, run.config.actor, 100)
    plain = gpu_parts(run, peak_bytes=None)["activations"]
    assert gpu_parts(run, peak_bytes=trial.activations + trial.logits)["activations"] == plain
    twice = gpu_parts(run, peak_bytes=2 * trial.activations + trial.logits)["activations"]
    assert twice == pytest.approx(2 * plain, rel=1e-6)


def test_a_cache_that_is_freed_for_updates_does_not_count() -> None:
    run = learning_run()
    run.cache_memory = SimpleNamespace(frees_each_update=True)
    assert "KV cache" not in gpu_parts(run, peak_bytes=None)


def test_the_copy_for_checkpoints_counts_unless_training_waits_for_them() -> None:
    run = learning_run()
    weights = sum(parameter.numel() for parameter in run.learner.model.parameters())
    assert checkpoint_copy_bytes(run) == 14 * weights
    run.config = changed(LR, {"trainer": {"async_checkpoints": False}})
    assert checkpoint_copy_bytes(run) == 0
