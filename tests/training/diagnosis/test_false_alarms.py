"""The doctor on simulated runs: healthy ones, about which it should say nothing, and some that collapse.

The thresholds were chosen with seeds below 1000; the long test uses others. docs/diagnosis.md has the rates.
"""

from __future__ import annotations

from collections import Counter

import pytest
import simulated_runs

RUNS, FIRST_SEED = 200, 10_000


@pytest.mark.parametrize(
    ("kind", "seeds"), [("sparse", (21, 30, 34, 42)), ("penalty", (0, 1)), ("curriculum", (0, 1)), ("longer", (0, 1))]
)
def test_simulated_runs_that_learn_have_no_finding(kind: str, seeds: tuple[int, ...]) -> None:
    assert {seed: simulated_runs.said_about(kind, seed) for seed in seeds} == {seed: set() for seed in seeds}


def test_a_rare_reward_that_is_lost_again_is_still_found() -> None:
    assert all("score_collapse" in simulated_runs.said_about("collapse", seed) for seed in (0, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "allowed"),
    [
        (
            "sparse",
            {"zero_advantages": 0.05},
        ),  # no rollout had the rare reward for 5 steps: true, but it may still come
        ("penalty", {}),
        ("curriculum", {"overfitting": 0.06}),  # the best of many validations was lucky
        ("longer", {"length_creep": 0.02}),
    ],
)
def test_false_alarms_are_rare_on_seeds_that_were_not_tuned_on(kind: str, allowed: dict[str, float]) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + RUNS)
    said = Counter(name for seed in seeds for name in simulated_runs.said_about(kind, seed))
    assert {name: count / RUNS for name, count in said.items() if count / RUNS > allowed.get(name, 0.01)} == {}


@pytest.mark.long
def test_nearly_all_collapses_are_found_on_seeds_that_were_not_tuned_on() -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + RUNS)
    assert sum("score_collapse" in simulated_runs.said_about("collapse", seed) for seed in seeds) >= 0.95 * RUNS
