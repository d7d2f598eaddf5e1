"""The house as an environment: passes the checks, is learnable, and is strict only in halls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import toolwise
from toolwise.api import read_config, read_tasks
from toolwise.checks.env.check import check_env
from toolwise.data.files import write_rows
from toolwise.demo.rooms.demonstrations import demonstrations, task_rows
from toolwise.demo.rooms.env import RoomsEnv, rooms_config
from toolwise.thinking.reply import parse_reply
from toolwise.training.loop import train_step
from toolwise.training.run import assemble


def walk(env: RoomsEnv, *actions: str) -> list[tuple[Any, ...]]:
    async def play() -> list[tuple[Any, ...]]:
        await env.reset()
        return [await env.step(action) for action in actions]

    return asyncio.run(play())


def test_the_checker_finds_nothing_wrong() -> None:
    found = check_env(RoomsEnv, name="rooms")
    assert found.ok, found.findings
    assert {f.verdict for f in found.findings} == {"ok"}


@given(house=st.integers(0, 10**6))
def test_the_right_way_earns_one_at_its_end(house: int) -> None:
    env = RoomsEnv(house)
    steps = walk(env, *env.gold_actions())
    assert [reward for _, reward, _, _ in steps] == [0.0] * (len(steps) - 1) + [1.0]
    assert [info["step_kind"] for _, _, _, info in steps].count("hard") == 2
    assert all(info["optimal"] and info["is_action_valid"] for _, _, _, info in steps)
    assert steps[-1][0] == "You are out."
    assert steps[-1][3]["success"]


def test_the_map_is_seen_once_and_not_again() -> None:
    env = RoomsEnv(3)
    told = [observation for observation, _, _, _ in walk(env, *env.gold_actions())]
    assert ["Map:" in observation for observation in told] == [True, *[False] * (len(told) - 1)]


def test_a_wrong_door_in_a_hall_ends_the_walk() -> None:
    env = RoomsEnv(3)
    way = env.gold_actions()
    hall = next(i for i, room in enumerate(env.house.rooms) if room.hard)
    wrong = next(door for door in "12345678" if door != env.house.rooms[hall].action)
    observation, reward, done, info = walk(env, *way[:hall], f"<action>{wrong}</action>")[-1]
    assert (observation, reward, done) == ("The floor gives way.", 0.0, True)
    assert not info["success"]
    assert not info["truncated"]
    assert "fallen" in env.state_key


def test_other_mistakes_cost_a_turn_and_leave_one_where_one_was() -> None:
    env = RoomsEnv(3)
    useless, nonsense = walk(env, "<action>go left</action>", "<action>dance</action>")
    assert useless[0] == "Nothing happens. A map is here."
    assert nonsense[0] == "You cannot do that. A map is here."
    assert (useless[3]["is_action_valid"], nonsense[3]["is_action_valid"]) == (True, False)
    assert env.state_key == "house 3, place 0"


def test_turns_run_out() -> None:
    env = RoomsEnv(3, spare_turns=1)
    steps = walk(env, *["<action>go left</action>"] * 7)
    assert [done for _, _, done, _ in steps] == [False] * 6 + [True]
    assert steps[-1][3]["truncated"]


def test_the_action_is_found_in_a_whole_reply_and_alone() -> None:
    reply = "<level>2</level><think>State: go left?</think><action> Take  Map </action>"
    for said in (reply, "take map"):
        env = RoomsEnv(3)
        assert walk(env, said)[0][3]["optimal"]
        assert env.state_key == "house 3, place 1"


def test_rollouts_of_a_group_walk_through_one_house() -> None:
    first, second, other = RoomsEnv(), RoomsEnv(), RoomsEnv(5)
    for env in (first, second, other):
        env.set_seed(11)
    assert first.house == second.house != other.house
    assert first.state_key == second.state_key


def test_another_plan_makes_another_house() -> None:
    env = RoomsEnv(3, plan={"halls": 0, "doors": 3, "locks": 0})
    assert len(env.gold_actions()) == 4
    assert walk(env, *env.gold_actions())[-1][1] == 1.0


torch.set_num_threads(1)


def test_the_settings_are_a_configuration(tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        write_rows(list(task_rows(range(3), split)), tmp_path / f"{split}.jsonl")
    config = read_config(rooms_config("builtin:small", tmp_path, seed=3))
    assert config.seed == 3
    assert config.data.train == tmp_path / "train.jsonl"


def test_a_step_of_learning_from_walks_in_the_world(tmp_path: Path) -> None:
    settings = rooms_config("builtin:small")
    settings |= {"data": {"batch_size": 1}, "algorithm": {"zero_std_groups": "keep"}}
    settings["rollout"] |= {"n": 2, "max_new_tokens": 16}
    run = assemble(read_config(settings), tasks=read_tasks(list(task_rows([0], "train")), "train"))
    try:
        result = asyncio.run(train_step(run))
    finally:
        run.close()
    assert result.metrics["rollouts"] == 2
    assert result.metrics["score/mean"] == 0.0  # a model without this SFT data finds no way out
    for scored in result.scored:
        told = [step.step_info for step in scored.rollout.steps]
        assert {info.get("step_kind", "easy") for info in told} == {"easy"}  # a truncated reply gets no info
        assert {info["state_key"] for info in told} == {"house 0, place 0"}


@pytest.mark.long
def test_a_few_minutes_of_teaching_teach_the_format(tmp_path: Path) -> None:
    """`toolwise sft` from the model that ships, on levelled walks: most of what it then writes keeps to the format."""
    toolwise.sft(
        "builtin:small",
        list(demonstrations(2000)),
        tmp_path / "taught",
        steps=200,
        lr=1e-3,
        batch_tokens=4096,
        row_tokens=512,
    )
    settings = rooms_config(tmp_path / "taught")
    run = assemble(read_config(settings), tasks=read_tasks(list(task_rows(range(8), "train")), "train"))
    try:
        scored = asyncio.run(train_step(run)).scored
    finally:
        run.close()
    readings = [parse_reply(step.raw_policy_output or "") for s in scored for step in s.steps]
    assert sum(reading.valid for reading in readings) > 0.8 * len(readings)
    assert {reading.level for reading in readings} >= {1, 2, 3, 4}
