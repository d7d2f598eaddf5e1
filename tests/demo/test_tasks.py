"""The demo's tasks: dataset rows, fair questions, disjoint splits."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.data import load_tasks
from toolwise.demo.tasks import (
    KINDS,
    KNOWN_CALCULATIONS,
    LARGEST,
    PLACES,
    SMALL_CALCULATIONS,
    SMALLEST,
    SPLITS,
    THINGS,
    Calculation,
    Fact,
    is_known,
    make_fact,
    make_row,
    make_rows,
    random_calculation,
    write_rows,
)
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool

ROWS = list(make_rows(400, seed=0, split="train"))
FACT = re.compile(r"How many (\w+) does (\w+) have\?")


def question(row: dict[str, Any]) -> str:
    return str(row["prompt"][0]["content"])


def documents(row: dict[str, Any]) -> list[str]:
    found: list[str] = row["extra_info"]["tools_kwargs"]["search"]["create_kwargs"]["documents"]
    return found


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["extra_info"]["kind"] == kind]


def shape(text: str) -> str:
    """A question without its names and numbers."""
    return re.sub(r"\b[A-Z][a-z]+\b(?<!How)(?<!What)|\d+", "_", re.sub(r"bridges|towers|mills|wells", "_", text))


def test_kinds_come_in_about_equal_shares() -> None:
    counts = Counter(row["extra_info"]["kind"] for row in ROWS)
    assert set(counts) == set(KINDS)
    assert all(70 < count < 130 for count in counts.values())


def test_known_questions_ask_for_what_is_fixed() -> None:
    for row in of_kind("known"):
        asked = FACT.fullmatch(question(row))
        if asked:
            thing, place = asked.groups()
            assert is_known(place, thing)
            assert row["reward_model"]["ground_truth"] == str(make_fact(place, thing, Random(0)).value)
        else:
            assert question(row) in {f"What is {s.expression}?" for s in KNOWN_CALCULATIONS}


def test_looked_up_questions_ask_for_what_is_drawn() -> None:
    for row in of_kind("lookup"):
        asked = FACT.fullmatch(question(row))
        assert asked
        assert not is_known(asked[2], asked[1])


def test_the_wording_does_not_tell_what_is_known() -> None:
    """Only the model's own memory tells a question that needs a tool from one that does not."""
    known = {shape(question(row)) for row in of_kind("known")}
    unknown = {shape(question(row)) for kind in ("lookup", "arithmetic") for row in of_kind(kind)}
    assert {s for s in known if s.startswith("How")} == {s for s in unknown if s.startswith("How")}
    assert {s for s in known if s.startswith("What")} <= {s for s in unknown if s.startswith("What")}
    assert len({json.dumps(row["tools"]) for row in ROWS}) == 1
    assert len({len(documents(row)) for row in ROWS}) == 1


def test_unknown_facts_differ_from_task_to_task() -> None:
    answers: dict[str, set[str]] = {}
    for row in make_rows(2000, seed=0, split="train"):
        if row["extra_info"]["kind"] == "lookup":
            answers.setdefault(question(row), set()).add(row["reward_model"]["ground_truth"])
    repeated = [found for found in answers.values() if len(found) > 1]
    assert len(repeated) > 50


@pytest.mark.parametrize("kind", ["lookup", "two_step"])
def test_the_documents_hold_what_the_question_needs_and_nothing_that_contradicts_it(kind: str) -> None:
    for row in of_kind(kind):
        found = documents(row)
        subjects = [re.fullmatch(r"(\w+) has \d+ (\w+)\.", text) for text in found]
        assert all(subjects)
        assert len({(m[1], m[2]) for m in subjects if m}) == len(found)
        for name, text in row["extra_info"]["plan"]:
            if name == "search":
                place, thing = text.split()
                assert sum(bool(re.fullmatch(rf"{place} has \d+ {thing}\.", d)) for d in found) == 1


def test_the_plan_carried_out_with_the_real_tools_gives_the_answer() -> None:
    async def settle(row: dict[str, Any]) -> str:
        said = ""
        for name, text in row["extra_info"]["plan"]:
            tool = SearchTool({}) if name == "search" else CalculatorTool({})
            kwargs = {"documents": documents(row)} if name == "search" else {}
            instance = await tool.create(**kwargs)
            said, _, _ = await tool.execute(instance, {"query" if name == "search" else "expression": text})
            await tool.release(instance)
            if name == "search":
                assert all(word in said for word in text.split())
        return re.findall(r"\d+", said)[0]

    for row in ROWS[:200]:
        assert asyncio.run(settle(row)) == row["reward_model"]["ground_truth"]


def test_the_answer_of_two_steps_cannot_be_read_off_the_documents() -> None:
    for row in of_kind("two_step"):
        assert row["extra_info"]["plan"][-1][0] == "calculator"
        assert len(row["extra_info"]["plan"]) in (2, 3)


def test_the_same_seed_gives_the_same_tasks_and_another_others() -> None:
    assert list(make_rows(20, seed=3, split="train")) == list(make_rows(20, seed=3, split="train"))
    assert list(make_rows(20, seed=3, split="train")) != list(make_rows(20, seed=4, split="train"))
    assert list(make_rows(5, seed=3, split="train")) == list(make_rows(20, seed=3, split="train"))[:5]


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_splits_share_no_task(seed: int) -> None:
    seen: dict[str, set[str]] = {}
    for split in SPLITS:
        rows = make_rows(600, seed=seed, split=split)
        seen[split] = {json.dumps([question(r), r["reward_model"], sorted(documents(r))]) for r in rows}
        assert len(seen[split]) == 600
    assert not seen["train"] & seen["heldout"]
    assert not seen["train"] & seen["teach"]
    assert not seen["heldout"] & seen["teach"]


