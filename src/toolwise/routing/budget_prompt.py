"""What an agent is told about its budget, in a line after the prompt and after tool results, and the cap it is held to.

The text is only ever appended, so that the KV cache of everything before it is kept. The mean budget and the cap of an
episode are different things: a mean says what episodes may cost on average, a cap what each of them may cost at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from toolwise.config.loader import read_settings
from toolwise.config.router import RouterConfig
from toolwise.messages import Message
from toolwise.routing.cost import Cost, price_of_calls
from toolwise.routing.cost_cap import CappedEnv
from toolwise.routing.prompts import WORDING_FILE, RoutedMessage, check_text, render_text
from toolwise.routing.routes import Route
from toolwise.types import Task


class BudgetPrompt:
    """The texts of `[budget]` in the wording file, for the first budget of a router."""

    def __init__(self, router: RouterConfig) -> None:
        first = router.budgets[0]
        self.unit, self.default = first.unit, first.limit
        path = router.wording if router.wording not in ("", "silent") else None
        self.texts: dict[str, str] = read_settings(WORDING_FILE)["budget"]
        self.texts |= read_settings(Path(path)).get("budget") or {} if path else {}
        for part, text in self.texts.items():
            check_text(str(path or WORDING_FILE), f"budget.{part}", text, self._values(1.0, None, 1.0))

    def line(self, budget: float | None, max_cost: float | None) -> str:
        """For the end of the prompt."""
        value = self.default if budget is None else budget
        left = value if max_cost is None else max_cost
        return render_text(self.texts["prompt"], self._values(value, max_cost, left)).strip("\n")

    def left(self, budget: float | None, max_cost: float | None, route_price: float, calls: float) -> str:
        """For the end of a tool result, after calls of this cost."""
        value = self.default if budget is None else budget
        left = max(0.0, (value if max_cost is None else max_cost) - route_price - calls)
        return render_text(self.texts["left"], self._values(value, max_cost, left)).strip("\n")

    def _values(self, budget: float, max_cost: float | None, left: float) -> dict[str, Any]:
        return {
            "budget": f"{budget:g}",
            "max_cost": None if max_cost is None else f"{max_cost:g}",
            "left": f"{left:g}",
            "unit": self.unit,
        }


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one episode may cost."""

    line: str = ""
    """What the prompt says."""
    wrap_env: Callable[[Any], Any] | None = None
    """Holds an environment to the cap, and says what is left."""


class Spender(Protocol):
    """What an allowance needs of `Conditioning`."""

    router: RouterConfig
    budget_prompt: BudgetPrompt | None

    @property
    def cost(self) -> Cost: ...

    def families_of(self, task: Task) -> Mapping[str, str]: ...

    def offered(self, task: Task, route: str) -> Collection[str]: ...


def allowance_for(
    spender: Spender, task: Task, route: Route, budget: float | None, max_cost: float | None
) -> Allowance:
    """`budget` replaces that of the configuration; `max_cost` can only lower the configured one."""
    router, prompt = spender.router, spender.budget_prompt
    if prompt is None and router.max_cost is None:
        return Allowance()
    caps = [each for each in (router.max_cost, max_cost) if each is not None]
    cap = min(caps, default=None)
    unit = router.budgets[0].unit if router.budgets else spender.cost.units[0]
    route_price = route.price.get(unit, 0.0)
    left = math.inf if cap is None else max(0.0, cap - route_price)
    offered = spender.offered(task, route.name)
    price = partial(price_of_calls, spender.cost, spender.families_of(task), unit, offered=offered)
    if prompt is None:
        return Allowance("", partial(CappedEnv, cap=left, price=price))
    note = partial(prompt.left, budget, cap, route_price)
    return Allowance(prompt.line(budget, cap), partial(CappedEnv, cap=left, price=price, note=note))


def append_line(messages: Sequence[Message], line: str) -> Sequence[Message]:
    """The messages with a line at the end of the last one, which remembers its original."""
    if not line or not messages:
        return messages
    *before, last = messages
    original = last.original if isinstance(last, RoutedMessage) else last
    return [*before, RoutedMessage.replacing(original, f"{last.content or ''}\n\n{line}")]
