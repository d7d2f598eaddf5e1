"""Running baselines, separate for reward and cost, and rewards standardized by kind."""

from __future__ import annotations

import numpy as np
import pytest

from toolwise.routing.reward_baselines import KindStandardizer, RunningBaseline


def test_running_means_by_hand() -> None:
    # decay .5: after means 1 and 0: (.5·.5·1 + .5·0) / .75 = 1/3; costs 2 and 0: 2/3
    baseline = RunningBaseline(decay=0.5)
    baseline.update([1.0, 1.0], {"cost": [2.0, 2.0]})
    baseline.update([0.0], {"cost": [0.0]})
    advantages = baseline.advantages([1.0, 0.0], {"cost": [1.0, 0.0]}, {"cost": 0.3})
    assert advantages == pytest.approx([2 / 3 - 0.3 * (1 - 2 / 3), -1 / 3 + 0.3 * 2 / 3])


def test_a_changing_lambda_adds_no_advantage() -> None:
    """If costs never change, neither do advantages, whatever λ is."""
    baseline = RunningBaseline()
    for _ in range(20):
        baseline.update([1.0], {"cost": [1.0]})
    for price in (0.0, 0.1, 5.0):
        assert baseline.advantages([1.0], {"cost": [1.0]}, {"cost": price}) == pytest.approx([0.0])


def test_the_first_batch_is_its_own_baseline_and_no_later_one() -> None:
    baseline = RunningBaseline()
    assert baseline.advantages([1.0, 0.0], {}, {}).tolist() == [0.5, -0.5]
    baseline.update([1.0, 0.0], {})
    assert baseline.advantages([1.0], {}, {}) == pytest.approx([0.5])
    baseline.update([], {})
    assert baseline.advantages([1.0], {}, {}) == pytest.approx([0.5])


def test_baselines_resume_from_their_state() -> None:
    before, after = RunningBaseline(), RunningBaseline()
    before.update([1.0, 0.5], {"cost": [1.0, 0.0]})
    after.load_state_dict(before.state_dict())
    args = ([0.2], {"cost": [1.0]}, {"cost": 0.4})
    assert before.advantages(*args).tolist() == after.advantages(*args).tolist()


def test_each_kind_has_its_own_scale() -> None:
    rng = np.random.default_rng(0)
    kinds = ["tool", "talk"] * 500
    rewards = np.where(np.array(kinds) == "tool", rng.normal(-1, 3, 1000), rng.normal(1, 0.1, 1000))
    scaled = KindStandardizer()(rewards, kinds)
    for kind in ("tool", "talk"):
        mine = scaled[np.array(kinds) == kind]
        assert mine.mean() == pytest.approx(0, abs=1e-9)
        assert mine.std(ddof=1) == pytest.approx(1)


def test_scales_use_everything_seen_and_resume() -> None:
    scale, again = KindStandardizer(), KindStandardizer()
    scale([0.0, 2.0], ["a", "a"])
    again.load_state_dict(scale.state_dict())
    # seen of a: 0, 2, 4 -> mean 2, deviation 2
    assert scale([4.0], ["a"]).tolist() == again([4.0], ["a"]).tolist() == [1.0]


def test_a_kind_that_never_varies_gives_zero() -> None:
    assert KindStandardizer()([1.0, 1.0, 3.0], ["a", "a", "b"]).tolist() == [0.0, 0.0, 0.0]
