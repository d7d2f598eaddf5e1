"""Routes and their spellings."""

from __future__ import annotations

import json

import pytest

from toolwise.errors import ToolwiseError
from toolwise.routing.actions import MIXED, ROUTES, RouteAction, parse_target


def test_routes_are_in_the_order_of_the_logits() -> None:
    assert [route.value for route in ROUTES] == ["ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"]
    assert [route.index for route in ROUTES] == [0, 1, 2]


@pytest.mark.parametrize(
    ("written", "route"),
    [
        ("ANSWER", RouteAction.ANSWER),
        ("SEARCH-FAMILY", RouteAction.SEARCH_FAMILY),
        ("SEARCH_FAMILY", RouteAction.SEARCH_FAMILY),
        (" search ", RouteAction.SEARCH_FAMILY),
        ("calculate_family", RouteAction.CALCULATE_FAMILY),
        ("calculate", RouteAction.CALCULATE_FAMILY),
        (RouteAction.CALCULATE_FAMILY, RouteAction.CALCULATE_FAMILY),
        (1, RouteAction.SEARCH_FAMILY),
    ],
)
def test_every_spelling_is_read(written: str | int, route: RouteAction) -> None:
    assert RouteAction.parse(written) is route
    assert parse_target(written) is route


def test_a_route_is_written_as_the_files_have_it() -> None:
    assert json.dumps({"router_target_action": RouteAction.SEARCH_FAMILY}) == (
        '{"router_target_action": "SEARCH-FAMILY"}'
    )


def test_mixed_is_a_label_and_not_a_route() -> None:
    assert parse_target("mixed") == MIXED
    with pytest.raises(ToolwiseError, match="unknown route 'MIXED'; use one of ANSWER, SEARCH-FAMILY"):
        RouteAction.parse(MIXED)


@pytest.mark.parametrize("written", ["family", "", "SEARCHFAMILY", 3, -1, True])
def test_unknown_routes_are_refused(written: str | int) -> None:
    with pytest.raises(ToolwiseError, match="unknown route"):
        RouteAction.parse(written)
    with pytest.raises(ToolwiseError, match="or MIXED"):
        parse_target(written)
