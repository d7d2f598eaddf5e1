"""The small world: fixed facts, random facts, and arithmetic."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.demo.world import (
    KNOWN_CALCULATIONS,
    LARGEST,
    PLACES,
    SMALL_CALCULATIONS,
    SMALLEST,
    THINGS,
    Calculation,
    Fact,
    is_known,
    make_fact,
    random_calculation,
)

ALL = list(product(PLACES, THINGS))
KNOWN = [(place, thing) for place, thing in ALL if is_known(place, thing)]
UNKNOWN = [pair for pair in ALL if pair not in KNOWN]


def test_names_are_not_repeated() -> None:
    assert len(set(PLACES)) == len(PLACES)
    assert len(set(THINGS)) == len(THINGS)


def test_half_of_all_facts_are_known_and_half_of_every_place_s() -> None:
    assert 2 * len(KNOWN) == len(ALL)
    for place in PLACES:
        assert sum(is_known(place, thing) for thing in THINGS) == len(THINGS) // 2


def test_no_thing_gives_away_whether_it_is_known() -> None:
    for thing in THINGS:
        assert 0.25 < sum(is_known(place, thing) for place in PLACES) / len(PLACES) < 0.75


@pytest.mark.parametrize("pair", KNOWN[:10])
def test_a_known_fact_is_the_same_whoever_draws(pair: tuple[str, str]) -> None:
    assert len({make_fact(*pair, Random(seed)) for seed in range(20)}) == 1


def test_a_known_fact_uses_up_no_chance() -> None:
    rng = Random(1)
    make_fact(*KNOWN[0], rng)
    assert rng.random() == Random(1).random()


@pytest.mark.parametrize("pair", UNKNOWN[:10])
def test_an_unknown_fact_is_drawn_anew(pair: tuple[str, str]) -> None:
    assert len({make_fact(*pair, Random(seed)) for seed in range(40)}) > 20


def test_known_facts_never_change_between_versions() -> None:
    """The shipped model has memorised them."""
    digest = sum(make_fact(place, thing, Random(0)).value * (n + 1) for n, (place, thing) in enumerate(KNOWN))
    assert digest == 2603024


@given(st.sampled_from(ALL), st.integers(0, 1000))
def test_values_stay_in_range(pair: tuple[str, str], seed: int) -> None:
    assert SMALLEST <= make_fact(*pair, Random(seed)).value <= LARGEST


def test_a_fact_as_a_sentence() -> None:
    assert Fact("Orsa", "mills", 31).sentence() == "Orsa has 31 mills."


@pytest.mark.parametrize(("operator", "value"), [("+", 15), ("-", 9), ("*", 36)])
def test_a_sum_by_hand(operator: str, value: int) -> None:
    assert Calculation(12, operator, 3).value == value
    assert Calculation(12, operator, 3).expression == f"12 {operator} 3"


def test_known_sums_are_about_half_of_the_small_ones() -> None:
    assert len(set(SMALL_CALCULATIONS)) == len(SMALL_CALCULATIONS)
    assert set(KNOWN_CALCULATIONS) < set(SMALL_CALCULATIONS)
    assert 0.4 < len(KNOWN_CALCULATIONS) / len(SMALL_CALCULATIONS) < 0.6
    assert all(s.value >= 0 for s in SMALL_CALCULATIONS)


@given(st.integers(0, 10**6))
def test_a_drawn_sum_is_not_known_and_not_negative(seed: int) -> None:
    drawn = random_calculation(Random(seed))
    assert drawn not in KNOWN_CALCULATIONS
    assert drawn.value >= 0
    assert 1 <= drawn.left <= 9999
    assert 1 <= drawn.right <= 9999
