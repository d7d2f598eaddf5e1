"""Bad steps are skipped, counted and logged; all others are taken."""

from __future__ import annotations

import json
import math

import pytest

from toolwise.learner.step_guard import HISTORY_SIZE, MIN_HISTORY, Guard


def calm(guard: Guard, count: int = MIN_HISTORY, norm: float = 1.0) -> None:
    for _ in range(count):
        assert guard.admits(norm)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_skipped(norm: float, caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(None)
    assert not guard.admits(norm, lambda: ["a", "b", "a"])
    assert (guard.not_numbers, guard.spikes, guard.skipped) == (1, 0, 1)
    assert "rollouts a, b" in caplog.text


def test_a_spike_exceeds_a_multiple_of_the_running_median() -> None:
    guard = Guard(10.0)
    calm(guard)
    assert guard.admits(9.9)
    assert not guard.admits(10.1)
    assert guard.spikes == 1


def test_without_enough_history_nothing_is_a_spike() -> None:
    guard = Guard(2.0)
    calm(guard, MIN_HISTORY - 1)
    assert guard.admits(1e9)


def test_steps_without_gradient_do_not_make_the_next_one_a_spike() -> None:
    guard = Guard(2.0)
    calm(guard, 100, norm=0.0)
    assert guard.admits(5.0)


def test_a_norm_below_the_clip_is_no_spike() -> None:
    """If all rollouts of a group score the same, gradients are tiny; a normal step after that is not a spike."""
    guard = Guard(10.0, floor=1.0)
    calm(guard, norm=1e-6)
    assert guard.admits(0.9)
    assert not guard.admits(1.1)


def test_a_lasting_new_level_is_accepted() -> None:
    guard = Guard(10.0)
    calm(guard, HISTORY_SIZE)
    taken = [guard.admits(100.0) for _ in range(HISTORY_SIZE)]
    assert not taken[0]
    assert taken[-1]


def test_long_lists_of_rollouts_are_shortened(caplog: pytest.LogCaptureFixture) -> None:
    Guard(None, owner="critic").admits(math.nan, lambda: [f"r{i}" for i in range(9)])
    assert "skipped an update of the critic" in caplog.text
    assert "r4 and 4 more" in caplog.text


def test_names_are_asked_for_only_when_they_are_needed() -> None:
    def never() -> list[str]:
        raise AssertionError

    assert Guard(None).admits(1.0, never)


def test_its_state_is_saved_as_plain_data() -> None:
    guard, fresh = Guard(10.0), Guard(10.0)
    calm(guard)
    guard.admits(math.nan)
    fresh.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert fresh.skipped == 1
    assert not fresh.admits(10.1)
