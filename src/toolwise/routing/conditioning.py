"""How a route changes a prompt, the tools of its rollouts and what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from toolwise.config.router import RouterConfig
from toolwise.envs.tool_env import tool_spec
from toolwise.protocols import AgentPolicy
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.routing.budget_prompt import BudgetPrompt, allowance_for, append_line
from toolwise.routing.cost import (
    Cost,
    PricesCost,
    RouteUsage,
    UsageSource,
    build_cost,
    counts_written_calls,
    price_of_offered,
    usage_of,
)
from toolwise.routing.families import families_of_task, offered_tools, parse_family
from toolwise.routing.meters import CountThinking, read_meters
from toolwise.routing.prompts import ConditionedPrompt, allowed_tools, condition, load_wording
from toolwise.routing.routes import RouteSet, build_routes
from toolwise.routing.samples import RoutePrediction
from toolwise.tools.base import BaseTool
from toolwise.types import CountUsage, PriceCalls, Rollout, RouteDecision, Task

PROMPT_BATCH_SIZE = 256
"""Prompts encoded together."""


@dataclass(frozen=True, slots=True)
class _TaskTools:
    """What is known about a task's tools. Remembered, since a step asks several times for each rollout."""

    task: Task
    families: dict[str, str]
    counts_written: bool
    """Whether calls are counted in the text of its rollouts."""
    names: tuple[tuple[str, str], ...]
    """The families, to compare with another task's."""
    offered: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """route -> the tools that may be called on it"""
    conditioned: dict[str, ConditionedPrompt] = field(default_factory=dict)
    """route -> its prompt"""


