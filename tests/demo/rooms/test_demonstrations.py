"""Demonstrations: correct walks in the right format, with levels independent of difficulty; and SFT on them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from toolwise.data.files import read_rows
from toolwise.data.rows import read_task
from toolwise.demo.rooms.demonstrations import (
    SPLITS,
    demonstrations,
    house_number,
    instructed_walks,
    lessons,
    main,
    task_rows,
    walk,
)
from toolwise.demo.rooms.env import RoomsEnv
from toolwise.demo.rooms.house import HouseConfig, build_house
from toolwise.thinking.levels import DEFAULT_LEVELS, LEVELS_FILE, load_levels
from toolwise.thinking.reply import parse_reply


def test_what_is_shown_is_what_the_world_would_say() -> None:
    plan = HouseConfig()
    for number in range(20):
        env = RoomsEnv(number)
        said = walk(env.house, [1 + number % 4] * len(env.house.rooms), plan)
        seen = [asyncio.run(env.reset())]
        replies = [message["content"] for message in said if message["role"] == "assistant"]
        for reply in replies:
            observation, reward, done, _ = asyncio.run(env.step(reply))
            seen.append(observation)
        assert (reward, done) == (1.0, True)
        assert [message["content"] for message in said if message["role"] == "user"] == seen[:-1]


def test_every_reply_keeps_to_the_format() -> None:
    for row in demonstrations(50):
        for message in row["messages"]:
            if message["role"] == "assistant":
                assert parse_reply(message["content"]).valid, message


def test_levels_are_drawn_alike_on_easy_and_on_hard_steps() -> None:
    drawn: Counter[tuple[bool, int | None]] = Counter()
    for row in demonstrations(2000):
        sights = [m["content"] for m in row["messages"] if m["role"] == "user"]
        replies = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        drawn.update(
            ("hall" in observation, parse_reply(reply).level)
            for observation, reply in zip(sights, replies, strict=True)
        )
    for hard in (True, False):
        total = sum(count for (kind, _), count in drawn.items() if kind is hard)
        assert all(drawn[hard, level] / total == pytest.approx(0.25, abs=0.03) for level in (1, 2, 3, 4))


def test_lessons_read_a_map_and_say_nothing_of_levels() -> None:
    for row in lessons(20, seed=4):
        asked = [m["content"] for m in row["messages"] if m["role"] == "user"]
        told = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        arrows = set(asked[0].removeprefix("Map: ").partition(".")[0].split())
        assert len(arrows) == 8
        for question, answer in zip(asked, told, strict=True):
            assert set(answer.split()) == arrows
            assert answer[0] == question[-2]
            assert all(a[1] == b[0] for a, b in pairwise(answer.split()))
        assert "<" not in "".join(asked + told)


def test_who_is_told_levels_uses_them_and_what_is_told_is_drawn_evenly() -> None:
    kinds = {"map is here": "map", "door is open": "door", "has a": "key", "You have": "lock", "hall": "hall"}
    drawn: Counter[tuple[str, int]] = Counter()
    for row in instructed_walks(800, seed=2):
        said = [m["content"] for m in row["messages"]]
        words = said[0].removeprefix(HouseConfig().task).rstrip(".").split()
        rule = {word[:-1]: int(word[-1]) for word in words}
        assert sorted(rule) == sorted(kinds.values())
        for observation, reply in zip(said[1::2], said[2::2], strict=True):
            [kind] = [name for words_of_it, name in kinds.items() if words_of_it in observation]
            assert parse_reply(reply).level == rule[kind]
        drawn.update(rule.items())
    assert all(drawn[kind, level] / 800 == pytest.approx(0.25, abs=0.06) for kind in kinds.values() for level in (1, 4))


def test_a_seed_gives_the_same_walks_and_another_gives_others() -> None:
    assert list(demonstrations(5, seed=1)) == list(demonstrations(5, seed=1))
    assert list(demonstrations(5, seed=1)) != list(demonstrations(5, seed=2))


def test_no_split_shares_a_house_with_another() -> None:
    numbers = [{house_number(index, split) for index in range(100)} for split in SPLITS]
    assert len(set.union(*numbers)) == sum(map(len, numbers))


def test_tasks_are_rows_that_a_run_can_read() -> None:
    for number, row in enumerate(task_rows(range(3), "train", HouseConfig(halls=1))):
        task = read_task(Path("rooms"), number, row, {})
        env = RoomsEnv(**task.extra_info["env_kwargs"])
        assert env.house == build_house(house_number(number, "train"), HouseConfig(halls=1))


def test_a_model_that_knows_no_levels_is_told_of_them() -> None:
    [row] = task_rows([0], "train", levels=DEFAULT_LEVELS)
    assert DEFAULT_LEVELS.explain() in row["prompt"][0]["content"]
    [taught] = demonstrations(1, explain=True)
    assert taught["messages"][0] == row["prompt"][0]


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(LEVELS_FILE.read_text().replace("State: {state}", "I see {state}"))
    [row] = demonstrations(1, levels=load_levels(path))
    thoughts = [m["content"] for m in row["messages"] if "<think>" in m["content"]]
    assert thoughts
    assert all("I see" in thought and "State:" not in thought for thought in thoughts if "<level>1" not in thought)


def test_the_command_writes_three_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), "--count", "7", "--lessons", "2", "--instructed", "1", "--tasks", "4", "--seed", "3"])
    assert [len(read_rows(Path(line))) for line in capsys.readouterr().out.splitlines()] == [10, 4, 2]
    assert json.loads((tmp_path / "teach.jsonl").read_text().splitlines()[0]) == next(iter(demonstrations(1, seed=3)))
