"""The routes a router chooses from, and the MIXED label of rows that no single route serves."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from toolwise.errors import ToolwiseError


class RouteAction(StrEnum):
    """A route. Values are the names in files and prompts; the order is that of the head's logits."""

    ANSWER = "ANSWER"
    SEARCH_FAMILY = "SEARCH-FAMILY"
    CALCULATE_FAMILY = "CALCULATE-FAMILY"

    @property
    def index(self) -> int:  # type: ignore[override]  # hides str.index, which no route needs
        return ROUTES.index(self)

    @classmethod
    def parse(cls, written: str | int) -> RouteAction:
        """From the value, the member's name, the short form (`search`), or the index among the logits."""
        if isinstance(written, int) and not isinstance(written, bool) and 0 <= written < len(ROUTES):
            return ROUTES[written]
        route = _SPELLINGS.get(_normalize_spelling(str(written)))
        if route is None:
            raise ToolwiseError(f"unknown route {written!r}; use one of {', '.join(ROUTES)}")
        return route


ROUTES: tuple[RouteAction, ...] = tuple(RouteAction)

MIXED: Literal["MIXED"] = "MIXED"
"""The label of a row that no single route serves: it needs tools of both families, or of neither."""

Target = RouteAction | Literal["MIXED"]


def parse_target(written: str | int) -> Target:
    """A row's label: a route, or MIXED."""
    if isinstance(written, str) and _normalize_spelling(written) == "mixed":
        return MIXED
    try:
        return RouteAction.parse(written)
    except ToolwiseError:
        raise ToolwiseError(f"unknown target action {written!r}; use one of {', '.join(ROUTES)} or {MIXED}") from None


def _normalize_spelling(written: str) -> str:
    return written.strip().lower().replace("_", "-")


_SPELLINGS = {
    spelling: route
    for route in RouteAction
    for spelling in (_normalize_spelling(route.value), _normalize_spelling(route.value).removesuffix("-family"))
}
