"""Cut texts say how much is missing; numbers are bounded."""

from __future__ import annotations

import math

import pytest

from toolwise.untrusted.bounds import MAX_SCORE, in_bounds, truncate_text


def test_a_text_is_cut_with_a_mark() -> None:
    assert truncate_text("short", 5) == "short"
    assert truncate_text("longer", 4) == "long … cut, 2 characters"
    assert truncate_text("x" * 5_000, 10).endswith("… cut, 4,990 characters")


def test_lone_surrogates_are_escaped() -> None:
    assert truncate_text("a\ud800é", 10) == "a\\ud800é"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, -1e308, 2 * MAX_SCORE])
def test_out_of_bounds(number: float) -> None:
    assert not in_bounds(number)


def test_in_bounds() -> None:
    assert in_bounds(0)
    assert in_bounds(-MAX_SCORE)
