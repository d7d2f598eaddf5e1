"""The check whether the score contains the step rewards: when it warns and when not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolwise.advantages import Gae, Gigpo, Grpo, MonitoredEstimator, Rloo, Rlvcr
from toolwise.advantages.score_check import MAX_BATCHES, ScoreCheck
from toolwise.types import AnnotatedRollout, ScoredRollout, StepData

Step = Callable[..., StepData]
Make = Callable[..., AnnotatedRollout]
Draw = Callable[[np.random.Generator], tuple[float, list[float]]]
"""The score of a rollout and its step rewards."""


def calls(rng: np.random.Generator, price: float, most: int = 4) -> list[float]:
    return [-price] * int(rng.integers(0, most + 1)) + [0.0]


def right(rng: np.random.Generator, chance: float = 0.5) -> float:
    return float(rng.random() < chance)


def priced(rng: np.random.Generator, price: float, chance: float = 0.5, most: int = 4) -> tuple[float, list[float]]:
    steps = calls(rng, price, most)
    return right(rng, chance) + sum(steps), steps


def always_the_same(rng: np.random.Generator) -> tuple[float, list[float]]:
    return 0.95, [-0.05, 0.0]


def right_if_it_called(rng: np.random.Generator) -> tuple[float, list[float]]:
    steps = calls(rng, 0.3, 1)
    return float(sum(steps) < 0) + sum(steps), steps


def judged(rng: np.random.Generator) -> tuple[float, list[float]]:
    steps = calls(rng, 0.05)
    return float(rng.random()) + sum(steps), steps


def earned(rng: np.random.Generator) -> tuple[float, list[float]]:
    steps = rng.integers(0, 40, int(rng.integers(1, 6))).astype(float).tolist()
    return sum(steps), steps


def earned_less_time(rng: np.random.Generator) -> tuple[float, list[float]]:
    total, steps = earned(rng)
    return total - 0.7 * len(steps), steps


def rounded(draw: Draw, decimals: int) -> Draw:
    def found(rng: np.random.Generator) -> tuple[float, list[float]]:
        score, steps = draw(rng)
        return round(score, decimals), steps

    return found


def bonus_without_price(rng: np.random.Generator) -> tuple[float, list[float]]:
    bonus = 0.2 * right(rng, 0.8)
    return right(rng) + bonus, [bonus, *calls(rng, 0.05, 3)]


CONTAINED: dict[str, Draw] = {
    "a price a call": lambda rng: priced(rng, 0.05),
    "a price a call, all right": lambda rng: priced(rng, 0.05, 1.0),
    "a price a call, all wrong": lambda rng: priced(rng, 0.05, 0.0),
    "one call, all right": always_the_same,
    "a high price": lambda rng: priced(rng, 0.4),
    "right if it called": right_if_it_called,
    "a judge and a price": judged,
    "the world's own rewards": earned,
    "the world's own rewards, less time": earned_less_time,
    "nearly always right": lambda rng: priced(rng, 0.1, 0.97, 1),
    "rounded to one decimal": rounded(lambda rng: priced(rng, 0.004, most=30), 1),
    "rounded to half of a price": rounded(lambda rng: priced(rng, 0.05), 1),
    "a judge and a price, rounded to one decimal": rounded(judged, 1),
    "a judge and a price, rounded to two": rounded(judged, 2),
    "rounding": lambda rng: ((found := priced(rng, 0.1))[0] + 1e-15, found[1]),
}

NOT_CONTAINED: dict[str, Draw] = {
    "right or wrong beside a price a call": lambda rng: (right(rng), calls(rng, 0.05)),
    "all right beside a price a call": lambda rng: (1.0, calls(rng, 0.05)),
    "all wrong beside a price a call": lambda rng: (0.0, calls(rng, 0.05)),
    "right or wrong beside a world of 0 to 100": lambda rng: (right(rng), rng.uniform(0, 25, 4).tolist()),
    "right or wrong beside 100 for all": lambda rng: (right(rng), [60.0, 40.0]),
    "a judge beside a world of 0 to 100": lambda rng: (float(rng.random()), rng.uniform(0, 25, 4).tolist()),
    "never right beside 100 for all": lambda rng: (0.0, [100.0]),
    "never right, at a price of 100 for all": lambda rng: (0.0, [-60.0, -40.0]),
    "half points beside a price a call": lambda rng: (float(rng.integers(0, 3)) / 2, calls(rng, 0.05)),
    "contains a bonus and not the price": bonus_without_price,
    "right or wrong beside a point a step": lambda rng: (right(rng), [1.0] * int(rng.integers(1, 6))),
}


def batch(step: Step, make: Make, draw: Draw, rng: np.random.Generator, size: int = 4, n: int = 5) -> Any:
    rollouts = []
    for group in range(size):
        for _ in range(n):
            score, steps = draw(rng)
            made = [step(i, base_reward=r) for i, r in enumerate(steps)]
            rollouts.append(make(score, f"g{group}", made).scored)
    return rollouts


def looked(step: Step, make: Make, draw: Draw, seed: int, **sizes: int) -> list[str]:
    check, rng = ScoreCheck(), np.random.default_rng(seed)
    found = [check.observe(batch(step, make, draw, rng, **sizes)) for _ in range(MAX_BATCHES + 1)]
    return [warning for warning in found if warning is not None]


@pytest.mark.parametrize("name", CONTAINED)
@pytest.mark.parametrize("seed", range(3))
def test_a_score_that_contains_the_step_rewards_is_left_in_peace(
    name: str, seed: int, step: Step, rollout: Make
) -> None:
    assert looked(step, rollout, CONTAINED[name], seed) == []
    assert looked(step, rollout, CONTAINED[name], seed, size=1, n=2) == []


@pytest.mark.parametrize("name", NOT_CONTAINED)
@pytest.mark.parametrize("seed", range(3))
def test_one_that_does_not_is_told_of_once(name: str, seed: int, step: Step, rollout: Make) -> None:
    (warning,) = looked(step, rollout, NOT_CONTAINED[name], seed)
    assert 'set algorithm.terminal_score = "add"' in warning
    assert "\n" not in warning


def test_it_says_what_it_saw(step: Step, rollout: Make) -> None:
    def first(name: str) -> str:
        return looked(step, rollout, NOT_CONTAINED[name], 0)[0]

    same = "here rollouts of one task have the same score but different step rewards"
    assert same in first("right or wrong beside a price a call")
    assert "here step rewards vary" in first("a judge beside a world of 0 to 100")
    assert "up to 100 away from 0, while all scores are 0" in first("never right beside 100 for all")
    assert "up to 100 away from 0, while scores range from 0 to 1" in first("right or wrong beside 100 for all")


def test_without_step_rewards_there_is_nothing_to_look_at(step: Step, rollout: Make) -> None:
    check = ScoreCheck()
    silent = [rollout(float(i), "g", [step(0), step(1)]).scored for i in range(4)]
    for _ in range(2 * MAX_BATCHES):
        assert check.observe(silent) is None
    # and what comes after them is still among the first batches
    rng = np.random.default_rng(0)
    draw = NOT_CONTAINED["right or wrong beside a price a call"]
    assert check.observe(batch(step, rollout, draw, rng)) is not None


def test_rollouts_without_a_score_are_passed_over(step: Step, rollout: Make) -> None:
    made = rollout(1.0, "g", [step(0, base_reward=1.0)]).scored
    without = ScoredRollout(made.rollout, made.result.model_copy(update={"score": None}), made.steps)
    assert ScoreCheck().observe([made, without]) is None


def test_only_estimators_that_put_the_remainder_somewhere_are_checked() -> None:
    for estimator in (Gigpo(), Gae(), Rlvcr(trajectory=Gigpo()), MonitoredEstimator(Gae())):
        assert ScoreCheck.of(estimator) is not None
    for other in (Grpo(), Rloo(), Gigpo(terminal_score="add"), Gae(terminal_score="never"), Rlvcr()):
        assert ScoreCheck.of(other) is None
