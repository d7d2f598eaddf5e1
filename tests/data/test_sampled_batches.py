"""Batches from a sampler: its own, a user's by reference, what it is told, and what it does wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from async_cases import async_run, by_length, tiny_run, train

from toolwise.data import open_tasks
from toolwise.data.sampled_batches import SampledBatches, build_sampler
from toolwise.errors import CheckpointError, ConfigError, ToolwiseError
from toolwise.messages import Message
from toolwise.protocols import Sampler
from toolwise.types import Task

TASKS = [Task(task_id=f"t{i}", prompt=[Message(role="user", content="?")]) for i in range(6)]
OWN = """
from toolwise import Sampler

class Backwards(Sampler):
    def __init__(self, tasks, step=1):
        self.at, self.count, self.step = len(tasks), len(tasks), step

    def draw(self, count):
        self.at -= count * self.step
        return [(self.at + i) % self.count for i in range(count)]
"""


class Recorder(Sampler):
    """Every task in turn; keeps what it is told."""

    def __init__(self) -> None:
        self.next, self.told = 0, list[Mapping[int, Sequence[float]]]()

    def draw(self, count: int) -> list[int]:
        self.next += count
        return [(self.next - count + i) % 8 for i in range(count)]

    def observe(self, scores: Mapping[int, Sequence[float]]) -> None:
        self.told.append(scores)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def test_a_sampler_of_one_s_own_is_found_by_reference(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    sampler = build_sampler(f"{tmp_path / 'own.py'}:Backwards", {"step": 1}, TASKS, seed=0)
    batches = SampledBatches(TASKS, 2, sampler)
    assert [[task.task_id for task in next(batches)] for _ in range(4)] == [
        ["t4", "t5"],
        ["t2", "t3"],
        ["t0", "t1"],
        ["t4", "t5"],
    ]
    assert batches.next_size == 2


@pytest.mark.parametrize(
    ("source", "kwargs", "told"),
    [
        ("uniforn", {}, "did you mean"),
        ("uniform", {"flor": 1}, "has no option 'flor'"),
        (object(), {}, "has no draw, observe"),
    ],
)
def test_what_is_no_sampler_is_refused(source: Any, kwargs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_sampler(source, kwargs, TASKS, seed=0)


@pytest.mark.parametrize("answer", [np.array([3, 1]), [np.int32(3), 1], iter([3, 1])])
def test_numbers_may_come_from_numpy(answer: Any) -> None:
    class Own(Sampler):
        def draw(self, count: int) -> Sequence[int]:
            return answer

    assert [task.task_id for task in next(SampledBatches(TASKS, 2, Own()))] == ["t3", "t1"]


def test_a_generator_that_raises_is_the_sampler_s_error() -> None:
    class Broken(Sampler):
        def draw(self, count: int) -> Any:
            yield 0
            raise ValueError("the rest is missing")

    with pytest.raises(ToolwiseError, match=r"data\.sampler: Broken failed: ValueError"):
        next(SampledBatches(TASKS, 2, Broken()))


@pytest.mark.parametrize("name", ["uniform", "difficulty"])
def test_no_tasks_are_an_error_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match="no tasks"):
        SampledBatches([], 2, build_sampler(name, {}, [], seed=0))


def test_scores_are_told_by_number_also_of_a_converted_file(tmp_path: Path, all_files_large: None) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(8)), "utf-8")
    tasks, recorder = open_tasks(path, cache=tmp_path / "cache"), Recorder()
    batches = SampledBatches(tasks, 2, recorder)
    rollouts = [SimpleNamespace(task=task, trainable=True) for task in (tasks[6], tasks[1], tasks[6])]
    result = SimpleNamespace(has_valid_score=True)
    batches.observe([SimpleNamespace(rollout=r, result=result, score=float(i)) for i, r in enumerate(rollouts)])  # type: ignore[misc]
    assert recorder.told == [{1: [1.0], 6: [0.0, 2.0]}]


@pytest.mark.parametrize("answer", [[0], [0, 6], [0, -1], [0, 1.0], [0, 1, 2], [0, True], None, 1])
def test_wrong_indices_are_an_error_that_says_what_is_right(answer: Any) -> None:
    class Wrong(Sampler):
        def draw(self, count: int) -> Sequence[int]:
            return answer

    with pytest.raises(ToolwiseError, match=r"Wrong\.draw\(2\) returned .*: it must return 2 integers from 0 to 5"):
        next(SampledBatches(TASKS, 2, Wrong()))


def test_a_sampler_that_raises_is_named_with_its_error() -> None:
    class Broken(Sampler):
        def draw(self, count: int) -> Sequence[int]:
            raise KeyError("where")

    with pytest.raises(ToolwiseError, match=r"data\.sampler: Broken failed: KeyError"):
        next(SampledBatches(TASKS, 2, Broken()))


def test_a_checkpoint_of_other_data_or_without_a_sampler_is_refused() -> None:
    batches = SampledBatches(TASKS, 2, Recorder())
    state = batches.state_dict()
    with pytest.raises(CheckpointError, match="other data"):
        SampledBatches(TASKS[:4], 2, Recorder()).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"without data\.sampler"):
        batches.load_state_dict({"epoch": 0})


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_both_loops_ask_it_for_tasks_and_tell_it_the_scores(mode: str) -> None:
    recorder = Recorder()
    keep = {"algorithm": {"zero_std_groups": "keep"}}
    run = (
        async_run(1, by_length, steps=3, sampler=recorder, **keep)
        if mode == "async"
        else tiny_run(by_length, sampler=recorder, trainer={"total_steps": 3}, **keep)
    )
    results = train(run, 3)
    assert sorted(index for scores in recorder.told for index in scores) == [0, 1, 2, 3, 4, 5]
    assert recorder.next == 6
    for result, scores in zip(results, recorder.told, strict=True):
        assert sum(map(sum, scores.values())) == pytest.approx(sum(s.score for s in result.scored))


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_sampler_s_state() -> None:
    first, second = (tiny_run(by_length, sampler=Recorder(), trainer={"total_steps": 4}) for _ in range(2))
    train(first, 2)
    second.registry().load_state_dict(first.registry().state_dict())
    [result] = train(second, 1)
    assert sorted({s.rollout.task.task_id for s in result.scored}) == ["4", "5"]
