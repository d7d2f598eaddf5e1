"""Labels tasks by rules or by asking a model. Answers are cached in a file, one line per answer, so that each question
is asked once and an interrupted labelling resumes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolwise.errors import ContextFullError, DataError
from toolwise.remote.endpoint import Endpoint
from toolwise.remote.server_errors import ServerError
from toolwise.routing.families import (
    Family,
    declared_family,
    families_of_task,
    heuristic_target,
    offered_tools,
    parse_target,
    tool_descriptions,
)
from toolwise.routing.labels.label_files import Label
from toolwise.routing.labels.questions import read_family, read_target, row_question, tool_question
from toolwise.serialization.json_text import json_line, load_json
from toolwise.tools.base import BaseTool
from toolwise.types import Task

_FATAL_KINDS = frozenset({"connect", "refused", "redirect"})
"""Kinds of errors that every other question would also get."""


class AnswerCache:
    """Question -> answer, keyed by the question's digest. One process per file; truncated lines are skipped."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._answers: dict[str, Any] = {}
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""
        except OSError as fault:
            raise DataError(f"{self.path}: cannot be read ({fault.strerror}); give another --cache") from fault
        for line in text.splitlines():
            with suppress(KeyError, TypeError):  # truncated when the process died
                entry = load_json(line)
                self._answers[entry["key"]] = entry["answer"]

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, question: Mapping[str, Any]) -> Any | None:
        return self._answers.get(key_of(question))

    def put(self, question: Mapping[str, Any], answer: Any) -> None:
        key = key_of(question)
        self._answers[key] = answer
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                file.seek(-min(file.tell(), 1), os.SEEK_END)
                line_end = b"" if file.read() in (b"", b"\n") else b"\n"  # after a truncated line
                file.write(line_end + json_line({"key": key, "answer": answer}))
        except OSError as fault:
            raise DataError(f"{self.path}: cannot be written ({fault.strerror}); give another --cache") from fault


def key_of(question: Mapping[str, Any]) -> str:
    """The digest of the request body, including the model's name and the prompt."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class LabellingResult:
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
        families, undeclared = families_of_task(task, tools), _undeclared(task, tools or {})
        makers = {name: "rules" if name in undeclared else "declared" for name in families}
        target = heuristic_target(task, families)
        labels.append(Label(task.task_id, target, families, "" if target is None else "heuristic", makers))
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
    families, makers = await _label_families(client, tasks, model, tools or {})
    targets = await client.all(
        {task.task_id: row_question(model, task, families[task.task_id]) for task in tasks}, read_target
    )
    client.result.labels = [
        Label(
            task.task_id,
            parse_target(targets[task.task_id]) if task.task_id in targets else None,
            families[task.task_id],
            model if task.task_id in targets else "",
            makers[task.task_id],
        )
        for task in tasks
    ]
    return client.result


async def _label_families(
    client: _LabelClient, tasks: Sequence[Task], model: str, tools: Mapping[str, BaseTool]
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """task id -> families of its tools, and who named each. Declared families are not asked for; without an answer the
    rules decide."""
    descriptions = {task.task_id: _undeclared(task, tools) for task in tasks}
    tools_to_ask = {tool for described in descriptions.values() for tool in described.items()}
    questions = {f"tool {name}: {text}": tool_question(model, name, text) for name, text in sorted(tools_to_ask)}
    answers = await client.all(questions, read_family)
    families: dict[str, dict[str, str]] = {}
    makers: dict[str, dict[str, str]] = {}
    for task in tasks:
        undeclared = descriptions[task.task_id]
        families[task.task_id] = {}
        makers[task.task_id] = {}
        for name, family in families_of_task(task, tools).items():
            answer = answers.get(f"tool {name}: {undeclared[name]}") if name in undeclared else None
            families[task.task_id][name] = family if answer is None else Family.parse(answer)
            maker = "declared" if name not in undeclared else "rules" if answer is None else model
            makers[task.task_id][name] = maker
    return families, makers


def _undeclared(task: Task, tools: Mapping[str, BaseTool]) -> dict[str, str]:
    """name -> description of the tools that do not declare a family."""
    declared = {name for name, tool in offered_tools(task, tools).items() if declared_family(tool) is not None}
    return {name: text for name, text in tool_descriptions(task, tools).items() if name not in declared}


class _LabelClient:
    """Asks questions concurrently through the cache, and counts the results."""

    def __init__(self, endpoint: Endpoint, cache: AnswerCache, on_answer: Callable[[], None]) -> None:
        self.endpoint, self.cache, self.on_answer = endpoint, cache, on_answer
        self.result = LabellingResult([])

    async def all(
        self, questions: Mapping[str, dict[str, Any]], read: Callable[[Any, Mapping[str, str]], Any]
    ) -> dict[str, str]:
        """name -> answer, for the questions that were answered."""
        cached = {name: self.cache.get(question) for name, question in questions.items()}
        answers = {name: answer for name, answer in cached.items() if isinstance(answer, str)}
        self.result.from_cache += len(answers)

        async def ask(name: str, question: dict[str, Any]) -> None:
            self.result.asked += 1
            try:
                answer = str(await self.endpoint.ask(question, read))
            except (ServerError, ContextFullError) as fault:
                if isinstance(fault, ServerError) and fault.kind in _FATAL_KINDS:
                    raise
                self.result.failed.append((name, str(fault)))
            else:
                self.cache.put(question, answer)
                answers[name] = answer
            self.on_answer()

        work = [asyncio.create_task(ask(name, question)) for name, question in questions.items() if name not in answers]
        try:
            await asyncio.gather(*work)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        return answers
