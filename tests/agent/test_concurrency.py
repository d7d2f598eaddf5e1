"""Concurrent questions, from one event loop, many threads and both, get the same answers as sequential ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolwise.agent.agent import RoutedAgent
from toolwise.messages import Message
from toolwise.routing.head import ROUTER_WEIGHTS_FILE
from toolwise.types import Task

Told = tuple[str, str, dict[str, int]]
"""Route, text and calls."""
THREADS = 8
TOWNS = ("Alder", "Brenna", "Corvo", "Dunmere")
DOCUMENTS = [f"{town} has {12 + place} mills." for place, town in enumerate(TOWNS)]


def question(number: int) -> str:
    kinds = (
        f"What is {1200 + number} - {(number * 37) % 900}?",
        f"How many mills does {TOWNS[number % 4]} have?",
        f"Who wrote number {number}?",
    )
    return kinds[number % 3]


def load(folder: Path, *overrides: str) -> RoutedAgent:
    how = ["rollout.max_new_tokens=48", *overrides]
    return RoutedAgent.load(folder, tools=["calculator", "search"], documents=DOCUMENTS, overrides=how)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, make_routed_in: Callable[..., Path]) -> Path:
    """A head fitted to a few questions of each of the three kinds."""
    folder = make_routed_in(tmp_path_factory.mktemp("taught") / "model", bias=[0.0, 0.0, 0.0], eval_mode="argmax")
    tasks = [Task(task_id=str(i), prompt=[Message(role="user", content=question(i))]) for i in range(60)]
    features = torch.tensor(load(folder).routing.features(tasks))
    normed = torch.nn.functional.layer_norm(features, features.shape[1:])
    wanted = torch.eye(3, dtype=torch.float64)[torch.tensor([(2, 1, 0)[i % 3] for i in range(60)])] * 10
    weights = load_file(folder / ROUTER_WEIGHTS_FILE)
    weights["out.weight"] = torch.linalg.lstsq(normed, wanted, driver="gelsd").solution.T.float().contiguous()
    save_file(weights, folder / ROUTER_WEIGHTS_FILE)
    return folder


async def told(agent: RoutedAgent, number: int) -> Told:
    answered = await agent.answer(question(number))
    return answered.route, answered.text, dict(answered.calls)


def one_at_a_time(agent: RoutedAgent, numbers: Sequence[int]) -> list[Told]:
    async def ask() -> list[Told]:
        return [await told(agent, number) for number in numbers]

    return asyncio.run(ask())


def awaited_together(agent: RoutedAgent, numbers: Sequence[int]) -> list[Told]:
    async def ask() -> list[Told]:
        return await asyncio.gather(*(told(agent, number) for number in numbers))

    return asyncio.run(ask())


def from_threads(agent: RoutedAgent, numbers: Sequence[int]) -> list[Told]:
    def ask(number: int) -> Told:
        answered = agent.ask(question(number))
        return answered.route, answered.text, dict(answered.calls)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(ask, numbers))


def from_both(agent: RoutedAgent, numbers: Sequence[int]) -> list[Told]:
    """Threads with many concurrent questions each."""
    begin = threading.Barrier(THREADS)

    def ask(some: Sequence[int]) -> list[Told]:
        begin.wait()
        return awaited_together(agent, some)

    with ThreadPoolExecutor(THREADS) as pool:
        parts = list(pool.map(ask, [numbers[i::THREADS] for i in range(THREADS)]))
    found: list[Any] = [None] * len(numbers)
    for i, part in enumerate(parts):
        found[i::THREADS] = part
    return found


WAYS = {"awaited together": awaited_together, "from threads": from_threads, "from both": from_both}


def answers(agent: RoutedAgent, count: int) -> list[Told]:
    """One at a time."""
    alone = one_at_a_time(agent, range(count))
    assert {route for route, _, _ in alone} == {"ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"}
    assert sum(bool(calls) for _, _, calls in alone) > count // 4
    return alone


@pytest.fixture(scope="module")
def agent(taught: Path) -> RoutedAgent:
    return load(taught)


@pytest.fixture(scope="module")
def sixty(agent: RoutedAgent) -> list[Told]:
    return answers(agent, 60)


@pytest.mark.parametrize("way", WAYS)
def test_overlapping_questions_are_answered_as_one_at_a_time(way: str, agent: RoutedAgent, sixty: list[Told]) -> None:
    assert WAYS[way](agent, range(60)) == sixty


@pytest.mark.long
def test_five_hundred_overlapping_questions(agent: RoutedAgent) -> None:
    alone = answers(agent, 500)
    for name, way in WAYS.items():
        assert way(agent, range(500)) == alone, name


@pytest.mark.long
@pytest.mark.parametrize("how", ["rollout.engine=transformers", "deterministic=true"])
def test_with_other_ways_to_generate(how: str, taught: Path) -> None:
    agent = load(taught, how)
    assert from_both(agent, range(12)) == answers(agent, 12)


def test_a_prompt_is_read_once_and_the_rollout_goes_on_from_it(taught: Path) -> None:
    agent = load(taught)
    agent.ask(question(2), route="answer")
    before = agent.routing.policy.metrics()
    answered = agent.ask(question(5), route="answer")
    after = agent.routing.policy.metrics()
    assert after["engine/reused_tokens"] > before["engine/reused_tokens"]
    assert answered.text
