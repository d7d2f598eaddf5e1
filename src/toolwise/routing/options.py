"""How a route changes a prompt."""

from __future__ import annotations

from collections.abc import Mapping

from toolwise.config.router import RouterConfig
from toolwise.routing.actions import RouteAction
from toolwise.routing.families import Family, families_of_task
from toolwise.routing.prompt_templates import load_wording
from toolwise.routing.prompts import ConditionedPrompt, condition
from toolwise.tools.base import BaseTool
from toolwise.types import CountUsage, RouteDecision, Task


class Conditioning:
    """The prompt options of `[router]`, with the wording loaded. Its families override the tools' and the labels'."""

    def __init__(self, router: RouterConfig | None = None) -> None:
        self.router = router or RouterConfig()
        self.wording = load_wording(self.router.wording or None)
        self.families = {name: Family.parse(family) for name, family in self.router.families.items()}

    def families_of(self, task: Task, tools: Mapping[str, BaseTool]) -> dict[str, Family]:
        return families_of_task(task, tools, self.families, task.extra_info.get("tool_families"))

    def __call__(self, task: Task, route: RouteAction, tools: Mapping[str, BaseTool]) -> ConditionedPrompt:
        return condition(
            task.prompt,
            route,
            self.families_of(task, tools),
            style=self.router.style,
            mode=self.router.conditioning,
            hard=self.router.hard,
            templates=self.wording,
        )

    def decision(
        self,
        task: Task,
        route: RouteAction,
        tools: Mapping[str, BaseTool],
        *,
        group_id: str,
        n: int,
        seed: int,
        prompt_id: str,
        log_prob: float | None = None,
        count_usage: CountUsage | None = None,
    ) -> RouteDecision:
        """The decision to roll a task out `n` times under a route."""
        conditioned = self(task, route, tools)
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
