"""Learning-rate schedules, worked by hand."""

from __future__ import annotations

import pytest

from toolwise.learner.schedules import lr_factor


def test_constant_after_a_warm_up() -> None:
    assert [lr_factor(step, warmup_steps=4) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert lr_factor(1) == 1.0


def test_linear_decay_to_a_floor() -> None:
    rates = [
        lr_factor(step, schedule="linear", warmup_steps=2, total_steps=6, floor=0.2) for step in (1, 2, 3, 4, 5, 6, 9)
    ]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_decay() -> None:
    rates = [lr_factor(step, schedule="cosine", warmup_steps=0, total_steps=4) for step in (1, 2, 3, 4, 5)]
    assert rates == pytest.approx([0.8535534, 0.5, 0.1464466, 0.0, 0.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_warm_up_longer_than_the_run(schedule: str) -> None:
    rates = [lr_factor(s, schedule=schedule, warmup_steps=10, total_steps=5) for s in (1, 5, 10)]  # type: ignore[arg-type]
    assert rates == pytest.approx([0.1, 0.5, 1.0])
