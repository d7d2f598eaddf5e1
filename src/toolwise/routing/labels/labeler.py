"""Labels tasks by rules or by asking a model; answers are cached, so that each question is asked once."""

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
"""Kinds of errors that every other question would also get."""


@dataclass(slots=True)
class LabellingResult:
    """Labels and statistics of a labelling."""

    labels: list[Label]
    asked: int = 0
    """Number of questions sent to the model; the others were in the cache."""
    from_cache: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(tool or row, error); asked again the next time."""


def label_by_rules(tasks: Sequence[Task], tools: Mapping[str, BaseTool] | None = None) -> LabellingResult:
    """Offline labels from the family rules and the calls of the ground truth; None if that has no calls."""
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
    """Asks for the families of all tools, then for the route of each row given those.

    An error with one question leaves one label out; a server that is unreachable or refuses raises `ServerError`.
    Answers received until then are in the cache.
    """
    client = _LabelClient(endpoint, cache, on_answer)
    families = await _label_families(client, tasks, model, tools or {})
    questions = {task.task_id: row_question(model, task, families[task.task_id]) for task in tasks}
    targets = await client.all(questions, read_target)
    labels = [
        Label(
            task.task_id,
            parse_target(targets[task.task_id]) if task.task_id in targets else None,
            families[task.task_id],
            model,
        )
        for task in tasks
    ]
    return LabellingResult(labels, client.asked, client.from_cache, client.failed)


async def _label_families(
    client: _LabelClient, tasks: Sequence[Task], model: str, tools: Mapping[str, BaseTool]
) -> dict[str, dict[str, Family]]:
    """task id -> families of its tools. Declared families are not asked for; without an answer the rules decide."""
    by_rules = {task.task_id: families_of_task(task, tools) for task in tasks}
    descriptions = {task.task_id: _descriptions(task, tools, by_rules[task.task_id]) for task in tasks}
    tools_to_ask = {tool for described in descriptions.values() for tool in described.items()}
    questions = {f"tool {name}: {text}": tool_question(model, name, text) for name, text in sorted(tools_to_ask)}
    answers = await client.all(questions, read_family)
    return {
        task.task_id: {
            name: Family.parse(answers.get(f"tool {name}: {descriptions[task.task_id].get(name, '')}", family))
            for name, family in by_rules[task.task_id].items()
        }
        for task in tasks
    }


def _descriptions(task: Task, tools: Mapping[str, BaseTool], known: Mapping[str, Family]) -> dict[str, str]:
    real_tools = offered_tools(task, tools)
    declared = {name for name, tool in real_tools.items() if declared_family(tool) is not None}
    real_descriptions = {name: tool.tool_schema.function.description for name, tool in real_tools.items()}
    return {
        name: text
        for name, text in (described_tools(task) | real_descriptions).items()
        if name in known and name not in declared
    }


class _LabelClient:
    """Asks questions concurrently through the cache, and counts the results."""

    def __init__(self, endpoint: Endpoint, cache: AnswerCache, on_answer: Callable[[], None]) -> None:
        self.endpoint, self.cache, self.on_answer = endpoint, cache, on_answer
        self.asked = self.from_cache = 0
        self.failed: list[tuple[str, str]] = []

    async def all(
        self, questions: Mapping[str, dict[str, Any]], read: Callable[[Any, Mapping[str, str]], Any]
    ) -> dict[str, str]:
        """name -> answer, for the questions that were answered."""
        answers: dict[str, str] = {}
        missing: dict[str, dict[str, Any]] = {}
        for name, question in questions.items():
            cached = self.cache.get(question)
            if isinstance(cached, str):
                answers[name] = cached
                self.from_cache += 1
            else:
                missing[name] = question

        async def ask(name: str, question: dict[str, Any]) -> None:
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

        work = [asyncio.create_task(ask(name, question)) for name, question in missing.items()]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return answers
