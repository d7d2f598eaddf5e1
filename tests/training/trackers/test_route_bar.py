"""A router's shares on the display, which fill one bar."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from toolwise.training.trackers.console import route_shares, share_bar

LINE = {
    "router/share/ANSWER": 0.5,
    "router/share/SEARCH-FAMILY": 0.3,
    "router/share/CALCULATE-FAMILY": 0.2,
    "score/mean": 0.1,
}


def test_shares_are_called_as_people_call_routes() -> None:
    assert route_shares(LINE) == {"answer": 0.5, "search": 0.3, "calculate": 0.2}


def test_a_line_without_a_router_has_no_shares() -> None:
    assert route_shares({"score/mean": 1.0}) == {}


def test_what_is_not_finite_is_left_out() -> None:
    assert route_shares({"router/share/ANSWER": math.nan, "router/share/MINE": 1.0}) == {"mine": 1.0}


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6), st.integers(1, 80))
def test_a_bar_is_as_long_as_it_was_asked_to_be(shares: list[float], width: int) -> None:
    drawn = share_bar({str(place): share for place, share in enumerate(shares)}, width)
    assert drawn.plain.count("█") == (width if sum(shares) > 0 else 0)
