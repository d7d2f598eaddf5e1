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
