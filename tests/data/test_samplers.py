"""Samplers that ship: every task has its turn, difficult and rare ones their share, and a state that goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from toolwise.data import open_tasks
from toolwise.data.rows import read_task
from toolwise.data.sampled_batches import SampledBatches
from toolwise.data.samplers import SAMPLERS, Difficulty, Mixture, Uniform
from toolwise.errors import CheckpointError, ConfigError
from toolwise.messages import Message
from toolwise.types import Task


def tasks(count: int, sources: str = "a") -> list[Task]:
    prompt = [Message(role="user", content="?")]
    return [Task(task_id=str(i), prompt=prompt, data_source=sources[i % len(sources)]) for i in range(count)]


def test_uniform_draws_each_task_once_per_epoch() -> None:
    sampler = Uniform(tasks(10), seed=3)
    drawn = [index for _ in range(10) for index in sampler.draw(3)]
    assert [sorted(drawn[start : start + 10]) for start in (0, 10, 20)] == [list(range(10))] * 3
    assert drawn[:10] != drawn[10:20]
    assert Uniform(tasks(10), seed=4).draw(10) != drawn[:10]


def test_tasks_that_are_solved_sometimes_come_most_often() -> None:
    sampler = Difficulty(tasks(30), seed=0, floor=0.1, decay=0.0)
    sampler.observe({i: [float(i >= 10), float(i >= 20)] for i in range(30)})  # never, half, always
    counts = Counter(index // 10 for _ in range(400) for index in sampler.draw(4))
    assert counts[1] > 7 * counts[0]
    assert counts[1] > 7 * counts[2]
    assert counts[0] > 50
    assert counts[2] > 50


def test_a_task_is_not_drawn_twice_for_a_batch() -> None:
    sampler = Difficulty(tasks(8), seed=0)
    assert all(len(set(sampler.draw(8))) == 8 for _ in range(20))
    assert len(sampler.draw(12)) == 12


def test_scores_are_scaled_and_averaged() -> None:
    sampler = Difficulty(tasks(2), seed=0, decay=0.5, lowest=-1.0, highest=1.0, floor=0.1)
    sampler.observe({0: [0.0, 0.0]})
    sampler.observe({0: [1.0, 1.0]})  # p = 0.5, then 0.75
    sampler.observe({1: [-5.0]})
    assert sampler.weights() == pytest.approx([4 * 0.75 * 0.25 + 0.1, 0.1])


@pytest.mark.parametrize("weights", [{"a": 3.0, "b": 1.0}, {"b": 0.2, "a": 0.6, "c": 0.2}, {"c": 1.0}])
def test_sources_come_in_the_shares_of_their_weights(weights: dict[str, float]) -> None:
    rows = tasks(90, "abc")
    sampler = Mixture(rows, seed=0, weights=weights)
    drawn = [index for _ in range(150) for index in sampler.draw(4)]
    counts = Counter(rows[index].data_source for index in drawn)
    for name, weight in weights.items():
        assert abs(counts[name] - 600 * weight / sum(weights.values())) <= 1
    first = [index for index in drawn if rows[index].data_source == next(iter(weights))][:30]
    assert len(set(first)) == 30, "a task came again before all of its source had come"


def test_a_mixture_of_a_converted_file_reads_one_task_of_each_source(
    tmp_path: Path, all_files_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "data_source": "{"abc"[i % 3]}"}}\n' for i in range(30)), "utf-8")
    rows, read = open_tasks(path, cache=tmp_path / "cache"), list[int]()

    def count(path: Path, number: int, *arguments: Any, **options: Any) -> Task:
        read.append(number)
        return read_task(path, number, *arguments, **options)

    monkeypatch.setattr("toolwise.data.table.read_task", count)
    sampler = Mixture(rows, seed=0, weights={"a": 1, "c": 2})
    assert read == [0, 1, 2]
    assert Counter(rows[index].data_source for index in sampler.draw(12)) == {"a": 4, "c": 8}


def test_after_a_change_of_weights_the_new_shares_hold_at_once() -> None:
    rows = tasks(100, "ab")
    first = Mixture(rows, seed=0, weights={"a": 1, "b": 9})
    first.draw(1000)
    second = Mixture(rows, seed=0, weights={"a": 9, "b": 1})
    second.load_state_dict(first.state_dict())
    assert Counter(rows[index].data_source for index in second.draw(20)) == {"a": 18, "b": 2}


def test_the_order_of_the_weights_does_not_matter() -> None:
    rows = tasks(100, "ab")
    first, second = (Mixture(rows, seed=0, weights=weights) for weights in ({"a": 1, "b": 1}, {"b": 1, "a": 1}))
    drawn = first.draw(50)
    assert second.draw(50) == drawn
    second.load_state_dict(first.state_dict())
    assert len({*drawn, *second.draw(50)}) == 100
    alone = Mixture(rows, seed=0, weights={"b": 1})
    assert alone.draw(25) == [index for index in drawn if rows[index].data_source == "b"]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("uniform", {}),
    ("difficulty", {}),
    ("mixture", {"weights": {"a": 2, "b": 1}}),
]


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_a_saved_sampler_goes_on_where_it_was(name: str, kwargs: dict[str, Any]) -> None:
    first, second = (SAMPLERS[name](tasks=tasks(20, "ab"), seed=1, **kwargs) for _ in range(2))
    for step in range(7):
        first.observe({index: [step % 2 * 1.0] for index in first.draw(3)})
    second.load_state_dict(first.state_dict())
    for step in range(5):
        drawn = first.draw(3)
        assert second.draw(3) == drawn
        for sampler in (first, second):
            sampler.observe({index: [step % 3 / 2] for index in drawn})


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_another_seed_or_another_sampler_s_state_is_refused_in_one_line(name: str, kwargs: dict[str, Any]) -> None:
    rows = tasks(20, "ab")
    sampler = SAMPLERS[name](tasks=rows, seed=1, **kwargs)
    other = SAMPLERS[name](tasks=rows, seed=2, **kwargs)
    with pytest.raises(CheckpointError, match=r"data seed is 2, but now it is 1.*resume with seed = 2$"):
        sampler.load_state_dict(other.state_dict())
    for kind, options in CASES:
        if kind != name:
            state = SampledBatches(rows, 2, SAMPLERS[kind](tasks=rows, seed=1, **options)).state_dict()
            with pytest.raises(CheckpointError, match=r"cannot load .*resume with the sampler of the first run$"):
                SampledBatches(rows, 2, sampler).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        ("difficulty", {"floor": 0.0}, "floor is 0.0"),
        ("difficulty", {"decay": 1.0}, "decay is 1.0"),
        ("difficulty", {"lowest": 2.0}, "highest is 1.0"),
        ("mixture", {"weights": {"z": 1.0}}, "data source 'z', but the tasks have: 'a', 'b'"),
        ("mixture", {"weights": {"a": 0.0}}, "weight of 'a' is 0.0"),
        ("mixture", {"weights": {}}, "weights is empty"),
        ("mixture", {}, "weights is empty or not a table"),
        ("mixture", {"weights": ["a"]}, "weights is empty or not a table"),
        ("mixture", {"weights": {"a": "x"}}, "weight of 'a' is 'x'"),
        ("mixture", {"weights": {"a": float("inf")}}, "weight of 'a' is inf"),
        ("difficulty", {"floor": float("inf")}, "floor is inf"),
    ],
)
def test_bad_options_are_refused_in_one_line(name: str, kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        SAMPLERS[name](tasks=tasks(4, "ab"), seed=0, **kwargs)
    assert "\n" not in str(caught.value)
