"""The rollout pool: every draw of every cell, resumed after a kill, never mixed with another pool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.config.schema import RewardConfig, SandboxConfig
from toolwise.errors import DataError
from toolwise.frontier.rollout_pool import OutcomeTable, PoolPlan, fill_pool, score_of
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.tools.catalog import build_tools
from toolwise.training.evaluate import Scoring, build_scoring
from toolwise.types import EvaluateResult, MetricResult, Rollout, RouteDecision, StopReason, Task, Usage

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "20 + 3"}}\n</tool_call>'
TASKS = [
    Task(task_id=f"t{i}", prompt=[{"role": "user", "content": "20 + 3?"}], ground_truth=str(23 - i)) for i in range(3)
]


@pytest.fixture
def scoring() -> Iterator[Scoring]:
    made = build_scoring(
        RewardConfig(function="toolwise.demo.reward:small_world_reward", sandbox=SandboxConfig(tier="off"))
    )
    yield made
    made.close()


def begin(tools: tuple[str, ...] | None) -> Any:
    return lambda task: RouteDecision(task, f"{task.task_id}/{tools}", 1, 0, task.prompt, tools=tools)


def plan(tasks: list[Task] = TASKS, **more: Any) -> PoolPlan:
    return PoolPlan(tasks, {"ANSWER": begin(()), "CALCULATE": begin(("calculator",))}, draws=2, **more)


def fill(the_plan: PoolPlan, path: Path, scoring: Scoring, counted: list[int] | None = None) -> OutcomeTable:
    scheduler = RolloutScheduler(ScriptedPolicy([CALL, "Answer: 23"], parser="hermes"), build_tools(["calculator"]))

    def cost(rollout: Rollout) -> float:
        if counted is not None:
            counted.append(1)
        return rollout.usage.cost

    return asyncio.run(fill_pool(the_plan, path, scheduler, scoring, cost, tasks_at_once=1))


def test_every_draw_of_every_cell_is_there_with_its_score_and_cost(scoring: Scoring, tmp_path: Path) -> None:
    found = fill(plan(), tmp_path / "pool.jsonl", scoring)
    assert found.row_ids == ("t0", "t1", "t2")
    assert found.scores.shape == (3, 2, 2)
    assert found.scores[:, 1, :].tolist() == [[1, 1], [0, 0], [0, 0]]  # "correct", not the score minus the cost
    assert found.costs[:, 0, :].sum() == 0  # the tool was not available
    assert (found.costs[:, 1, :] == 1).all()


def test_resuming_rolls_out_only_missing_cells(scoring: Scoring, tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    whole = fill(plan(), path, scoring)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])  # killed in the middle of a line
    counted: list[int] = []
    again = fill(plan(), path, scoring, counted)
    assert len(counted) == 3 * 2  # three cells of two draws
    assert np.array_equal(again.scores, whole.scores)
    counted.clear()
    fill(plan(), path, scoring, counted)
    assert counted == []
    assert json.loads(path.read_text().splitlines()[0])["draws"] == 2


@pytest.mark.parametrize("other", [{"seed": 1}, {"metric": "score"}, {"of": {"model": "another"}}])
def test_another_pool_is_not_resumed(scoring: Scoring, tmp_path: Path, other: dict[str, Any]) -> None:
    path = tmp_path / "pool.jsonl"
    fill(plan(TASKS[:1]), path, scoring)
    with pytest.raises(DataError, match=f"another evaluation \\({next(iter(other))} differs"):
        fill(plan(TASKS[:1], **other), path, scoring)


def test_seeds_depend_on_the_cell_and_not_on_its_position(
    scoring: Scoring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}
    roll_out = RolloutScheduler.roll_out

    async def noting(scheduler: RolloutScheduler, decisions: list[RouteDecision], **options: Any) -> Any:
        for decision in decisions:
            assert seen.setdefault(decision.task.task_id, decision.seed) == decision.seed
        return await roll_out(scheduler, decisions, **options)

    monkeypatch.setattr(RolloutScheduler, "roll_out", noting)
    for number, tasks in enumerate((TASKS, TASKS[::-1], TASKS[1:])):
        fill(PoolPlan(tasks, {"ANSWER": begin(())}, draws=1), tmp_path / f"{number}.jsonl", scoring)
    assert len(set(seen.values())) == 3


def rollout(stop: StopReason = StopReason.ANSWERED) -> Rollout:
    return Rollout("r", "g", 0, 0, TASKS[0], None, (), (), stop, Usage())


def test_a_missing_score_is_none_and_not_zero() -> None:
    good = EvaluateResult(score=0.5, metrics={"correct": MetricResult(score=1.0)})
    assert score_of(rollout(), good, "auto") == 1.0
    assert score_of(rollout(), good, "score") == 0.5
    assert score_of(rollout(), EvaluateResult(score=0.25), "auto") == 0.25
    assert score_of(rollout(StopReason.POLICY_FAULT), good, "auto") is None
    assert score_of(rollout(), EvaluateResult(is_score_valid=False), "auto") is None
    with pytest.raises(DataError, match="choose --metric from score, correct"):
        score_of(rollout(), good, "speed")


def made(rows: int = 2, routes: tuple[str, ...] = ("A", "B")) -> OutcomeTable:
    scores = np.arange(rows * len(routes) * 4, dtype=float).reshape(rows, len(routes), 4)
    return OutcomeTable(tuple(f"r{i}" for i in range(rows)), routes, scores, scores / 10)


def test_draws_without_a_score_count_for_neither_score_nor_cost() -> None:
    outcomes = made()
    outcomes.scores[0, 0, 3] = np.nan
    assert outcomes.mean_over_draws("scores")[0].tolist() == [1.0, 5.5]
    assert np.allclose(outcomes.mean_over_draws("costs")[0], [0.1, 0.55])


def test_routes_rows_and_draws_can_be_selected() -> None:
    outcomes = made(3)
    assert outcomes.select_routes(["B"]).scores.tolist() == outcomes.scores[:, 1:].tolist()
    assert outcomes.select_rows([2]).row_ids == ("r2",)
    assert outcomes.select_draws(slice(0, 2)).scores.shape == (3, 2, 2)


def test_routes_of_the_same_rows_can_be_concatenated() -> None:
    both = made().concat_routes(made(routes=("C",)))
    assert both.routes == ("A", "B", "C")
    assert both.scores.shape == (2, 3, 4)
