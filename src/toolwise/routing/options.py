"""How a route changes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from toolwise.routing.actions import RouteAction
from toolwise.routing.families import Family, families_of_task
from toolwise.routing.prompt_templates import Style, Wording
from toolwise.routing.prompts import ConditionedPrompt, ConditioningMode, condition
from toolwise.tools.base import BaseTool
from toolwise.types import CountUsage, RouteDecision, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """How a route changes a prompt."""

    style: Style | Literal["auto"] = "auto"
    mode: ConditioningMode = "rewrite"
    hard: bool = True
    wording: Wording | None = None
    families: Mapping[str, Family | str] = field(default_factory=dict)
    """Override the tools' declarations and the labels."""

    def families_of(self, task: Task, tools: Mapping[str, BaseTool]) -> dict[str, Family]:
        return families_of_task(task, tools, self.families, task.extra_info.get("tool_families"))

    def __call__(self, task: Task, route: RouteAction, tools: Mapping[str, BaseTool]) -> ConditionedPrompt:
        families = self.families_of(task, tools)
        return condition(
            task.prompt, route, families, style=self.style, mode=self.mode, hard=self.hard, templates=self.wording
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