def test_questions_that_are_looked_up_in_two_splits_have_answers_of_their_own() -> None:
    def answers(split: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for row in make_rows(1000, seed=0, split=split):
            if row["extra_info"]["kind"] in ("lookup", "two_step"):
                found.setdefault(question(row), set()).add(row["reward_model"]["ground_truth"])
        return found

    train, held_out = answers("train"), answers("heldout")
    shared = train.keys() & held_out.keys()
    agree = [q for q in shared if train[q] & held_out[q]]
    assert len(shared) > 50
    assert len(agree) < 0.05 * len(shared)


def test_rows_load_as_any_dataset_s_do(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "deep" / "train.jsonl", 50, seed=0, split="train")
    tasks = load_tasks(path)
    assert len(tasks) == len({t.task_id for t in tasks}) == 50
    for task, row in zip(tasks, ROWS, strict=False):
        assert task.ground_truth == row["reward_model"]["ground_truth"]
        assert task.prompt[0].content == question(row)
        assert task.tools == ["calculator", "search"]
        assert task.tools_kwargs["search"]["create_kwargs"]["documents"] == documents(row)
        assert task.extra_info["kind"] in KINDS
        assert task.data_source == "toolwise/small-world"


def test_the_reward_is_not_told_the_plan_or_the_kind(tmp_path: Path) -> None:
    for task in load_tasks(write_rows(tmp_path / "t.jsonl", 20, seed=0, split="train")):
        assert task.reward_kwargs == {}
        assert len(task.prompt) == 1


def test_a_row_of_a_kind() -> None:
    for kind in KINDS:
        row = make_row(kind, Random(0), 5, "train")
        assert row["extra_info"]["kind"] == kind
        assert row["extra_info"]["index"] == 5


ALL = list(product(PLACES, THINGS))
KNOWN = [(place, thing) for place, thing in ALL if is_known(place, thing)]
UNKNOWN = [pair for pair in ALL if pair not in KNOWN]


def test_names_are_not_repeated() -> None:
    assert len(set(PLACES)) == len(PLACES)
    assert len(set(THINGS)) == len(THINGS)


def test_half_of_all_facts_are_known_and_half_of_every_place_s() -> None:
    assert 2 * len(KNOWN) == len(ALL)
    for place in PLACES:
        assert sum(is_known(place, thing) for thing in THINGS) == len(THINGS) // 2


def test_no_thing_gives_away_whether_it_is_known() -> None:
    for thing in THINGS:
        assert 0.25 < sum(is_known(place, thing) for place in PLACES) / len(PLACES) < 0.75


@pytest.mark.parametrize("pair", KNOWN[:10])
def test_a_known_fact_is_the_same_whoever_draws(pair: tuple[str, str]) -> None:
    assert len({make_fact(*pair, Random(seed)) for seed in range(20)}) == 1


def test_a_known_fact_uses_up_no_chance() -> None:
    rng = Random(1)
    make_fact(*KNOWN[0], rng)
    assert rng.random() == Random(1).random()


@pytest.mark.parametrize("pair", UNKNOWN[:10])
def test_an_unknown_fact_is_drawn_anew(pair: tuple[str, str]) -> None:
    assert len({make_fact(*pair, Random(seed)) for seed in range(40)}) > 20


def test_known_facts_never_change_between_versions() -> None:
    """The shipped model has memorised them."""
    digest = sum(make_fact(place, thing, Random(0)).value * (n + 1) for n, (place, thing) in enumerate(KNOWN))
    assert digest == 2603024


@given(st.sampled_from(ALL), st.integers(0, 1000))
def test_values_stay_in_range(pair: tuple[str, str], seed: int) -> None:
    assert SMALLEST <= make_fact(*pair, Random(seed)).value <= LARGEST


def test_a_fact_as_a_sentence() -> None:
    assert Fact("Orsa", "mills", 31).sentence() == "Orsa has 31 mills."


@pytest.mark.parametrize(("operator", "value"), [("+", 15), ("-", 9), ("*", 36)])
def test_a_sum_by_hand(operator: str, value: int) -> None:
    assert Calculation(12, operator, 3).value == value
    assert Calculation(12, operator, 3).expression == f"12 {operator} 3"


def test_known_sums_are_about_half_of_the_small_ones() -> None:
    assert len(set(SMALL_CALCULATIONS)) == len(SMALL_CALCULATIONS)
    assert set(KNOWN_CALCULATIONS) < set(SMALL_CALCULATIONS)
    assert 0.4 < len(KNOWN_CALCULATIONS) / len(SMALL_CALCULATIONS) < 0.6
    assert all(s.value >= 0 for s in SMALL_CALCULATIONS)


@given(st.integers(0, 10**6))
def test_a_drawn_sum_is_not_known_and_not_negative(seed: int) -> None:
    drawn = random_calculation(Random(seed))
    assert drawn not in KNOWN_CALCULATIONS
    assert drawn.value >= 0
    assert 1 <= drawn.left <= 9999
    assert 1 <= drawn.right <= 9999
