"""The line that a run logs about its estimator at startup."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.advantages import ESTIMATORS, Gigpo, Grpo, MonitoredEstimator, Rlvcr
from toolwise.advantages.score_check import describe_rewards
from toolwise.protocols import AdvantageEstimator

STEPWISE = ("gigpo", "hgpo", "gae", "reinforce_plus_plus")


@pytest.mark.parametrize("name", STEPWISE)
def test_estimators_over_steps_say_where_the_score_goes(name: str) -> None:
    line = describe_rewards(name, ESTIMATORS[name]())
    assert line.startswith(f"advantages: {name} sees score on the last step, step rewards at each step")
    assert line.endswith('a rollout\'s total is its score (algorithm.terminal_score = "remainder")')
    added = describe_rewards(name, ESTIMATORS[name](terminal_score="add"))
    assert "score on the last step, step rewards at each step; the whole score is added" in added
    never = describe_rewards(name, ESTIMATORS[name](terminal_score="never"))
    assert "step rewards at each step only: the score is not part of the returns" in never


@pytest.mark.parametrize("name", ["grpo", "rloo", "hdpo", "pareto"])
def test_estimators_over_rollouts_say_that_steps_do_not_enter(name: str) -> None:
    assert "the score of each rollout; step rewards are not used" in describe_rewards(name, ESTIMATORS[name]())
    assert "score + step rewards of each rollout" in describe_rewards(name, ESTIMATORS[name](terminal_score="add"))


def test_only_an_estimator_with_an_episode_part_still_compares_scores_under_never() -> None:
    assert "only compared between whole rollouts" in describe_rewards("gigpo", Gigpo(terminal_score="never"))
    never = ESTIMATORS["gae"](terminal_score="never")
    assert "compared" not in describe_rewards("gae", never)


def test_prices_are_told() -> None:
    line = describe_rewards("gigpo", Gigpo(default_step_reward=-0.5, invalid_action_penalty=0.1))
    assert "a step without a reward counts as -0.5; an invalid action costs 0.1" in line


@pytest.mark.parametrize(
    "around",
    [lambda e: Rlvcr(trajectory=e), lambda e: MonitoredEstimator(trajectory=e)],
)
def test_what_stands_around_an_estimator_does_not_hide_it(around: Any) -> None:
    assert describe_rewards("x", around(Gigpo())) == describe_rewards("x", Gigpo())
    assert describe_rewards("x", around(Grpo())) == describe_rewards("x", Grpo())
    assert around(Gigpo()).uses_step_rewards
    assert not around(Grpo()).uses_step_rewards


def test_an_estimator_of_your_own_is_named() -> None:
    class Mine(AdvantageEstimator):
        def __call__(self, rollouts: Any) -> Any:
            return None

    assert describe_rewards("mine", Mine()) == (
        "advantages: mine (step rewards and score as the estimator itself uses them)"
    )
