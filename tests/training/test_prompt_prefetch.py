"""The prompts of the next step are tokenized ahead, where they are known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from toolwise.data import Batches
from toolwise.errors import DataError, ModelError
from toolwise.messages import Message
from toolwise.policies.local import LocalPolicy
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.learned_router import LearnedRouter
from toolwise.routing.routers import DirectRouter
from toolwise.training import prompt_prefetch
from toolwise.training.prompt_prefetch import prefetch_prompts, read_next_prompts
from toolwise.types import Task


class Chat:
    """Remembers what it was asked to tokenize; refuses the second prompt."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, messages: Any, tools: Any) -> list[int]:
        self.started.append(str(messages[0].content))
        if len(self.started) == 2:
            raise ModelError("the template refuses it")
        return []


def prefetched(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[list[str], list[Task]]:
    monkeypatch.setattr(prompt_prefetch, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(prompt_prefetch, "PAUSE_S", 0.0)
    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=f"task {i}")]) for i in range(6)]
    batches, policy = Batches(tasks, 3, seed=0), object.__new__(LocalPolicy)
    policy.chat = chat = Chat()  # type: ignore[assignment]
    scheduler = SimpleNamespace(make_env=None, lock_step=False, tools={})
    known = {"router": DirectRouter(0), "scheduler": scheduler, "policy": policy, "batches": batches, "agent": None}
    parts: dict[str, Any] = {**known, **changes}
    asyncio.run(prefetch_prompts(SimpleNamespace(**parts)))  # type: ignore[arg-type]
    return chat.started, next(parts["batches"])


def test_the_next_batch_is_tokenized_even_if_a_prompt_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    started, batch = prefetched(monkeypatch)
    assert started == [task.prompt[0].content for task in batch]


@pytest.mark.parametrize(
    "changes",
    [
        {"router": object()},
        {"policy": object()},
        {"agent": object()},
        {"scheduler": SimpleNamespace(make_env=print, lock_step=False, tools={})},
        {"scheduler": SimpleNamespace(make_env=None, lock_step=True, tools={})},
    ],
)
def test_prompts_that_may_change_are_left_alone(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert prefetched(monkeypatch, **changes)[0] == []


def test_a_learned_router_prepares_them_itself_whatever_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    router = object.__new__(LearnedRouter)
    asked: list[str] = []
    planned: list[Any] = []
    router._prepared, router.conditioning = {}, Conditioning()
    router.model = SimpleNamespace(plan_ahead=planned.append, read_ahead=lambda: planned.append("read"))  # type: ignore[assignment]
    router.prompt_of = lambda task: asked.append(task.task_id) or [1, 2]  # type: ignore[func-returns-value]
    env = SimpleNamespace(make_env=print, lock_step=False, tools={})
    started, batch = prefetched(monkeypatch, router=router, scheduler=env)
    assert started == []
    assert asked == [task.task_id for task in batch] == list(router._prepared)
    assert planned == [[[1, 2]] * 3]
    read_next_prompts(SimpleNamespace(router=router, policy=object.__new__(LocalPolicy)))  # type: ignore[arg-type]
    assert planned[1:] == ["read"]
    read_next_prompts(SimpleNamespace(router=router, policy=object()))  # type: ignore[arg-type]
    assert planned[2:] == []  # its weights may come from elsewhere
    assert router._tokens_of(batch) == [[1, 2]] * 3
    assert len(asked) == 3


def test_a_task_that_cannot_be_read_is_left_to_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged(Batches):
        def upcoming(self) -> Iterator[Task]:
            yield next(super().upcoming())
            raise DataError("its converted copy is damaged")

    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=f"task {i}")]) for i in range(6)]
    assert len(prefetched(monkeypatch, batches=Damaged(tasks, 3, seed=0))[0]) == 1
