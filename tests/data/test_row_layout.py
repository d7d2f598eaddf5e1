"""Columns under other names, and a system message: in every kind of file, in memory and converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolwise.data import load_tasks, open_tasks
from toolwise.data.files import write_rows
from toolwise.data.row_layout import RowLayout
from toolwise.data.rows import tasks_from_rows
from toolwise.data.stats import describe_tasks
from toolwise.data.task_rows import tasks_to_jsonl
from toolwise.data.task_set import TaskSet
from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.types import Task

LAYOUT = RowLayout({"prompt": "question", "ground_truth": "answer"}, "Answer with a number.")
ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "level": n} for n in range(4)]


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"train{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps(ROWS), "utf-8")
    else:
        write_rows(ROWS, path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json"])
def test_columns_are_read_under_the_names_of_their_fields(tmp_path: Path, suffix: str) -> None:
    tasks = load_tasks(write(tmp_path, suffix), layout=LAYOUT)
    assert [(m.role, m.content) for m in tasks[1].prompt] == [
        ("system", "Answer with a number."),
        ("user", "What is 1 + 1?"),
    ]
    assert [task.ground_truth for task in tasks] == ["1", "2", "3", "4"]
    assert tasks[1].reward_kwargs == {"level": 1}  # the moved columns are no arguments


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".json"])
def test_a_converted_file_has_the_same_tasks(tmp_path: Path, suffix: str, all_files_large: None) -> None:
    path = write(tmp_path, suffix)
    tasks = open_tasks(path, cache=tmp_path / "cache", layout=LAYOUT)
    assert isinstance(tasks, TaskSet)
    assert list(tasks) == load_tasks(path, layout=LAYOUT)
    assert list(open_tasks(path, limit=2, cache=tmp_path / "cache", layout=LAYOUT)) == list(tasks)[:2]


def test_each_layout_has_its_own_copy(tmp_path: Path, all_files_large: None) -> None:
    path, cache = write(tmp_path, ".jsonl"), tmp_path / "cache"
    other = RowLayout({"prompt": "answer"})
    first = open_tasks(path, cache=cache, layout=LAYOUT)
    second = open_tasks(path, cache=cache, layout=other)
    assert [task.prompt[-1].content for task in (first[0], second[0])] == ["What is 0 + 1?", "1"]
    assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 2
    with pytest.raises(DataError, match="field prompt"):  # not the copy that a layout has made
        open_tasks(path, cache=cache)


@pytest.mark.parametrize("large", [False, True])
def test_a_column_that_is_not_there_lists_those_that_are(
    tmp_path: Path, large: bool, request: pytest.FixtureRequest
) -> None:
    if large:
        request.getfixturevalue("all_files_large")
    path = write(tmp_path, ".jsonl")
    wanted = r"train\.jsonl: row 0 .*, field prompt: there is no column 'qestion', which data\.columns names; "
    with pytest.raises(DataError, match=wanted + "the columns are: question, answer, level$"):
        open_tasks(path, cache=tmp_path / "cache", layout=RowLayout({"prompt": "qestion"}))


def test_a_row_without_a_prompt_lists_its_columns_and_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.columns = \{ prompt = \"question\" \}; the columns are: question, answ"
    ):
        load_tasks(write(tmp_path, ".jsonl"))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"ground_thruth": "answer"}, "there is no field 'ground_thruth'; did you mean ground_truth?"),
        ({"zzz": "answer"}, "write field = column"),
        ({"ability": "prompt"}, "the column 'prompt' is a field itself"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused(columns: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RowLayout(columns)
    assert said in str(caught.value)


def test_the_named_column_wins_over_one_of_the_field_s_own_name() -> None:
    (task,) = tasks_from_rows(
        Path("rows"), [{"prompt": "old", "question": "new"}], layout=RowLayout({"prompt": "question"})
    )
    assert task.prompt[0].content == "new"


def test_a_prompt_with_a_system_message_keeps_it() -> None:
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "?"}]
    (task,) = tasks_from_rows(Path("rows"), [{"prompt": own}], layout=RowLayout(system_prompt="Other."))
    assert [m.content for m in task.prompt] == ["Mine.", "?"]


def test_tasks_given_as_objects_get_the_system_message_too() -> None:
    task = Task(task_id="a", prompt=[Message(role="user", content="?")])
    (changed,) = tasks_from_rows(Path("rows"), [task], layout=LAYOUT)
    assert [m.role for m in changed.prompt] == ["system", "user"]


def test_a_tokenized_prompt_takes_no_system_message() -> None:
    with pytest.raises(DataError, match=r"row 0 .*, field prompt_ids: .*data\.system_prompt"):
        tasks_from_rows(Path("rows"), [{"prompt_ids": [1, 2]}], layout=RowLayout(system_prompt="Other."))


def test_recorded_rows_are_read_with_the_same_layout(tmp_path: Path) -> None:
    """A run started from Python records its rows beside its settings; a resumed one applies the settings again."""
    rows = [*ROWS, {"question": "And this?", "answer": None}]
    tasks = tasks_from_rows(Path("rows"), rows, layout=LAYOUT)
    tasks += [Task(task_id="object", prompt=tasks[0].prompt, reward_kwargs={"answer": "of the reward"})]
    path = tmp_path / "train.jsonl"
    path.write_text(tasks_to_jsonl(tasks, "train", LAYOUT), "utf-8")
    assert load_tasks(path, layout=LAYOUT) == tasks


def test_statistics_take_the_same_columns(tmp_path: Path) -> None:
    found = describe_tasks(write(tmp_path, ".parquet"), RowLayout(LAYOUT.columns))
    assert found["ground_truth_types"] == {"str": 4}
    assert found["prompt_characters"]["min"] == len("What is 0 + 1?")


def test_a_named_column_that_a_file_lacks_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "own.jsonl"
    write_rows([{"prompt": f"What is {n} + 1?", "answer": "1"} for n in range(3)], path)
    layout = RowLayout({"prompt": "questoin", "ground_truth": "answer"})
    assert load_tasks(path, layout=layout)[0].prompt[0].content == "What is 0 + 1?"
    said = "rows without the column 'questoin', which data.columns names; their column 'prompt' is read instead"
    assert caplog.text.count(said) == 1
