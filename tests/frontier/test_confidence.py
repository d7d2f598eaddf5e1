"""The confidence-threshold router: what it measures, and which routes its candidates take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from trained_router import small_router

from toolwise.agent.inference import TrainedRouter
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.frontier.confidence import MEASURES, answer_confidences, confidence_candidates, confidences_of
from toolwise.messages import Message
from toolwise.routing.threshold import find_threshold
from toolwise.types import Rollout, StepData, StopReason, Task, Usage

COLUMNS = ("ANSWER", "SEARCH-FAMILY", "ALL-TOOLS")


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> TrainedRouter:
    return small_router(tmp_path_factory.mktemp("m"))


def test_memorized_answers_are_likelier_than_guessed_ones(routing: TrainedRouter, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 60, seed=0, split="heldout", kinds=("known", "lookup"))
    tasks = load_tasks(path)
    found = asyncio.run(answer_confidences(routing, tasks))
    assert found.shape == (60, len(MEASURES))
    assert (found <= 1e-6).all()
    assert (found[:, 1] <= found[:, 0]).all()
    known = np.array([task.extra_info["kind"] == "known" for task in tasks])
    assert found[known].mean() > found[~known].mean() + 0.1


def test_an_answer_that_failed_is_the_least_likely() -> None:
    answered = [sampled([-0.5, -1.5]), sampled([]), sampled([-0.1], StopReason.POLICY_FAULT), sampled([-0.2])]
    assert confidences_of(answered).tolist() == [[-1.0, -1.5], [-1.0, -1.5], [-1.0, -1.5], [-0.2, -0.2]]
    assert confidences_of([sampled([])]).tolist() == [[0.0, 0.0]]


def sampled(logprobs: list[float], stop: StopReason = StopReason.ANSWERED) -> Rollout:
    drawn = {"token_ids": [7] * len(logprobs), "logprobs": logprobs, "prompt_ids": [1]}
    step = StepData(
        system_step_index=0,
        observation_data=None,
        action_taken={"type": "text"},
        resulting_messages_history=[],
        policy_logprobs=drawn,
    )
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    return Rollout("r", "g", 0, 0, task, None, (step,), task.prompt, stop, Usage())


def test_candidates_are_every_measure_with_every_choice_of_tools() -> None:
    confidences = np.array([[-0.1, -0.3], [-2.0, -5.0], [-1.0, -1.5]])
    choices = {"then SEARCH-FAMILY": np.array([1, 1, 1]), "then either": np.array([2, 1, 2])}
    found = confidence_candidates(confidences, COLUMNS, choices)
    assert len(found) == 4
    values = found[f"{MEASURES[1]}, then either"]
    assert values.values[:, 0].tolist() == [-0.3, -5.0, -1.5]
    assert values.values[[0, 1, 2], [2, 1, 2]].tolist() == [0.0, 0.0, 0.0]
    assert (values.columns, values.samples) == (COLUMNS, False)


@pytest.mark.parametrize(("budget", "tools"), [(0.0, []), (1 / 3, [1]), (2 / 3, [1, 2]), (1.0, [0, 1, 2])])
def test_the_least_likely_answers_get_tools_first(budget: float, tools: list[int]) -> None:
    """Whatever the other tools cost: those are not taken."""
    confidences = np.array([[-0.1, -0.1], [-2.0, -2.0], [-1.0, -1.0]])
    (values, _) = confidence_candidates(confidences, COLUMNS, {"then ALL-TOOLS": np.full(3, 2)}).values()
    for search_cost in (0.5, 1.0, 3.0):
        costs = np.tile([0.0, search_cost, 1.0], (3, 1))
        routes = find_threshold(values.values, costs, costs, budget).probabilities(values.values, costs).argmax(axis=1)
        assert [row for row in range(3) if routes[row] == 2] == tools
        assert set(routes) <= {0, 2}
