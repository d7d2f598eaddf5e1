"""Predictions of the head: sampling and argmax."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from toolwise.routing.samples import RoutePrediction

WEIGHED = RoutePrediction((math.log(0.6), math.log(0.3), math.log(0.1)))


def test_samples_follow_the_probabilities() -> None:
    counts = Counter(WEIGHED.sample(Random(f"{seed}")) for seed in range(4000))
    assert [counts[route] / 4000 for route in range(3)] == pytest.approx([0.6, 0.3, 0.1], abs=0.03)


def test_argmax_is_the_first_of_equals() -> None:
    assert WEIGHED.argmax() == 0
    assert RoutePrediction((-2.0, -1.0, -1.0)).argmax() == 1


def test_probabilities_are_those_of_the_log_probs() -> None:
    assert WEIGHED.probs == pytest.approx((0.6, 0.3, 0.1))


def test_a_prediction_is_restricted_to_the_routes_that_apply() -> None:
    made = RoutePrediction((math.log(0.5), math.log(0.3), math.log(0.2)), logits=(1.0, 2.0, 3.0))
    assert made.restricted(None) is made
    known = made.restricted((True, False, True))
    assert known.probs == pytest.approx((5 / 7, 0.0, 2 / 7))
    assert known.recorded_logits == (1.0, None, 3.0)
    assert [known.applies(route) for route in range(3)] == [True, False, True]
    assert {known.sample(Random(seed)) for seed in range(50)} == {0, 2}


def test_routes_that_the_head_ruled_out_are_equally_likely() -> None:
    made = RoutePrediction((0.0, -math.inf, -math.inf)).restricted((False, True, True))
    assert made.probs == pytest.approx((0.0, 0.5, 0.5))
