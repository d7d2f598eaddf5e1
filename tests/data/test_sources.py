"""Opening the tasks of a run: files, globs and mixtures, read at once or from converted copies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolwise.config.data import DataSource, TaskSources
from toolwise.data import Batches, load_tasks, open_tasks
from toolwise.data.files import write_rows
from toolwise.data.task_set import TaskSet
from toolwise.errors import DataError

ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 1 + 1?", "reward_model": {"ground_truth": "2"}},
    {"prompt": [{"role": "system", "content": "Ä\u2028"}, {"role": "user", "content": "?"}], "ground_truth": [1, None]},
    {"prompt": "a", "extra_info": {"index": 0, "split": "train", "tools": ["calculator"]}, "weight": 0.1},
    {"prompt": "b", "extra_info": {"index": 0, "split": "train"}, "weight": float("nan")},
    {"prompt": "c", "extra_info": {"index": "row-4"}},
    {"prompt": "d", "extra_info": {"index": 0}},
    {"prompt_ids": [1, 2, 3], "termination_regex": "####"},
    {"prompt": "e", "task_id": "own", "tools_kwargs": {"search": {"create_kwargs": {"k": 2}}}},
    {"prompt": "f", "evaluation_criteria": {"tolerance": 1e-3}, "extra_info": '{"nested": {"null": null}}'},
]


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def numbered(path: Path, count: int) -> Path:
    return write_jsonl(path, ({"prompt": f"{path.stem} {number}"} for number in range(count)))


def test_a_converted_jsonl_file_has_the_tasks_of_the_file(tmp_path: Path, all_files_large: None) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    tasks = open_tasks(path, cache=tmp_path / "cache")
    assert isinstance(tasks, TaskSet)
    assert list(tasks) == load_tasks(path)


def test_a_converted_parquet_file_has_the_tasks_of_the_file(tmp_path: Path, all_files_large: None) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number} é"}],
            "reward_model": {"ground_truth": None if number % 3 else str(number), "style": "rule"},
            "extra_info": {"index": number // 2, "split": "train"},
            "level": number / 7,
        }
        for number in range(20)
    ]
    write_rows(rows, path := tmp_path / "train.parquet")
    assert list(open_tasks(path, cache=tmp_path / "cache")) == load_tasks(path)


def test_a_converted_json_list_has_the_tasks_of_the_file(tmp_path: Path, all_files_large: None) -> None:
    (path := tmp_path / "train.json").write_text(json.dumps(ROWS))
    assert list(open_tasks(path, cache=tmp_path / "cache")) == load_tasks(path)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    indices=st.lists(st.sampled_from([None, 0, 1, "row-1", "row-2", "row-2+", "row-3"]), min_size=1, max_size=8),
    splits=st.lists(st.sampled_from(["", "a"]), min_size=8, max_size=8),
)
def test_ids_are_those_of_the_whole_file(
    tmp_path: Path, all_files_large: None, indices: list[Any], splits: list[str]
) -> None:
    extras = [
        {name: value for name, value in {"index": index, "split": split or None}.items() if value is not None}
        for index, split in zip(indices, splits, strict=False)
    ]
    path = write_jsonl(tmp_path / "t.jsonl", ({"prompt": "?", "extra_info": extra} for extra in extras))
    converted = open_tasks(path, cache=tmp_path / "cache")
    assert [task.task_id for task in converted] == [task.task_id for task in load_tasks(path)]


def test_a_small_file_is_read_at_once(tmp_path: Path) -> None:
    path = numbered(tmp_path / "train.jsonl", 3)
    assert open_tasks(path, cache=tmp_path / "cache") == load_tasks(path)
    assert not (tmp_path / "cache").exists()


def test_a_small_limit_reads_only_the_first_rows_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolwise.data.sources.SMALL_BYTES", 0)
    path = numbered(tmp_path / "train.jsonl", 9)
    assert open_tasks(path, limit=2, cache=tmp_path / "cache") == load_tasks(path, limit=2)
    assert not (tmp_path / "cache").exists()


def test_a_limit_of_a_converted_file(tmp_path: Path, all_files_large: None) -> None:
    path = numbered(tmp_path / "train.jsonl", 9)
    tasks = open_tasks(path, limit=5, cache=tmp_path / "cache")
    assert list(tasks) == load_tasks(path, limit=5)
    assert Batches(tasks, 2, seed=0).state_dict() == Batches(load_tasks(path, limit=5), 2, seed=0).state_dict()


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_a_converted_file_are_those_of_the_whole_file(
    tmp_path: Path, all_files_large: None, shuffle: bool
) -> None:
    path = numbered(tmp_path / "train.jsonl", 11)
    converted = Batches(open_tasks(path, cache=tmp_path / "cache"), 3, seed=4, shuffle=shuffle)
    whole = Batches(load_tasks(path), 3, seed=4, shuffle=shuffle)
    for _ in range(10):
        assert next(converted) == next(whole)
    whole.load_state_dict(converted.state_dict())
    converted.load_state_dict(whole.state_dict())
    assert next(converted) == next(whole)


@pytest.mark.parametrize("large", [True, False])
def test_several_files_and_globs_follow_each_other(tmp_path: Path, request: pytest.FixtureRequest, large: bool) -> None:
    if large:
        request.getfixturevalue("all_files_large")
    for name in ("a/2.jsonl", "a/1.jsonl", "b.jsonl"):
        numbered(tmp_path / name, 2)
    tasks = open_tasks([tmp_path / "a" / "*.jsonl", tmp_path / "b.jsonl"], cache=tmp_path / "cache")
    assert [task.prompt[0].content for task in tasks] == ["1 0", "1 1", "2 0", "2 1", "b 0", "b 1"]
    limited = open_tasks([tmp_path / "a" / "*.jsonl", tmp_path / "b.jsonl"], limit=3, cache=tmp_path / "cache")
    assert [task.task_id for task in limited] == ["1/row-0", "1/row-1", "2/row-0"]


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    for name in ("a/train.jsonl", "b/train.jsonl", "b/other.jsonl"):
        numbered(tmp_path / name, 1)
    tasks = open_tasks([tmp_path / "*" / "*.jsonl"])
    assert [task.task_id for task in tasks] == ["a/train/row-0", "other/row-0", "b/train/row-0"]


def test_files_that_differ_in_their_suffix_are_told_apart(tmp_path: Path) -> None:
    numbered(tmp_path / "x.jsonl", 1)
    write_rows([{"prompt": "?"}], tmp_path / "x.parquet")
    names = [task.task_id for task in open_tasks([tmp_path / "x.*"])]
    assert len(set(names)) == 2


@pytest.mark.parametrize("large", [True, False])
def test_an_id_in_two_files_is_an_error_that_names_both(
    tmp_path: Path, request: pytest.FixtureRequest, large: bool
) -> None:
    if large:
        request.getfixturevalue("all_files_large")
    one = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "?"}, {"prompt": "?", "task_id": "x"}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"prompt": "?", "task_id": "x"}])
    with pytest.raises(DataError, match=rf"{two}: row 0 .* 'x' is already the id of row 1 of {one}"):
        open_tasks([one, two], cache=tmp_path / "cache")


def test_a_file_that_two_patterns_match_is_an_error(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 1)
    with pytest.raises(DataError, match=r"a.jsonl: is named 2 times"):
        open_tasks([tmp_path / "*.jsonl", path])


def test_a_file_by_two_names_is_an_error(tmp_path: Path) -> None:
    path = numbered(tmp_path / "a.jsonl", 1)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to(path)
    for other in (tmp_path / "folder" / ".." / "a.jsonl", tmp_path / "link.jsonl"):
        with pytest.raises(DataError, match=r"a.jsonl: is named 2 times"):
            open_tasks([path, other])


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize("row", [{"task_id": "\ud800"}, {"extra_info": {"index": "\ud800"}}])
def test_an_id_that_is_no_text_is_an_error(
    tmp_path: Path, request: pytest.FixtureRequest, large: bool, row: dict[str, Any]
) -> None:
    if large:
        request.getfixturevalue("all_files_large")
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "?"}, {"prompt": "?", **row}])
    with pytest.raises(DataError, match=r"row 1 .* field task_id: not valid Unicode"):
        open_tasks(path, cache=tmp_path / "cache")


def test_files_whose_names_are_no_text_are_read_and_converted(tmp_path: Path, all_files_large: None) -> None:
    paths = [write_jsonl(tmp_path / name, [{"prompt": "?"}] * 2) for name in ("\udcffa.jsonl", "\udcffb.jsonl")]
    tasks = open_tasks([DataSource(path=path, weight=1) for path in paths], cache=tmp_path / "cache")
    assert [task.task_id for task in tasks] == ["?a/row-0", "?a/row-1", "?b/row-0", "?b/row-1"]
    assert [task.task_id for path in paths for task in load_tasks(path)] == [task.task_id for task in tasks]


def test_a_pattern_too_long_for_a_file_matches_nothing() -> None:
    with pytest.raises(DataError, match="no file matches"):
        open_tasks(Path("What is 1 + 1? " * 30))


def test_a_folder_is_an_error_that_gives_a_pattern(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder; give a file in it, or a pattern such as .*/\*\.jsonl"):
        open_tasks(tmp_path)


def test_a_file_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    numbered(tmp_path / "a.jsonl", 2)
    assert len(open_tasks(Path("~/a.jsonl"))) == len(open_tasks(Path("~/*.jsonl"))) == 2


def test_a_glob_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\*.jsonl: no file matches"):
        open_tasks(tmp_path / "no*.jsonl")


def test_a_file_whose_name_looks_like_a_glob_is_read(tmp_path: Path) -> None:
    assert len(open_tasks(numbered(tmp_path / "a[1].jsonl", 2))) == 2


def test_a_limit_with_weights_applies_to_each_source(tmp_path: Path) -> None:
    sources = [DataSource(path=numbered(tmp_path / f"{name}.jsonl", 5), weight=1) for name in "ab"]
    tasks = open_tasks([*sources], limit=2)
    assert [task.task_id for task in tasks] == ["a/row-0", "a/row-1", "b/row-0", "b/row-1"]


def test_a_weight_is_shared_by_the_tasks_that_are_left_of_a_source(tmp_path: Path) -> None:
    for name in ("a1", "a2", "b"):
        numbered(tmp_path / f"{name}.jsonl", 20)
    sources: TaskSources = [
        DataSource(path=tmp_path / "a*.jsonl", weight=1),
        DataSource(path=tmp_path / "b.jsonl", weight=3),
    ]
    tasks = open_tasks(sources)
    assert isinstance(tasks, TaskSet)
    left = tasks.select(np.arange(19, 60))  # one task of the first file, all of the others
    counts = Counter(task.task_id for task in next(Batches(left, 41, seed=0)))
    assert sum(count for task_id, count in counts.items() if task_id.startswith("a")) == 10
    assert max(count for task_id, count in counts.items() if task_id.startswith("a")) == 1
    without = Batches(tasks.select(np.arange(20, 60)), 40, seed=0)  # none of the first file
    assert sum(task.task_id.startswith("a2") for task in next(without)) == 10


def test_with_a_limit_and_weights_an_id_in_two_files_names_both(tmp_path: Path) -> None:
    for name, ids in (("a1", "xy"), ("a2", "p"), ("b", "x")):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "q", "task_id": task_id} for task_id in ids])
    sources: TaskSources = [
        DataSource(path=tmp_path / "a*.jsonl", weight=1),
        DataSource(path=tmp_path / "b.jsonl", weight=1),
    ]
    with pytest.raises(DataError, match=r"/b\.jsonl.*/a1\.jsonl"):
        open_tasks(sources, limit=2)


def test_weights_set_the_shares_of_sources(tmp_path: Path) -> None:
    sources = [
        DataSource(path=numbered(tmp_path / f"{name}.jsonl", count), weight=weight)
        for name, count, weight in (("a", 30, 1), ("b", 10, 3))
    ]
    batches = Batches(open_tasks([*sources]), 8, seed=0)
    drawn = [task.task_id[0] for _ in range(5) for task in next(batches)]
    assert batches.epoch == 0
    assert (drawn.count("a"), drawn.count("b")) == (10, 30)
