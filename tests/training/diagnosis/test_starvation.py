"""Who starves in asynchronous training, and what to do about it."""

from __future__ import annotations

import pytest

from toolwise.training.diagnosis.starvation import explain_starvation


@pytest.mark.parametrize(
    ("learner", "engine", "says"),
    [(0.8, 0.1, "The learner waited for rollouts in 80%"), (0.1, 0.6, "The engine had nothing to do in 60%")],
)
def test_the_side_that_waits_most_is_named_with_a_cure(learner: float, engine: float, says: str) -> None:
    found = explain_starvation(learner, engine, 1, step=7)
    assert found is not None
    assert found.says.startswith(says)
    assert "raise trainer.max_staleness (now 1)" in found.cure


def test_enough_staleness_is_not_raised_further() -> None:
    found = explain_starvation(0.9, 0.0, 4, step=7)
    assert found is not None
    assert "max_staleness" not in found.cure


def test_nobody_starves_if_both_work_for_half_the_time() -> None:
    assert explain_starvation(0.49, 0.49, 1, step=7) is None
