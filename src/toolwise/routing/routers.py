"""Routers without a head: one that leaves every prompt unchanged, with all tools of its task, and the user's own.

A user's router is created from a reference, a class or an object, and checked wherever it is called.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolwise.config.components import create
from toolwise.config.imports import load_reference
from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError, RouterError
from toolwise.messages import Message
from toolwise.protocols import Metrics, Router
from toolwise.serialization.state import TensorCollector, decode, encode
from toolwise.types import PriceCalls, RouteDecision, ScoredRollout, Task
from toolwise.untrusted.time_limit import TimeLimitError
from toolwise.untrusted.user_code import call_part_within, describe_at, user_location

DEFAULT_LIMIT_S = RouterConfig().timeout_s
RouterSpec = str | Router | Callable[..., Router]
T = TypeVar("T")

_ROUTE_NAME = re.compile(r"[\w.:+-]{1,64}")
"""Routes are part of the names of metrics."""


@dataclass(frozen=True, slots=True)
class DirectRouter(Router):
    """One group per prompt, with a seed that depends on the run, the step, the label and the index."""

    seed: int
    price_of: Callable[[Task], PriceCalls] | None = None
    """What calls of a task's tools cost; None: the tools' own prices."""

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        # A task that occurs twice in a step, under another label, must not repeat its rollouts.
        salt = 0 if label == "step" else zlib.crc32(label.encode()) << 24
        return [
            RouteDecision(
                task=task,
                group_id=f"{label}-{step}/{index}/{task.task_id}",
                n=n,
                seed=((self.seed * 1_000_003 + step) * 65_537 + index) ^ salt,
                prompt=task.prompt,
                price_calls=None if self.price_of is None else self.price_of(task),
            )
            for index, task in enumerate(tasks)
        ]


def build_user_router(
    source: RouterSpec,
    kwargs: Mapping[str, Any],
    *,
    provided: Mapping[str, Any],
    tools: Collection[str] | None,
    limit_s: float = DEFAULT_LIMIT_S,
) -> Router:
    """`source` is a reference, a class, a function that returns a router, or a router.

    A class or function receives `kwargs`, and those of `provided` that it has parameters for. `tools` are the names of
    the tools that a decision may offer; None: the environment knows. `limit_s` is the time limit of each call.
    """
    name = source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__qualname__)
    where = f"router: {name}"
    router: Any = load_reference(source, what="router.name") if isinstance(source, str) else source
    no_router = f"{where} is not a router: subclass toolwise.Router and define decide"
    if isinstance(router, type) and not issubclass(router, Router):
        raise ConfigError(no_router)
    router = create(router, kwargs, where, provided)
    if not isinstance(router, Router):
        raise ConfigError(no_router)
    return UserRouter(router, name, tools, limit_s)


class UserRouter(Router):
    """Turns the errors of a user's router, and decisions that cannot be rolled out, into a `RouterError`."""

    def __init__(self, router: Router, name: str, tools: Collection[str] | None, limit_s: float) -> None:
        self.router, self.name, self.tools, self.limit_s = router, name, tools, limit_s

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        decisions = self._call(self.router.decide, tasks, n, step, label=label, explore=explore)
        if (problem := _find_problem(decisions, tasks, n, self.tools)) is not None:
            raise RouterError(f"router {self.name}: decide {problem}")
        return decisions

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        metrics = self._call(self.router.learn, scored)
        try:
            return {str(name): float(value) for name, value in metrics.items()}
        except (AttributeError, TypeError, ValueError):
            raise RouterError(f"router {self.name}: learn returned {metrics!r:.80}: return names and numbers") from None

    def warm_start(self) -> None:
        self._call(self.router.warm_start)

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        share = self._call(self.router.overspend, scored)
        if share is None or (isinstance(share, int | float) and share == share):
            return share
        raise RouterError(f"router {self.name}: overspend returned {share!r:.80}: return a number or None")

    def save(self, folder: Path) -> None:
        self._call(self.router.save, folder)

    def load(self, folder: Path) -> None:
        self._call(self.router.load, folder)

    def state_dict(self) -> dict[str, Any]:
        """A copy: what the router does next does not change it."""
        state, tensors = self._call(self.router.state_dict), TensorCollector()
        try:
            encoded = encode(state, "state_dict", tensors)
            copy: dict[str, Any] = decode(encoded, {name: tensor.clone() for name, tensor in tensors.by_name.items()})
        except (TypeError, RecursionError) as fault:
            raise RouterError(f"router {self.name}: cannot be saved in a checkpoint: {fault}") from None
        return copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call(self.router.load_state_dict, state)

    def _call(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        try:
            return call_part_within(self.limit_s, method, *arguments, **options)
        except Exception as fault:
            name = getattr(method, "__name__", "a method")
            problem = f"failed: {describe_at(fault)}"
            if isinstance(fault, TimeLimitError):
                problem = f"took longer than router.timeout_s = {self.limit_s:g}{user_location(fault)}"
            raise RouterError(f"router {self.name}: {name} {problem}") from fault


def _find_problem(decisions: Any, tasks: Sequence[Task], n: int, tools: Collection[str] | None) -> str | None:
    if not isinstance(decisions, list) or not all(isinstance(d, RouteDecision) for d in decisions):
        return f"returned {decisions!r:.80}: return a list of toolwise.RouteDecision"
    for d in decisions:
        for name, kind in (("task", Task), ("group_id", str), ("prompt_id", str), ("seed", int)):
            if not isinstance(value := getattr(d, name), kind):
                return f"returned a decision with {name} = {value!r:.80}: use a value of type {kind.__name__}"
    prompts = {d.prompt_id or d.group_id: d.task.task_id for d in decisions}
    if Counter(prompts.values()) != Counter(task.task_id for task in tasks):
        return (
            f"returned decisions for {len(prompts)} prompts, but there are {len(tasks)} tasks: return one for each "
            "task, or several with the same prompt_id"
        )
    if len({d.group_id for d in decisions}) < len(decisions):
        return "used a group_id twice: give each decision its own"
    rollouts: Counter[str] = Counter()
    for d in decisions:
        if not isinstance(d.n, int) or d.n < 1:
            return f"returned a decision with n = {d.n!r:.80}: give each at least one rollout"
        rollouts[d.prompt_id or d.group_id] += d.n
        if d.route is not None and not (isinstance(d.route, str) and _ROUTE_NAME.fullmatch(d.route)):
            return f"returned the route {d.route!r:.80}: use a short name of letters, digits, '-' and '_'"
        if unknown := [name for name in d.tools or () if tools is not None and name not in tools]:
            return f"offers the unknown tool {unknown[0]!r:.80}; there are {', '.join(sorted(tools or ())) or 'none'}"
        if not all(isinstance(message, Message) for message in d.prompt):
            return f"returned a prompt that is not a list of toolwise.Message: {d.prompt!r:.80}"
    if wrong := [(prompt, count) for prompt, count in rollouts.items() if count != n]:
        return f"planned {wrong[0][1]} rollouts for {wrong[0][0]!r:.80}: each task has {n} in all"
    return None
