"""The example world that docs/results.md compares estimators in: a sound environment, and one that can be learned."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import grid_agent as agent
import grid_gigpo as experiment
import grid_world as world
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.checks.env.check import check_env


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


def test_a_lenient_world_hears_a_move_in_every_word() -> None:
    strict, lenient = world.GridEnv(episode=0), world.GridEnv(episode=0, strict=False)
    assert [lenient.heard(word) for word in world.MOVES] == list(world.MOVES)
    assert {lenient.heard(word) for word in ("north", "x1", "x2", "y1", "y2", "")} <= set(world.MOVES)
    assert lenient.heard("north") == lenient.heard("North by west")
    assert [strict.heard(word) for word in ("north", "", "UP please")] == [None, None, "up"]
    [(sight, _, _, info)] = walk(lenient, "north")
    assert info["is_action_valid"]
    assert sight == lenient.sight()


def test_the_chance_of_success_is_the_share_of_walks_that_arrive(tmp_path: Path) -> None:
    from toolwise.api import read_config, read_tasks
    from toolwise.training.run import assemble

    agent.fresh_model(tmp_path / "models" / "taught-7", seed=7)
    train, held_out = agent.episodes()
    assert not set(train) & set(held_out)
    config = read_config(experiment.settings_of(experiment.Job("fresh", "paired", "gigpo", 7, 1e-3), tmp_path))
    run = assemble(config, tasks=read_tasks(world.make_rows(train, **agent.WORLD), "train"))
    try:
        chances = agent.Chances(run.policy)
        moves = dict(zip(chances.places, chances._moves(), strict=True))
    finally:
        run.close()
    assert all(sum(each) == pytest.approx(1.0) for each in moves.values())
    random, arrived, walks = Random(0), 0, 6000
    for number in range(walks):
        env = world.GridEnv(episode=train[number % len(train)], **agent.WORLD)
        for _ in range(agent.TURNS):
            said = random.choices(list(world.MOVES), moves[env.goal, env.at])[0]
            env.at = env.grid.after(env.at, said)
            if env.at == env.goal:
                arrived += 1
                break
    # Four standard deviations of so many walks, and the starts that came once more than others.
    assert chances.mean(train) == pytest.approx(arrived / walks, abs=0.03)


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    job = experiment.Job("paired-gigpo-0", "paired", "gigpo", 0, 1e-3)
    lines = [{"rollouts": 64 * step, "chance": 0.5 + 0.2 * step} for step in range(4)]
    records = {job.name: experiment.Record(job, lines, 3.0)}
    experiment.write_records(records, tmp_path / "all.jsonl")
    again = experiment.read_records(tmp_path / "all.jsonl")
    assert again == records
    assert again[job.name].reached == 128


@pytest.mark.long
def test_gigpo_learns_to_walk(tmp_path: Path) -> None:
    experiment.work(experiment.Job("warm-0", "warm", "sft", 0), tmp_path)
    experiment.work(experiment.Job("learns", "paired", "gigpo", 0, 1e-3, steps=25), tmp_path)
    record = experiment.finished(tmp_path)["learns"]
    anchors = [line["gigpo/frac_singleton"] for line in record.lines if "gigpo/frac_singleton" in line]
    assert record.lines[0]["chance"] < 0.4
    assert record.lines[-1]["chance"] > 0.8
    rolled_out = sum(line["success"] for line in record.lines[1:]) / 25
    foreseen = sum(line["chance"] for line in record.lines[:-1]) / 25
    assert abs(rolled_out - foreseen) < 0.06
    assert max(anchors) < 0.5
