"""Houses: each has a way out, halls need the map, and the thoughts are correct."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.demo.rooms.house import HouseConfig, build_house

plans = st.builds(
    HouseConfig,
    halls=st.integers(0, 3),
    doors=st.integers(0, 3),
    locks=st.integers(0, 2),
    marks=st.integers(7, 9),
    hops=st.integers(3, 6),
)


def arrows(text: str) -> dict[int, int]:
    return {int(a): int(b) for a, b in re.findall(r"(\d)(\d)", text)}


@given(seed=st.integers(0, 10**6), plan=plans)
def test_a_house_is_what_its_plan_says(seed: int, plan: HouseConfig) -> None:
    house = build_house(seed, plan)
    kinds = [room.kind for room in house.rooms]
    assert kinds[0] == "map"
    assert (kinds.count("hall"), kinds.count("door")) == (plan.halls, plan.doors)
    assert kinds.count("key") == kinds.count("lock") == plan.locks
    assert len(kinds) == 1 + plan.halls + plan.doors + 2 * plan.locks
    assert house == build_house(seed, plan)


@given(seed=st.integers(0, 10**6), plan=plans)
def test_the_map_is_one_ring_and_the_door_is_so_many_marks_on(seed: int, plan: HouseConfig) -> None:
    house = build_house(seed, plan)
    next_mark = arrows(house.map_text)
    mark, seen = 1, []
    for _ in range(plan.marks):
        seen.append(mark)
        mark = next_mark[mark]
    assert sorted(seen) == list(range(1, plan.marks + 1))
    for room in (room for room in house.rooms if room.hard):
        mark = int(re.findall(r"\d", room.observation)[0])
        for _ in range(plan.hops):
            mark = next_mark[mark]
        assert room.action == str(mark)


@given(seed=st.integers(0, 10**6))
def test_thoughts_follow_the_map_half_way_and_then_to_the_end(seed: int) -> None:
    house = build_house(seed)
    next_mark = arrows(house.map_text)
    for room in (room for room in house.rooms if room.hard):
        told = [arrows(room.parts[part]) for part in ("state", "reflection", "candidates")]
        assert [len(part) for part in told] == [0, 2, 2]
        assert all(next_mark[a] == b for part in told for a, b in part.items())
        assert f"so {room.action} is right" in room.parts["candidates"]


def test_what_is_easy_is_in_sight_and_what_is_hard_is_not() -> None:
    for seed in range(50):
        for room in build_house(seed).rooms:
            assert room.hard != (room.action.split()[-1] in room.observation)


def test_every_door_is_the_right_one_about_as_often() -> None:
    doors = [room.action for seed in range(2000) for room in build_house(seed).rooms if room.hard]
    assert all(0.09 < doors.count(door) / len(doors) < 0.16 for door in "12345678")


@pytest.mark.parametrize("wrong", [{"hops": 1}, {"hops": 7}, {"marks": 4}, {"marks": 12}, {"halls": -1}])
def test_plans_that_make_no_house(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"hops|negative"):
        HouseConfig(**wrong)
