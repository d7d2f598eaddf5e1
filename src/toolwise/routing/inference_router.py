"""The router of a trained head, without learning, and how a route changes a prompt and the tools of its rollouts.

decide   original prompt ─► predict ─► route ─► conditioned prompt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import Any

from toolwise.config.router import RouterConfig
from toolwise.envs.tool_env import tool_spec
from toolwise.errors import ContextFullError
from toolwise.protocols import Router
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.routing.budget import Budgets
from toolwise.routing.cost import (
    CallsCost,
    Cost,
    RouteUsage,
    UsageSource,
    counts_written_calls,
    usage_of,
    written_usage,
)
from toolwise.routing.families import ROUTES, Family, RouteAction, families_of_task, offered_tools
from toolwise.routing.prompts import allowed_tools, condition, load_wording
from toolwise.routing.samples import RoutePrediction, RoutePredictor
from toolwise.tools.base import BaseTool
from toolwise.types import CountUsage, Rollout, RouteDecision, ScoredRollout, StepData, Task

UNIFORM = RoutePrediction((-math.log(len(ROUTES)),) * len(ROUTES))
"""For a prompt that does not fit the context."""


class Conditioning:
    """The prompt options of `[router]`, with the wording loaded. Its families override the tools' and the labels'."""

    def __init__(self, router: RouterConfig | None = None, tools: Mapping[str, BaseTool] | None = None) -> None:
        self.router, self.tools = router or RouterConfig(), tools or {}
        self.wording = load_wording(self.router.wording or None)
        self.families = {name: Family.parse(family) for name, family in self.router.families.items()}

    def families_of(self, task: Task) -> dict[str, Family]:
        return families_of_task(task, self.tools, self.families, task.extra_info.get("tool_families"))

    def original_prompt(self, chat: ChatTokenizer, task: Task) -> Sequence[int]:
        """The tokens of a task's prompt without routing: the router's input."""
        if task.prompt_ids is not None:
            return task.prompt_ids
        tools = offered_tools(task, self.tools).values()
        return chat.start(task.prompt, [tool_spec(tool, task) for tool in tools] or None)

    def decision(
        self,
        task: Task,
        route: RouteAction,
        *,
        group_id: str,
        n: int,
        seed: int,
        prompt_id: str,
        log_prob: float | None = None,
        count_usage: CountUsage | None = None,
    ) -> RouteDecision:
        conditioned = condition(
            task.prompt,
            route,
            self.families_of(task),
            style=self.router.style,
            mode=self.router.conditioning,
            hard=self.router.hard,
            templates=self.wording,
        )
        return RouteDecision(
            # The task's token ids are those of the original prompt, not of the conditioned one.
            task=task.model_copy(update={"prompt_ids": None}) if task.prompt_ids is not None else task,
            group_id=group_id,
            n=n,
            seed=seed,
            prompt=conditioned.messages,
            tools=conditioned.tools,
            route=route.value,
            log_prob=log_prob,
            prompt_id=prompt_id,
            forbidden=conditioned.forbidden,
            count_usage=count_usage,
        )

    def usage_of(self, rollout: Rollout, source: UsageSource | None = None) -> RouteUsage:
        """The tools a rollout used. With real tools, calls that its route refused are free."""
        families = self.families_of(rollout.task)
        route = None if rollout.route is None else RouteAction.parse(rollout.route)
        allowed = families if route is None else allowed_tools(route, families, hard=self.router.hard)
        return usage_of(rollout, families, allowed=allowed, source=source or self.router.usage)


@dataclass(frozen=True, slots=True)
class PredictedPrompt:
    """A prompt with the head's prediction and the random numbers for its routes."""

    task: Task
    prompt_id: str
    prediction: RoutePrediction
    rng: Random


@dataclass(eq=False)
class InferenceRouter(Router):
    model: RoutePredictor
    _: KW_ONLY
    prompt_of: Callable[[Task], Sequence[int]]
    """Returns the tokens of a task's original prompt."""
    budgets: Budgets
    cost: Cost = field(default_factory=CallsCost)
    conditioning: Conditioning = field(default_factory=Conditioning)
    seed: int = 0

    def __post_init__(self) -> None:
        self.budgets.check_units(self.cost.units)

    @property
    def config(self) -> RouterConfig:
        return self.conditioning.router

    @property
    def multipliers(self) -> list[float]:
        return list(self.budgets.lambdas.values())

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = False
    ) -> list[RouteDecision]:
        """One decision per prompt, random for a prompt that does not fit the context. Only a router that learns
        explores."""
        sampled = self.config.eval_mode == "sample"
        return [
            self._decision(p, p.prediction.sample(p.rng) if sampled else p.prediction.argmax(), n)
            for p in self._prompts(tasks, step, label, averaged=True)
        ]

    def _prompts(self, tasks: Sequence[Task], step: int, label: str, *, averaged: bool) -> Iterator[PredictedPrompt]:
        predictions = self._predict([self.prompt_of(task) for task in tasks], averaged=averaged)
        for index, (task, prediction) in enumerate(zip(tasks, predictions, strict=True)):
            prompt_id = f"{label}-{step}/{index}/{task.task_id}"
            rng = Random(f"route/{self.seed}/{prompt_id}")
            yield PredictedPrompt(task, prompt_id, prediction or UNIFORM, rng)

    def _predict(self, prompts: Sequence[Sequence[int]], *, averaged: bool = False) -> list[RoutePrediction | None]:
        """None for prompts that do not fit the context; the others are still predicted."""
        try:
            return list(self.model.predict(prompts, self.multipliers, averaged=averaged))
        except ContextFullError:
            if len(prompts) == 1:
                return [None]
            half = len(prompts) // 2
            return [p for part in (prompts[:half], prompts[half:]) for p in self._predict(part, averaged=averaged)]

    def _decision(self, prompt: PredictedPrompt, route_index: int, n: int) -> RouteDecision:
        route = ROUTES[route_index]
        return self.conditioning.decision(
            prompt.task,
            route,
            group_id=f"{prompt.prompt_id}/{route}",
            n=n,
            seed=prompt.rng.getrandbits(48),
            prompt_id=prompt.prompt_id,
            log_prob=prompt.prediction.logprobs[route_index],
            count_usage=self._usage_counter(prompt.task),
        )

    def _usage_counter(self, task: Task) -> CountUsage | None:
        """Where no tool is executed, the tools' own accounting would be 0 everywhere: counts the calls in the text, in
        the first budget's unit."""
        if not counts_written_calls(task, self.config.usage):
            return None
        families = self.conditioning.families_of(task)
        unit = next(iter(self.budgets.lambdas), self.cost.units[0])

        def count(steps: Sequence[StepData]) -> tuple[Mapping[str, int], float]:
            usage = written_usage(steps, families)
            return usage.calls_by_tool, self.cost(usage)[unit]

        return count

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """How far rollouts routed by this router exceed its budgets; None without budgets or rollouts."""
        routed = [s.rollout for s in scored if not s.rollout.unanswered and s.rollout.route is not None]
        if not routed or not self.budgets.multipliers:
            return None
        return self.budgets.overspend([self.cost(self.conditioning.usage_of(rollout)) for rollout in routed])

    def load(self, folder: Any) -> None:
        """Loads the head and the λ that were saved next to a model's weights."""
        self.budgets.set_lambdas(self.model.load(folder).get("multipliers") or {})
