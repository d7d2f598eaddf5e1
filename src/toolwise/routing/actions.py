"""What a router may decide for a prompt, and the label of rows for which no one route is right."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from toolwise.errors import ToolwiseError


class RouteAction(StrEnum):
    """How a prompt is dealt with. Values are what files and prompts say; the order is that of the head's logits."""

    ANSWER = "ANSWER"
    SEARCH_FAMILY = "SEARCH-FAMILY"
    CALCULATE_FAMILY = "CALCULATE-FAMILY"

    @property
    def index(self) -> int:  # type: ignore[override]  # a route has a place, and nobody looks for letters in one
        return ROUTES.index(self)

    @classmethod
    def parse(cls, written: str | int) -> RouteAction:
        """From a file's or a member's spelling, in short (`search`), or from the place among the logits."""
        if isinstance(written, int) and not isinstance(written, bool) and 0 <= written < len(ROUTES):
            return ROUTES[written]
        found = _SPELLINGS.get(_normalize_spelling(str(written)))
        if found is None:
            raise ToolwiseError(f"there is no route {written!r}; write {', '.join(ROUTES)}")
        return found


ROUTES: tuple[RouteAction, ...] = tuple(RouteAction)

MIXED: Literal["MIXED"] = "MIXED"
"""The label of a row that no one route serves: its calls are of both families, or of neither."""

Target = RouteAction | Literal["MIXED"]


def parse_target(written: str | int) -> Target:
    """A row's label: a route, or MIXED."""
    if isinstance(written, str) and _normalize_spelling(written) == "mixed":
        return MIXED
    try:
        return RouteAction.parse(written)
    except ToolwiseError:
        raise ToolwiseError(f"there is no target action {written!r}; write {', '.join(ROUTES)} or {MIXED}") from None


def _normalize_spelling(written: str) -> str:
    return written.strip().lower().replace("_", "-")


_SPELLINGS = {
    spelling: route
    for route in RouteAction
    for spelling in (_normalize_spelling(route.value), _normalize_spelling(route.value).removesuffix("-family"))
}
