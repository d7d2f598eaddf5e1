"""Routes of a user's own, `[[router.routes]]`, and the models that can answer them, `[router.policies.NAME]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.loader import Section

RESERVED_NAMES = ("MIXED", "AUTO", "ALL-TOOLS", "OTC")
"""They mean something else where routes are named."""


class RoutePolicyConfig(Section):
    """A model that answers routes in place of the one being trained: on a server, or loaded in this process. It is
    never trained."""

    base_url: str = ""
    """URL of an OpenAI-compatible server, including /v1."""
    model: str = ""
    """Name of the model on the server."""
    api_key_env: str = ""
    """Environment variable that holds the server's API key."""
    path: str = ""
    """Instead of a server: a model folder, a hub name or "builtin:small"."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens per reply; unset: `rollout.max_new_tokens`. A route's own value takes precedence."""
    timeout_s: PositiveFloat = 120.0
    """Timeout of one reply of the server."""
    max_concurrent: PositiveInt = 64
    """Requests to the server at a time."""

    @model_validator(mode="after")
    def _check_where(self) -> RoutePolicyConfig:
        if bool(self.base_url) == bool(self.path):
            raise ValueError("set either base_url and model, or path")
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {self.base_url!r}: give a URL such as http://127.0.0.1:8000/v1")
        if self.base_url and not self.model:
            raise ValueError("model is missing: name the model on the server")
        return self


class RouteConfig(Section):
    """One route: the tools it offers, and what else is different on it. A route without tools answers directly."""

    name: str = Field(pattern=r"^[\w.:+-]{1,64}$")
    """Name in records, metrics and label files; letters, digits and . : + - _"""
    tools: list[str] | None = None
    """Names of the tools it offers; tasks that have none of them do not get this route."""
    families: list[str] | None = None
    """Families of the tools it offers, in addition to `tools`: names that tools or `router.families` have."""
    note: str = ""
    """Text added to the prompt; a template with the variables of routing/wording.toml."""
    thinking: int | None = Field(default=None, ge=1, le=4)
    """Thinking level that the prompt asks for: 1 to 4, of `algorithm.rlvcr.levels`."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens per reply; unset: `rollout.max_new_tokens`."""
    policy: str = ""
    """A table of `router.policies`: another model answers, which teaches the router only. Needs a `price`."""
    price: float | dict[str, float] | None = None
    """Cost of each rollout on this route, in addition to its calls: a number in the first unit of the cost, or
    { unit = number }."""

    @model_validator(mode="after")
    def _check(self) -> RouteConfig:
        for name, listed in (("tools", self.tools), ("families", self.families)):
            if listed is not None and not all(listed or [""]):
                raise ValueError(
                    f"{name} of route {self.name!r} is empty: name some, or leave it out to answer directly"
                )
        prices = self.price if isinstance(self.price, dict) else {"": self.price or 0.0}
        if any(price < 0 for price in prices.values()):
            raise ValueError(f"the price of route {self.name!r} is negative: give a number of at least 0")
        return self

    @property
    def effect(self) -> tuple[object, ...]:
        """What distinguishes a route from others, apart from its name."""
        tools, families = set(self.tools or ()), {family.upper() for family in self.families or ()}
        return (frozenset(tools), frozenset(families), self.note, self.thinking, self.max_new_tokens, self.policy)


def check_routes(routes: Sequence[RouteConfig], policies: Mapping[str, RoutePolicyConfig]) -> None:
    """Raises for routes that contradict each other; those that need tools or tasks to judge are checked later."""
    if len(routes) == 1:
        raise ValueError(f"routes has one route only ({routes[0].name}): a router chooses between two or more")
    seen: dict[str, str] = {}
    effects: dict[tuple[object, ...], str] = {}
    for route in routes:
        if route.name.upper() in RESERVED_NAMES:
            raise ValueError(f"a route is named {route.name!r}, which means something else: choose another name")
        if (other := seen.get(route.name.upper().replace("_", "-"))) is not None:
            raise ValueError(f"two routes are named {other!r} and {route.name!r}: give each its own name")
        seen[route.name.upper().replace("_", "-")] = route.name
        if (other := effects.get(route.effect)) is not None:
            raise ValueError(f"the routes {other!r} and {route.name!r} do the same: remove one of them")
        effects[route.effect] = route.name
        if route.policy and route.policy not in policies:
            known = ", ".join(policies) or "none"
            raise ValueError(
                f"route {route.name!r} names the policy {route.policy!r}, but router.policies are: {known}; add "
                f"[router.policies.{route.policy}]"
            )
        if route.policy and route.price is None:
            raise ValueError(f"route {route.name!r} is answered by another policy: set its price (0 if it is free)")
    for name in policies:
        if routes and name not in {route.policy for route in routes}:
            raise ValueError(f"no route names the policy {name!r}: set policy = {name!r} in a route, or remove it")
