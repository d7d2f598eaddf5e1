"""From tasks to labels: by the rules, or by asking a model, each question once and each answer kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.errors import ContextFullError
from toolwise.policies.openai.endpoint import Endpoint
from toolwise.policies.openai.server_errors import ServerError
from toolwise.routing.actions import parse_target
from toolwise.routing.families import (
    Family,
    declared_family,
    described_tools,
    families_of_task,
    heuristic_target,
    offered_tools,
)
from toolwise.routing.labels.cache import AnswerCache
from toolwise.routing.labels.label_files import Label
from toolwise.routing.labels.questions import read_family, read_target, row_question, tool_question
from toolwise.tools.base import BaseTool
from toolwise.types import Task

_FATAL_KINDS = frozenset({"connect", "refused", "redirect"})
"""Kinds of trouble that every other question would meet as well."""


@dataclass(slots=True)
class LabellingResult:
    """What a labelling came to."""

    labels: list[Label]
    asked: int = 0
    """Questions put to the model; the others were answered before."""
    from_cache: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(tool or row, what went wrong): asked again the next time."""


def label_by_rules(tasks: Sequence[Task], tools: Mapping[str, BaseTool] | None = None) -> LabellingResult:
    """Offline, by the families' rules and the calls of the ground truth; None where that tells no calls."""
    labels = []
    for task in tasks:
        families = families_of_task(task, tools)
        labels.append(Label(task.task_id, heuristic_target(task, families), families, "heuristic"))
    return LabellingResult(labels)


async def label_by_model(
    tasks: Sequence[Task],
    endpoint: Endpoint,
    model: str,
    cache: AnswerCache,
    tools: Mapping[str, BaseTool] | None = None,
    *,
    on_answer: Callable[[], None] = lambda: None,
) -> LabellingResult:
    """First the families of all tools, then the route of each row, given those.

    Trouble with one question leaves one label out; a server that is not there, or that refuses, ends it all with a
    `ServerError`. Whatever was answered until then is in the cache.
    """
    asking = _LabelClient(endpoint, cache, on_answer)
    families = await _label_families(asking, tasks, model, tools or {})
    questions = {task.task_id: row_question(model, task, families[task.task_id]) for task in tasks}
    targets = await asking.all(questions, read_target)
    labels = [
        Label(
            task.task_id,
            parse_target(targets[task.task_id]) if task.task_id in targets else None,
            families[task.task_id],
            model,
        )
        for task in tasks
    ]
    return LabellingResult(labels, asking.asked, asking.from_cache, asking.failed)


async def _label_families(
    asking: _LabelClient, tasks: Sequence[Task], model: str, tools: Mapping[str, BaseTool]
) -> dict[str, dict[str, Family]]:
    """Of every task's tools. What a tool says of itself is not asked; where there is no answer, the rules decide."""
    by_rules = {task.task_id: families_of_task(task, tools) for task in tasks}
    told = {task.task_id: _descriptions(task, tools, by_rules[task.task_id]) for task in tasks}
    wanted = {tool for described in told.values() for tool in described.items()}
    questions = {f"tool {name}: {text}": tool_question(model, name, text) for name, text in sorted(wanted)}
    answers = await asking.all(questions, read_family)
    return {
        task.task_id: {
            name: Family.parse(answers.get(f"tool {name}: {told[task.task_id].get(name, '')}", family))
            for name, family in by_rules[task.task_id].items()
        }
        for task in tasks
    }


def _descriptions(task: Task, tools: Mapping[str, BaseTool], known: Mapping[str, Family]) -> dict[str, str]:
    real = offered_tools(task, tools)
    decided = {name for name, tool in real.items() if declared_family(tool) is not None}
    told = {name: tool.tool_schema.function.description for name, tool in real.items()}
    return {
        name: text for name, text in (described_tools(task) | told).items() if name in known and name not in decided
    }


class _LabelClient:
    """Questions by name, asked together; counts what became of them."""

    def __init__(self, endpoint: Endpoint, cache: AnswerCache, on_answer: Callable[[], None]) -> None:
        self.endpoint, self.cache, self.on_answer = endpoint, cache, on_answer
        self.asked = self.from_cache = 0
        self.failed: list[tuple[str, str]] = []

    async def all(
        self, questions: Mapping[str, dict[str, Any]], read: Callable[[Any, Mapping[str, str]], Any]
    ) -> dict[str, str]:
        """name -> answer, for those that have one."""
        answers: dict[str, str] = {}
        missing: dict[str, dict[str, Any]] = {}
        for name, question in questions.items():
            known = self.cache.get(question)
            if isinstance(known, str):
                answers[name] = known
                self.from_cache += 1
            else:
                missing[name] = question

        async def one(name: str, question: dict[str, Any]) -> None:
            self.asked += 1
            try:
                answer = str(await self.endpoint.ask(question, read))
            except (ServerError, ContextFullError) as fault:
                if isinstance(fault, ServerError) and fault.kind in _FATAL_KINDS:
                    raise
                self.failed.append((name, str(fault)))
            else:
                self.cache.put(question, answer)
                answers[name] = answer
            self.on_answer()

        work = [asyncio.create_task(one(name, question)) for name, question in missing.items()]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return answers