class Conditioning:
    """The routes of `[router]` and how they change prompts, with the wording loaded. Its families override the tools'
    and the labels'. `policies` answer the routes they are named after, instead of the policy being trained."""

    def __init__(
        self,
        router: RouterConfig | None = None,
        tools: Mapping[str, BaseTool] | None = None,
        *,
        routes: RouteSet | None = None,
        policies: Mapping[str, AgentPolicy] | None = None,
        count_thinking: CountThinking | None = None,
    ) -> None:
        """`count_thinking` counts the thinking tokens of a rollout, for price lists."""
        self.router, self.tools, self.policies = router or RouterConfig(), tools or {}, policies or {}
        self.count_thinking = count_thinking
        self.routes = routes or build_routes(self.router, self.tools)
        self.wording = load_wording(self.router.wording or None, self.routes)
        self.budget_prompt = BudgetPrompt(self.router) if self.router.budget_prompt else None
        own = self.routes.own
        self.families = {name: parse_family(family, any_name=own) for name, family in self.router.families.items()}
        self._last_tools: dict[int, _TaskTools] = {}
        """By the identity of the task, which is held so that it stays unique."""

    @cached_property
    def cost(self) -> Cost:
        return build_cost(self.router, self.tools)

    def families_of(self, task: Task) -> dict[str, str]:
        """The family of each tool of a task."""
        return self._tools_of(task).families

    def _tools_of(self, task: Task) -> _TaskTools:
        known = self._last_tools.get(id(task))
        if known is None or known.task is not task:
            labels = task.extra_info.get("tool_families")
            families = families_of_task(task, self.tools, self.families, labels, any_name=self.routes.own)
            written = counts_written_calls(task, self.router.usage)
            known = self._remember(_TaskTools(task, families, written, tuple(families.items())))
        return known

    def _remember(self, tools: _TaskTools) -> _TaskTools:
        if len(self._last_tools) >= PROMPT_BATCH_SIZE:
            self._last_tools.clear()
        self._last_tools[id(tools.task)] = tools
        return tools

    def carry_over(self, known: Task, task: Task) -> None:
        """What is known about a task holds for one that equals it."""
        if known is not task:
            self._remember(replace(self._tools_of(known), task=task))

    def conditioned(self, task: Task, route: str) -> ConditionedPrompt:
        """The prompt of a task on a route."""
        tools = self._tools_of(task)
        conditioned = tools.conditioned.get(route)
        if conditioned is None:
            conditioned = tools.conditioned[route] = condition(
                task.prompt,
                self.routes.find(route),
                tools.families,
                style=self.router.style,
                mode=self.router.conditioning,
                hard=self.router.hard,
                templates=self.wording,
            )
        return conditioned

    def usage_key(self, cost: Cost, rollout: Rollout) -> Hashable:
        """Equal for rollouts that used and cost the same; None if that is not known beforehand."""
        tools = self._tools_of(rollout.task)
        if tools.counts_written or (isinstance(cost, PricesCost) and cost.meters):
            return None
        return tools.names, rollout.route, bool(rollout.steps), tuple(rollout.usage.calls.items())

    def applicable(self, task: Task) -> tuple[bool, ...] | None:
        """Which routes a task can take; None: all."""
        return self.routes.applicable(self.families_of(task), task.task_id) if self.routes.own else None

    def routes_of(self, task: Task) -> list[str]:
        """The names of the routes that a task can take."""
        return list(itertools.compress(self.routes.names, self.applicable(task) or itertools.repeat(True)))

    def offered(self, task: Task, route: str) -> tuple[str, ...]:
        """The tools of a task that may be called on a route."""
        tools = self._tools_of(task)
        offered = tools.offered.get(route)
        if offered is None:
            chosen = self.routes.find(route)
            offered = tools.offered[route] = allowed_tools(chosen, tools.families, hard=self.router.hard)
        return offered

    def prices(self, route: str | None) -> Mapping[str, float]:
        """unit -> what a rollout on a route costs besides its calls"""
        return {} if route is None else self.routes.find(route).price

    def original_prompt(self, chat: ChatTokenizer, task: Task) -> Sequence[int]:
        """The tokens of a task's prompt without routing: the router's input."""
        if task.prompt_ids is not None:
            return task.prompt_ids
        tools = offered_tools(task, self.tools).values()
        return chat.start(task.prompt, [tool_spec(tool, task) for tool in tools] or None)

    def decision(
        self,
        task: Task,
        route: str,
        *,
        group_id: str,
        n: int,
        seed: int,
        prompt_id: str,
        prediction: RoutePrediction | None = None,
        count_usage: CountUsage | None = None,
        budget: float | None = None,
        max_cost: float | None = None,
    ) -> RouteDecision:
        """`budget` and `max_cost` are what the agent is told and held to; None: those of the configuration."""
        chosen = self.routes.find(route)
        conditioned = self.conditioned(task, chosen.name)
        allowance = allowance_for(self, task, chosen, budget, max_cost)
        return RouteDecision(
            # The task's token ids are those of the original prompt, not of the conditioned one.
            task=task.model_copy(update={"prompt_ids": None}) if task.prompt_ids is not None else task,
            group_id=group_id,
            n=n,
            seed=seed,
            prompt=conditioned.messages
            if allowance.line is None
            else append_line(conditioned.messages, allowance.line),
            tools=conditioned.tools,
            route=str(chosen.name),
            log_prob=None if prediction is None else prediction.logprobs[self.routes.index(chosen.name)],
            logits=None if prediction is None else prediction.recorded_logits,
            prompt_id=prompt_id,
            forbidden=conditioned.forbidden,
            count_usage=count_usage,
            policy=self.policies.get(chosen.name),
            answered_by=chosen.options.policy,
            price=chosen.price.get(chosen.first_unit, 0.0),
            wrap_env=allowance.wrap_env,
            price_calls=self.price_calls(task, self.offered(task, chosen.name)),
            budget=budget,
        )

    @property
    def unit(self) -> str:
        """That of the first budget, or the first one of the cost."""
        return self.router.budgets[0].unit if self.router.budgets else self.cost.units[0]

    def price_calls(self, task: Task, offered: Collection[str] | None = None) -> PriceCalls:
        """Prices the calls of a task's rollouts; None: all its tools are offered."""
        families = self.families_of(task)
        return partial(price_of_offered, self.cost, families, self.unit, families if offered is None else offered)

    def usage_of(self, rollout: Rollout, source: UsageSource | None = None) -> RouteUsage:
        """The tools a rollout used. With real tools, calls that its route refused are free."""
        families = self.families_of(rollout.task)
        allowed = families if rollout.route is None else self.offered(rollout.task, rollout.route)
        return usage_of(rollout, families, allowed=allowed, source=source or self.router.usage)

    def costs_of(
        self, cost: Cost, rollout: Rollout, source: UsageSource | None = None, *, usage: RouteUsage | None = None
    ) -> dict[str, float]:
        """What a rollout's calls cost, and its route, by unit. `usage`: what `usage_of` says, if it is known."""
        usage = self.usage_of(rollout, source) if usage is None else usage
        if isinstance(cost, PricesCost) and cost.meters:
            usage = replace(usage, meters=read_meters(rollout, cost.meters, self.count_thinking))
        costs = cost(usage)
        for unit, price in (self.prices(rollout.route) if rollout.steps else {}).items():
            costs[unit] += price
        return costs
