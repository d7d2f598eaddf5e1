"""The set of routes that a router chooses from: ANSWER, SEARCH-FAMILY and CALCULATE-FAMILY, or those of a user.

A user's route applies to a task only if the task has one of its tools; the default three always apply.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from toolwise.config.router import RouterConfig
from toolwise.config.routes import RouteConfig, check_routes
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.routing.families import (
    MIXED,
    ROUTE_FAMILIES,
    Family,
    RouteAction,
    Target,
    family_of_call,
    heuristic_target,
    needed_call_names,
    parse_family,
    parse_target,
)
from toolwise.types import Task

COST_UNIT = "cost"
"""The default unit."""


@dataclass(frozen=True)
class Route:
    """One route: the tools it offers, and in `options` what else is different on it."""

    name: str
    options: RouteConfig
    shared_families: tuple[str, ...] = ()
    """Families that are offered too, after the route's own tools."""
    price: Mapping[str, float] = field(default_factory=dict)
    """unit -> cost of a rollout, in addition to that of its calls"""
    first_unit: str = COST_UNIT
    """The unit that a rollout's recorded cost is in."""

    @cached_property
    def families(self) -> tuple[str, ...]:
        return tuple(parse_family(family, any_name=True) for family in self.options.families or ())

    @cached_property
    def tools(self) -> tuple[str, ...]:
        return tuple(self.options.tools or ())

    @property
    def needs_tools(self) -> bool:
        return bool(self.families or self.tools)

    def has(self, tool: str, family: str) -> bool:
        """Whether a tool is one of the route's own."""
        return tool in self.tools or family in self.families

    def applies(self, families: Mapping[str, str]) -> bool:
        """Whether a task with these tools can be answered along this route."""
        return not self.needs_tools or any(self.has(tool, family) for tool, family in families.items())


@dataclass(frozen=True)
class RouteSet:
    """Routes in the order of the head's logits."""

    routes: tuple[Route, ...]
    own: bool = True
    """Whether they are a user's. If not, all of them apply to every task."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(route.name for route in self.routes)

    def __len__(self) -> int:
        return len(self.routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.routes)

    def index(self, name: str) -> int:
        return self.names.index(name)

    def parse(self, written: str | int) -> str:
        """The name of the route, from its name in any case, or from its index among the logits."""
        if not self.own:
            return RouteAction.parse(written)
        if isinstance(written, int) and not isinstance(written, bool) and 0 <= written < len(self):
            return self.names[written]
        spelling = _normalize(str(written))
        for name in self.names:
            if _normalize(name) == spelling:
                return name
        raise ToolwiseError(f"unknown route {written!r}; use one of {', '.join(self.names)}")

    def find(self, written: str | int) -> Route:
        return self.routes[self.index(self.parse(written))]

    def parse_target(self, written: str | int) -> Target:
        """A row's label: the name of a route, or MIXED."""
        if not self.own:
            return parse_target(written)
        return MIXED if str(written).strip().upper() == MIXED else self.parse(written)

    def applicable(self, families: Mapping[str, str], task_id: str = "") -> tuple[bool, ...] | None:
        """Which routes a task with these tools can take; None: all. `task_id` is for the error if there is none."""
        if not self.own:
            return None
        mask = tuple(route.applies(families) for route in self.routes)
        if not any(mask):
            raise ConfigError(
                f"no route applies to {f'task {task_id}' if task_id else 'a task'} with the tools "
                f"{', '.join(families) or 'none'}: add a route without tools"
            )
        return None if all(mask) else mask

    @cached_property
    def direct(self) -> str | None:
        """The first route without tools that the trained model answers."""
        return next((route.name for route in self.routes if not route.needs_tools and not route.options.policy), None)


def _normalize(name: str) -> str:
    return name.strip().upper().replace("_", "-")


def _default_route(name: RouteAction) -> Route:
    family = ROUTE_FAMILIES.get(name)
    options = RouteConfig(name=name.value, families=None if family is None else [family.value])
    return Route(name, options, shared_families=() if family is None else (Family.OTHER,))


DEFAULT_ROUTES = RouteSet(tuple(_default_route(name) for name in RouteAction), own=False)


def build_routes(router: RouterConfig, tools: Collection[str] = ()) -> RouteSet:
    """The routes of a configuration; `tools` are those of the run, for `per_tool`."""
    if router.per_tool:
        each = [RouteConfig(name="ANSWER"), *(RouteConfig(name=name, tools=[name]) for name in tools)]
        try:
            check_routes(each, {})
        except ValueError as problem:
            raise ConfigError(f"router.per_tool makes a route of each tool, but {problem}") from None
        return RouteSet(tuple(Route(options.name, options) for options in each))
    if not router.routes:
        return DEFAULT_ROUTES
    unit = str(next(iter(router.price_list), COST_UNIT))
    return RouteSet(
        tuple(
            Route(
                options.name,
                options,
                price=options.price
                if isinstance(options.price, dict)
                else {unit: options.price}
                if options.price
                else {},
                first_unit=unit,
            )
            for options in router.routes
        )
    )


def heuristic_route(task: Task, families: Mapping[str, str], routes: RouteSet) -> Target | None:
    """The route for a task's gold calls: of a user's routes, the only one that has all their tools, else MIXED."""
    if not routes.own:
        return heuristic_target(task, families)
    names = needed_call_names(task)
    if not names:
        return None if names is None else routes.direct
    needed = [(name, family_of_call(name, families)) for name in names]
    fitting = [route.name for route in routes if all(route.has(tool, family) for tool, family in needed)]
    return fitting[0] if len(fitting) == 1 else MIXED


def check_route_tools(routes: RouteSet, families_by_task: Sequence[Mapping[str, str]]) -> None:
    """Raises if a route names a tool or a family that no task has. `families_by_task` has the tools of each task."""
    if not routes.own or not families_by_task:
        return
    known = {tool: family for families in families_by_task for tool, family in families.items()}
    for route in routes:
        for tool in route.tools:
            if tool not in known:
                raise ConfigError(
                    f"route {route.name!r} names the tool {tool!r}, but the tools of the tasks are: "
                    f"{', '.join(known) or 'none'}"
                )
        for family in route.families:
            if family not in known.values():
                described = ", ".join(f"{tool} = {of}" for tool, of in known.items()) or "none"
                raise ConfigError(
                    f"route {route.name!r} names the family {family!r}, which no tool has ({described}): set "
                    "router.families, or correct the name"
                )


def least_cost(routes: RouteSet, families_by_task: Sequence[Mapping[str, str]], unit: str) -> float:
    """The mean cost in `unit` if every task takes its cheapest route and calls no tool."""
    least = [min(r.price.get(unit, 0.0) for r in routes if r.applies(families)) for families in families_by_task]
    return sum(least) / len(least) if least else 0.0


def check_prices(
    routes: RouteSet, units: Sequence[str], *, max_cost: float | None = None, unit: str = COST_UNIT
) -> None:
    """Raises unless every price of a route is in one of `units`, and in `unit` at most `max_cost`."""
    for route in routes:
        if max_cost is not None and (price := route.price.get(unit, 0.0)) > max_cost:
            raise ConfigError(
                f"route {route.name!r} costs {price:g}, more than router.max_cost ({max_cost:g}): raise that, or "
                "remove the route"
            )
        for priced in route.price:
            if priced not in units:
                raise ConfigError(
                    f"route {route.name!r} has a price in {priced!r}, but costs are in {', '.join(units)}: use these"
                )
