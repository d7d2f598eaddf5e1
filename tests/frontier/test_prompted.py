"""The prompted router: the question that is asked, and the values of the replies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trained_router import small_router

from toolwise.agent.inference import TrainedRouter
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.errors import ContextFullError
from toolwise.frontier import prompted
from toolwise.frontier.prompted import WORDINGS, ask, prompted_candidates
from toolwise.messages import Message
from toolwise.thinking.thinking_model import TokenScores
from toolwise.types import Task


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> TrainedRouter:
    return small_router(tmp_path_factory.mktemp("m"))


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    return load_tasks(write_rows(tmp_path / "rows.jsonl", 6, seed=0, split="heldout"))


class Listener:
    """Prefers the reply at `favourite`; remembers what it was asked."""

    def __init__(self, favourite: int) -> None:
        self.favourite = favourite
        self.asked: list[Any] = []

    async def score(self, contexts: Any, temperature: float) -> list[tuple[TokenScores, ...]]:
        self.asked += contexts
        scores = [np.full(len(ids), -2.0) for ids in contexts[0].continuations]
        scores[self.favourite] += 1.0
        return [tuple(TokenScores(each, each) for each in scores)]


def test_the_model_is_asked_for_one_of_its_routes(
    routing: TrainedRouter, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Listener(favourite=2)
    monkeypatch.setattr(prompted, "thinking_model", lambda *_: model)
    found = asyncio.run(prompted_candidates(routing, tasks, 3))
    assert list(found) == [
        *("by letter", "by letter, without preferences"),
        *("by name", "by name, without preferences"),
    ]
    assert (found["by letter"].values.argmax(axis=1) == 2).all()
    assert np.allclose(np.exp(found["by name"].values).sum(axis=1), 1)
    # It prefers C whatever the question is: nothing is left without that.
    assert np.allclose(found["by letter, without preferences"].values, -np.log(3))
    decode = routing.policy.chat.tokenizer.decode
    text = decode(model.asked[0].prefix_ids)
    assert tasks[0].prompt[-1].content in text
    assert all(option in text for option in ("A: no tools", "B: search", "C: calculator"))
    assert [decode(ids) for ids in model.asked[0].continuations] == ["A", "B", "C"]
    by_name = [decode(ids) for ids in model.asked[len(tasks)].continuations]
    assert by_name == ["no tools", "search", "calculator"]


def test_a_prompt_that_does_not_fit_prefers_no_route(
    routing: TrainedRouter, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Listener):
        async def score(self, contexts: Any, temperature: float) -> list[tuple[TokenScores, ...]]:
            raise ContextFullError("too long")

    monkeypatch.setattr(prompted, "thinking_model", lambda *_: Full(0))
    found = asyncio.run(prompted_candidates(routing, tasks[:2], 1))
    assert np.allclose(found["by letter"].values, -np.log(3))


def test_the_model_that_ships_gives_finite_values(routing: TrainedRouter, tasks: list[Task]) -> None:
    found = asyncio.run(prompted_candidates(routing, tasks, 3))
    assert len(found) == 2 * len(WORDINGS)
    assert all(each.values.shape == (6, 3) and np.isfinite(each.values).all() for each in found.values())


def test_the_question_joins_the_user_s_last_message() -> None:
    system, user = Message(role="system", content="s"), Message(role="user", content="q")
    assert ask([system, user], "?") == [system, Message(role="user", content="q\n\n?")]
    reply = Message(role="assistant", content="a")
    assert ask([user, reply], "?") == [user, reply, Message(role="user", content="?")]
