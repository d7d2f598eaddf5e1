"""The example world that docs/results.md compares estimators in: a sound environment, and one that can be learned."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.envs.conformance.check import check_env

ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """A file outside the package, under a name of its own."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


world = load("examples/grid_world.py")


def walk(env: Any, *moves: str) -> list[tuple[Any, ...]]:
    async def play() -> list[tuple[Any, ...]]:
        await env.reset()
        return [await env.step(move) for move in moves]

    return asyncio.run(play())


def test_the_checker_finds_nothing_wrong() -> None:
    found = check_env(world.GridEnv, name="grid")
    assert found.ok, found.findings
    assert {f.verdict for f in found.findings} == {"ok"}


@given(layout=st.integers(0, 50), size=st.integers(2, 7), walls=st.floats(0.0, 0.6))
def test_no_cell_is_cut_off(layout: int, size: int, walls: float) -> None:
    grid = world.Grid(layout, size, walls)
    assert len(grid.distances(grid.free[0])) == len(grid.free)


@given(episode=st.integers(0, 10_000))
def test_the_shortest_way_earns_one_and_nothing_before(episode: int) -> None:
    env = world.GridEnv(episode=episode, max_turns=40)
    way = env.gold_actions()
    assert len(way) == env.grid.distances(env.goal)[env.start] >= 2
    steps = walk(env, *way)
    assert [reward for _, reward, _, _ in steps] == [0.0] * (len(way) - 1) + [1.0]
    assert steps[-1][2]
    assert steps[-1][3] == {"is_action_valid": True, "success": True, "truncated": False}


def test_a_wall_is_walked_into_and_the_state_stays() -> None:
    env, into = next(
        (env, move)
        for env in (world.GridEnv(episode=e) for e in range(20))
        for move in world.MOVES
        if env.grid.after(env.start, move) == env.start
    )
    before = env.state_key
    [(sight, reward, done, info)] = walk(env, into)
    assert (env.state_key, reward, done, info["is_action_valid"]) == (before, 0.0, False, True)
    assert before in sight


def test_words_that_are_no_move_are_refused_and_cost_a_turn() -> None:
    env = world.GridEnv(episode=0, max_turns=2)
    first, second = walk(env, "north", "north")
    assert "say one of up down left right" in first[0]
    assert first[0] != second[0]
    assert (first[3]["is_action_valid"], second[2], second[3]["truncated"]) == (False, True, True)


def test_rollouts_of_a_task_begin_in_the_same_state() -> None:
    env, twin, other = world.GridEnv(), world.GridEnv(), world.GridEnv(episode=3)
    for each in (env, twin, other):
        each.set_seed(11)
    assert (env.start, env.goal) == (twin.start, twin.goal)
    assert (other.start, other.goal) == (world.GridEnv(episode=3).start, world.GridEnv(episode=3).goal)


def test_only_so_many_cells_are_goals() -> None:
    assert len({world.GridEnv(episode=e, goals=3).goal for e in range(200)}) == 3


@pytest.mark.long
def test_gigpo_learns_to_walk(tmp_path: Path) -> None:
    experiment = load("scripts/grid_gigpo.py")
    experiment.STEPS = 60
    experiment.work(experiment.Job("warm-0", "warm", "sft", 0), tmp_path)
    experiment.work(experiment.Job("learns", "paired", "gigpo", 0, 1e-3), tmp_path)
    record = experiment.finished(tmp_path)["learns"]
    anchors = [line["gigpo/frac_singleton"] for line in record.lines if "gigpo/frac_singleton" in line]
    assert record.lines[0]["held_out"] < 0.4
    assert record.lines[-1]["held_out"] > record.lines[0]["held_out"] + 0.3
    assert max(anchors) < 0.5
