"""One choice of a route before a turn: from the tokens of the conversation to what the turn may do, and what it cost.

A route changes a turn without changing what the model has read: tools of other routes are refused, or calls cannot be
begun at all, and a note is appended to the last message, which is still unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from toolwise.messages import Message
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import (
    UNREADABLE,
    Cost,
    RouteUsage,
    UsageSource,
    counts_written_calls,
    merge_unknown_calls,
    refused_by_route,
    written_usage,
)
from toolwise.routing.prompts import EMPTY_WORDING, allowed_tools, condition, prompt_style
from toolwise.routing.samples import RoutePrediction
from toolwise.types import Rollout, RouteDecision, Task, TurnRoute


@dataclass(frozen=True)
class TurnChooser:
    """Routes the turns of the rollouts of one task."""

    task: Task
    conditioning: Conditioning
    predict: Callable[[Sequence[int]], Awaitable[RoutePrediction]]
    """The head's prediction from the tokens of the conversation."""
    choose: Callable[[RoutePrediction, int, int], int]
    """(prediction, turn, rollout offset) -> the index of a route"""
    explore: bool = False
    shift: float | None = None
    """How it chooses, for a process that builds it again: as in `TurnRouter.decision_for`."""

    async def route(
        self, turn: int, messages: Sequence[Message], prompt_ids: Sequence[int], rollout_offset: int
    ) -> TurnRoute:
        conditioning = self.conditioning
        prediction = (await self.predict(prompt_ids)).restricted(conditioning.applicable(self.task))
        index = self.choose(prediction, turn, rollout_offset)
        name = conditioning.routes.names[index]
        return turn_route(conditioning, self.task, name, turn, messages, prediction, prediction.logprobs[index])


def turn_route(
    conditioning: Conditioning,
    task: Task,
    name: str,
    turn: int,
    messages: Sequence[Message],
    prediction: RoutePrediction | None = None,
    log_prob: float | None = None,
) -> TurnRoute:
    """What the route `name` changes in a turn after `messages`."""
    router, route, families = conditioning.router, conditioning.routes.find(name), conditioning.families_of(task)
    # A message that the model wrote, or nothing, cannot be added to.
    last = list(messages[-1:]) if messages and messages[-1].role != "assistant" else []
    conditioned = condition(
        last,
        route,
        families,
        style=prompt_style(task.prompt) if router.style == "auto" else router.style,
        mode="append",
        hard=router.hard,
        templates=conditioning.wording,
    )
    changed = conditioned.messages[-1] if last and conditioned.messages[-1] is not last[-1] else None
    offers_none = bool(families) and not allowed_tools(route, families, hard=router.hard)
    return TurnRoute(
        turn=turn,
        route=str(route.name),
        log_prob=log_prob,
        logits=None if prediction is None else prediction.recorded_logits,
        forbidden=conditioned.forbidden,
        message=changed,
        bans_calls=router.turn_mask == "decode" and offers_none,
        max_new_tokens=route.options.max_new_tokens,
        prediction=prediction,
    )


def turn_decision(
    chooser: TurnChooser,
    *,
    group_id: str,
    n: int,
    seed: int,
    prompt_id: str,
) -> RouteDecision:
    """The rollouts of a task whose turns are routed one by one: one group, with the prompt and the tools unchanged."""
    task, keeps_tokens = chooser.task, chooser.conditioning.wording is EMPTY_WORDING
    return RouteDecision(
        # Token ids given with a task do not contain the note of its first turn.
        task=task if keeps_tokens or task.prompt_ids is None else task.model_copy(update={"prompt_ids": None}),
        group_id=group_id,
        n=n,
        seed=seed,
        prompt=task.prompt,
        prompt_id=prompt_id,
        turns=chooser,
    )


def turn_usages(conditioning: Conditioning, rollout: Rollout, source: UsageSource | None = None) -> list[RouteUsage]:
    """The tools that each turn used. Calls that its route refused are free."""
    families, router = conditioning.families_of(rollout.task), conditioning.router
    if counts_written_calls(rollout.task, source or router.usage):
        return [written_usage([step], families) for step in rollout.steps]
    calls = [Counter(step.step_info.get("calls") or {}) for step in rollout.steps]
    if calls:  # of a reply that was cut off, the unread calls are counted for the rollout only
        calls[-1] += Counter(rollout.usage.calls) - sum(calls, Counter())
    usages = []
    for chosen, counts in zip(rollout.turn_routes, calls, strict=False):
        reachable = {UNREADABLE, *conditioning.offered(rollout.task, chosen.route)}
        merged = merge_unknown_calls(counts, families).items()
        usages.append(RouteUsage.of({tool: count for tool, count in merged if tool in reachable}, families))
    return usages


def refused_turn_calls(conditioning: Conditioning, rollout: Rollout) -> Counter[str]:
    """Calls by tool that the route of their turn does not offer: they were refused, and are free."""
    families, refused = conditioning.families_of(rollout.task), Counter[str]()
    for chosen, step in zip(rollout.turn_routes, rollout.steps, strict=False):
        offered = conditioning.offered(rollout.task, chosen.route)
        refused += refused_by_route(step.step_info.get("calls") or {}, families, offered)
    return refused


def turn_costs(
    conditioning: Conditioning, cost: Cost, rollout: Rollout, source: UsageSource | None = None
) -> list[dict[str, float]]:
    """What each turn added to the cost of the rollout, by unit: its calls, and the price of its route."""
    families, total = conditioning.families_of(rollout.task), Counter[str]()
    before = cost(RouteUsage.of(total, families))
    added = []
    for usage, chosen in zip(turn_usages(conditioning, rollout, source), rollout.turn_routes, strict=False):
        total.update(usage.calls_by_tool)
        now = cost(RouteUsage.of(total, families))
        prices = conditioning.prices(chosen.route)
        added.append({unit: now[unit] - before[unit] + prices.get(unit, 0.0) for unit in now})
        before = now
    return added


def total_costs(cost: Cost, turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """By unit."""
    return {unit: sum(turn[unit] for turn in turns) for unit in cost.units}


def spending_weights(conditioning: Conditioning, cost: Cost, task: Task, unit: str) -> tuple[float, ...]:
    """How much of a budget each route can spend in a turn: the price of one call of its most expensive tool and its own
    price, as a share of the most expensive route's; 0 for a route that cannot spend."""
    families, prices = conditioning.families_of(task), []
    for route in conditioning.routes:
        allowed = allowed_tools(route, families, hard=conditioning.router.hard)
        calls = [cost(RouteUsage.of({tool: 1}, families))[unit] for tool in allowed]
        prices.append(route.price.get(unit, 0.0) + max(calls, default=0.0))
    highest = max(prices, default=0.0)
    return tuple(price / highest if highest else 0.0 for price in prices)
