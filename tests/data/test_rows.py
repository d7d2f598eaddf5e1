"""Converting rows to tasks: the layout, alternative fields, and errors for bad rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.data import load_tasks
from toolwise.data.files import drop_nulls, write_rows
from toolwise.data.rows import tasks_from_rows
from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.types import Task

DATA = Path(__file__).parents[1] / "fixtures"
PROMPT = [{"role": "user", "content": "2 + 2?"}]
FULL_ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, *PROMPT],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {
        "split": "train",
        "index": 7,
        "answer": "#### 4",
        "question": "2 + 2?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}},
        "interaction_kwargs": {"query": "2 + 2?", "ground_truth": "4"},
    },
}


def load(folder: Path, *rows: Any, name: str = "rows.jsonl") -> list[Task]:
    path = folder / name
    if path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        write_rows(list(rows), path)
    return load_tasks(path)


def complaint(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    with pytest.raises(DataError) as caught:
        load(folder, *rows, name=name)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder / name) in text
    return text


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
def test_a_full_row_becomes_a_task(tmp_path: Path, name: str) -> None:
    (task,) = load(tmp_path, FULL_ROW, name=name)
    assert task == Task(
        task_id="rows/train/7",
        prompt=[Message(role="system", content="Be brief."), Message(role="user", content="2 + 2?")],
        ground_truth="4",
        data_source="openai/gsm8k",
        ability="math",
        tools=["calc_gsm8k_reward"],
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}},
        interaction_kwargs={"query": "2 + 2?", "ground_truth": "4"},
        extra_info={"split": "train", "index": 7, "answer": "#### 4", "question": "2 + 2?"},
    )


def test_a_string_prompt_is_a_user_message(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": "2 + 2?"})
    assert list(task.prompt) == [Message(role="user", content="2 + 2?")]


def test_limit_reads_the_first_rows_and_nothing_after_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n')
    assert [task.prompt[0].content for task in load_tasks(path, limit=2)] == ["a", "b"]


def test_limit_cuts_a_parquet_file(tmp_path: Path) -> None:
    assert len(load_tasks(DATA / "rlla_test.parquet", limit=3)) == 3


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="limit is 0"):
        load_tasks(DATA / "rlla_test.parquet", limit=0)


def test_blank_lines_and_a_byte_order_mark_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n\n{"prompt": "b"}\n\n', encoding="utf-8")
    assert len(load_tasks(path)) == 2


# Tools


def test_a_tools_column_is_the_subset(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "tools": ["search", "calculator"]})
    assert task.tools == ["search", "calculator"]


def test_extra_info_may_hold_the_subset(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "extra_info": {"tools": ["search"]}})
    assert task.tools == ["search"]
    assert task.extra_info == {}


def test_an_explicit_subset_wins_over_the_keys_of_tools_kwargs(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {**FULL_ROW, "tools": ["calculator"]})
    assert task.tools == ["calculator"]


def test_an_empty_subset_offers_no_tool(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "tools": []})
    assert task.tools == []


def test_tools_kwargs_without_need_leave_the_subset_open(tmp_path: Path) -> None:
    extra = {"need_tools_kwargs": False, "tools_kwargs": {"search": {"create_kwargs": {"k": 3}}}}
    (task,) = load(tmp_path, {"prompt": PROMPT, "extra_info": extra})
    assert task.tools is None
    assert task.tools_kwargs == {"search": {"create_kwargs": {"k": 3}}}


def test_nulls_that_parquet_fills_into_heterogeneous_rows_are_gone(tmp_path: Path) -> None:
    kwargs: list[dict[str, Any]] = [
        {"search": {"create_kwargs": {"k": 3}}},
        {"calculator": {"execute_kwargs": {"digits": 2}}, "search": {"create_kwargs": {"index": "wiki"}}},
    ]
    rows = [{"prompt": PROMPT, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": k}} for k in kwargs]
    first, second = load(tmp_path, *rows, name="rows.parquet")
    filled = pq.read_table(tmp_path / "rows.parquet").to_pylist()[0]["extra_info"]["tools_kwargs"]
    assert filled["calculator"] is None
    assert (first.tools_kwargs, second.tools_kwargs) == tuple(kwargs)
    assert first.tools == ["search"]
    assert set(second.tools or []) == {"calculator", "search"}


def test_nulls_written_into_json_lines_are_gone_too(tmp_path: Path) -> None:
    extra = {
        "note": None,
        "tools_kwargs": {"search": None, "calculator": {"create_kwargs": {"a": None, "b": 1}}},
    }
    (task,) = load(tmp_path, {"prompt": PROMPT, "extra_info": extra})
    assert task.tools_kwargs == {"calculator": {"create_kwargs": {"b": 1}}}
    assert task.extra_info == {}


def test_a_tool_without_arguments_of_its_own_stays_on_offer(tmp_path: Path) -> None:
    kwargs: list[dict[str, Any]] = [{"search": {"create_kwargs": {"k": 3}}}, {"search": {}}]
    rows = [{"prompt": PROMPT, "extra_info": {"need_tools_kwargs": True, "tools_kwargs": k}} for k in kwargs]
    _, second = load(tmp_path, *rows, name="rows.parquet")
    assert second.tools == ["search"]
    assert second.tools_kwargs == {"search": {}}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_kwargs_may_be_json_text(tmp_path: Path, name: str) -> None:
    extra = FULL_ROW["extra_info"]
    as_text = {key: json.dumps(extra[key]) for key in ("tools_kwargs", "interaction_kwargs")}
    (task,) = load(tmp_path, {**FULL_ROW, "extra_info": {**extra, **as_text}}, name=name)
    assert [task] == load(tmp_path, FULL_ROW, name=name)


def test_a_null_inside_json_text_was_meant(tmp_path: Path) -> None:
    extra = {"tools_kwargs": json.dumps({"search": {"create_kwargs": {"k": None}}})}
    (task,) = load(tmp_path, {"prompt": PROMPT, "extra_info": extra}, name="rows.parquet")
    assert task.tools_kwargs == {"search": {"create_kwargs": {"k": None}}}


def test_a_parquet_map_column_is_an_object(tmp_path: Path) -> None:
    kwargs = pa.map_(pa.string(), pa.map_(pa.string(), pa.map_(pa.string(), pa.int64())))
    column = pa.array([[("search", [("create_kwargs", [("k", 3)])])]], type=kwargs)
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "tools_kwargs": column}), path)
    assert load_tasks(path)[0].tools_kwargs == {"search": {"create_kwargs": {"k": 3}}}


# Ground truth and reward arguments


def test_other_columns_and_criteria_are_arguments_of_the_reward(tmp_path: Path) -> None:
    row = {**FULL_ROW, "difficulty": 3, "evaluation_criteria": {"tolerance": 0.1}, "unused": None}
    (task,) = load(tmp_path, row)
    assert task.reward_kwargs == {"difficulty": 3, "tolerance": 0.1}


def test_what_stands_beside_the_ground_truth_is_an_argument_too(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "reward_model": {"ground_truth": 1, "style": "rule", "unit": "m"}})
    assert task.reward_kwargs == {"unit": "m"}


def test_a_ground_truth_column_will_do(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "ground_truth": [1, 2]})
    assert task.ground_truth == [1, 2]


def test_a_null_inside_a_json_ground_truth_was_meant(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "reward_model": {"ground_truth": {"page": None}}})
    assert task.ground_truth == {"page": None}


def test_a_parquet_ground_truth_has_only_its_own_keys(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "reward_model": {"ground_truth": truth}} for truth in ({"a": 1}, {"b": 2})]
    assert [t.ground_truth for t in load(tmp_path, *rows, name="rows.parquet")] == [{"a": 1}, {"b": 2}]


def test_a_false_or_zero_ground_truth_is_one(tmp_path: Path) -> None:
    tasks = load(tmp_path, *({"prompt": PROMPT, "reward_model": {"ground_truth": t}} for t in (False, 0, "")))
    assert [task.ground_truth for task in tasks] == [False, 0, ""]


# Ids


def test_a_task_id_column_is_the_id(tmp_path: Path) -> None:
    tasks = load(tmp_path, {"prompt": PROMPT, "task_id": "a"}, {"prompt": PROMPT, "task_id": 5})
    assert [task.task_id for task in tasks] == ["a", "5"]


def test_indexes_of_two_splits_do_not_collide(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "extra_info": {"index": 0, "split": split}} for split in ("train", "test")]
    assert [task.task_id for task in load(tmp_path, *rows)] == ["rows/train/0", "rows/test/0"]


def test_colliding_indexes_fall_back_to_the_row_number(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "extra_info": {"index": index}} for index in (0, 0, 1, 0)]
    assert [t.task_id for t in load(tmp_path, *rows)] == ["rows/0", "rows/row-1", "rows/1", "rows/row-3"]


def test_ids_do_not_depend_on_the_limit(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "extra_info": {"index": index}} for index in (4, 4, 4)]
    ids = [task.task_id for task in load(tmp_path, *rows)]
    assert [task.task_id for task in load_tasks(tmp_path / "rows.jsonl", limit=2)] == ids[:2]


@settings(deadline=None)
@given(indexes=st.lists(st.one_of(st.none(), st.integers(0, 4), st.sampled_from(["row-1", "row-2", "x"])), min_size=1))
def test_ids_are_unique_whatever_the_indexes(tmp_path_factory: pytest.TempPathFactory, indexes: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("ids")
    tasks = load(folder, *({"prompt": "a", "extra_info": {"index": index}} for index in indexes))
    assert len({task.task_id for task in tasks}) == len(indexes)


def test_a_repeated_task_id_names_both_rows(tmp_path: Path) -> None:
    text = complaint(tmp_path, *[{"prompt": PROMPT, "task_id": "a"}] * 2)
    assert "row 1 (0-based), field task_id: 'a' is already the id of row 0" in text


# Tokenized prompts


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_left_padding_goes_by_the_mask_and_not_by_the_pad_id(tmp_path: Path, name: str) -> None:
    row = {
        "input_ids": [2, 2, 2, 7, 2, 9],
        "attention_mask": [0, 0, 1, 1, 1, 1],
        "position_ids": [0, 0, 0, 1, 2, 3],
    }
    (task,) = load(tmp_path, row, name=name)
    assert task.prompt_ids == [2, 7, 2, 9]
    assert list(task.prompt) == []
    assert task.reward_kwargs == {}


def test_prompt_ids_without_a_mask_are_taken_as_they_are(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "prompt_ids": [0, 0, 5]})
    assert task.prompt_ids == [0, 0, 5]
    assert list(task.prompt) == [Message(role="user", content="2 + 2?")]


@settings(deadline=None)
@given(padding=st.integers(0, 5), ids=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_any_left_padded_prompt_comes_back_whole(
    tmp_path_factory: pytest.TempPathFactory, padding: int, ids: list[int]
) -> None:
    row = {"input_ids": [0] * padding + ids, "attention_mask": [0] * padding + [1] * len(ids)}
    assert load(tmp_path_factory.mktemp("ids"), row)[0].prompt_ids == ids


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}, "attention_mask", "pad prompts on the left"),
        (
            {"input_ids": [0, 5, 0, 6], "attention_mask": [0, 1, 0, 1]},
            "attention_mask",
            "zeros followed by ones",
        ),
        ({"input_ids": [0, 0], "attention_mask": [0, 0]}, "attention_mask", "masks every token"),
        ({"input_ids": [0, 5], "attention_mask": [1]}, "attention_mask", "has 1 items for 2 token ids"),
        ({"input_ids": [0, 5], "attention_mask": [0, 2]}, "attention_mask", "zeros and ones"),
        ({"input_ids": []}, "input_ids", "at least one"),
        ({"prompt_ids": [1, -5]}, "prompt_ids", "from 0 up"),
        ({"prompt_ids": [1.5]}, "prompt_ids", "integers"),
        ({"prompt_ids": [1], "input_ids": [1]}, "prompt_ids", "keep one of the two"),
    ],
)
def test_bad_token_ids_are_named(tmp_path: Path, row: dict[str, Any], field: str, problem: str) -> None:
    text = complaint(tmp_path, {"prompt": "fine"}, row)
    assert f"row 1 (0-based), field {field}:" in text
    assert problem in text


# Bad rows


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": []}, "prompt", "missing or empty"),
        ({"prompt": ""}, "prompt", "missing or empty"),
        ({"prompt": None, "messages": PROMPT}, "prompt", 'data.columns = { prompt = "messages" }'),
        ({"prompt": {"role": "user"}}, "prompt", "list of messages or a string"),
        ({"prompt": ["hello"]}, "prompt[0]", "not a message"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "prompt[0].role", "'robot'"),
        ({"prompt": [{"content": "x"}]}, "prompt[0].role", "required"),
        ({"prompt": [*PROMPT, {"role": "assistant"}]}, "prompt[1].content", "tool_calls"),
        ({"prompt": [{"role": "user", "content": 3}]}, "prompt[0].content", "string"),
        ({"prompt": "\ud800"}, "prompt[0].content", "Unicode"),
        ({"data_source": 3}, "data_source", "not a string"),
        ({"ability": ["math"]}, "ability", "not a string"),
        ({"extra_info": [1]}, "extra_info", "not an object"),
        ({"extra_info": "{"}, "extra_info", "not JSON"),
        ({"extra_info": {"index": [1]}}, "extra_info.index", "not an id"),
        ({"extra_info": {"tools_kwargs": "[1]"}}, "extra_info.tools_kwargs", "not an object"),
        ({"extra_info": {"tools_kwargs": {"a": 1}}}, "extra_info.tools_kwargs.a", "not an object"),
        (
            {"extra_info": {"tools_kwargs": {"a": {"excute_kwargs": {}}}}},
            "extra_info.tools_kwargs.a.excute_kwargs",
            "did you mean execute_kwargs?",
        ),
        ({"extra_info": {"need_tools_kwargs": True}}, "need_tools_kwargs", "names no tool"),
        ({"extra_info": {"need_tools_kwargs": "yes"}}, "extra_info.need_tools_kwargs", "true or false"),
        ({"extra_info": {"interaction_kwargs": 3}}, "extra_info.interaction_kwargs", "not an object"),
        ({"reward_model": "rule"}, "reward_model", "not JSON"),
        ({"ground_truth": "5", "reward_model": {"ground_truth": "4"}}, "ground_truth", "keep one"),
        ({"tools": [{"type": "function"}]}, "tools", "list of tool names"),
        ({"tools": ["a", "a"]}, "tools", "twice"),
        ({"messages": PROMPT}, "messages", "rename it"),
        ({"evaluation_criteria": {"ground_truth": 1}}, "evaluation_criteria.ground_truth", "rename it"),
        (
            {"tolerance": 1, "evaluation_criteria": {"tolerance": 2}},
            "evaluation_criteria.tolerance",
            "rename",
        ),
        ({"evaluation_criteria": 3}, "evaluation_criteria", "not an object"),
        ({"termination_regex": "(done"}, "termination_regex", "not a usable regular expression"),
        ({"termination_regex": "(?=a)b"}, "termination_regex", "linear time"),
        ({"termination_regex": 3}, "termination_regex", "as a string"),
        ({"task_id": ""}, "task_id", "not an id"),
    ],
)
def test_a_bad_row_names_file_row_field_and_cure(
    tmp_path: Path, change: dict[str, Any], field: str, problem: str
) -> None:
    rows = [{"prompt": PROMPT}, {"prompt": PROMPT}, {"prompt": PROMPT} | change]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as caught:
        load_tasks(tmp_path / "rows.jsonl")
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'rows.jsonl'}: row 2 (0-based), field ")
    assert f"{field}:" in text
    assert problem in text
    assert "\n" not in text


def test_a_termination_regex_is_kept(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"prompt": PROMPT, "termination_regex": r"####\s*\d+"})
    assert task.termination_regex == r"####\s*\d+"


def test_a_row_nested_too_deeply_is_named(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    assert "row 0 (0-based)" in complaint(tmp_path, {"prompt": "a", "deep": deep})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=json_values)
def test_dropping_nulls_leaves_no_null_under_a_key_and_nothing_else_changes(value: Any) -> None:
    def clean(part: Any) -> bool:
        if isinstance(part, dict):
            return all(item is not None and clean(item) for item in part.values())
        return not isinstance(part, list) or all(clean(item) for item in part)

    once = drop_nulls(value)
    assert clean(once)
    assert drop_nulls(once) == once
    assert once == value or not clean(value)


@settings(deadline=None)
@given(row=st.dictionaries(st.sampled_from(sorted([*FULL_ROW, "tools", "prompt_ids", "task_id"])), json_values))
def test_any_row_is_a_task_or_a_data_error(tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    try:
        (task,) = load_tasks(path)
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert task.prompt or task.prompt_ids


@pytest.mark.parametrize("name", ["step", "prompt_length"])
def test_a_column_that_would_hide_an_argument_from_the_run_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "rows.jsonl"
    for row in ({name: 3}, {"evaluation_criteria": {name: 3}}, {"reward_model": {name: 3}}):
        file.write_text(json.dumps({"prompt": "hi", **row}) + "\n")
        with pytest.raises(DataError, match=f"rewards already have an argument `{name}`; rename it"):
            load_tasks(file)


def test_a_nan_is_a_null_and_an_infinity_an_error(tmp_path: Path) -> None:
    """A reward sees the same values in training and when stored rollouts are scored again."""
    path = tmp_path / "x.parquet"
    rows = [
        {"prompt": "a", "ground_truth": "1", "weight": w, "extra_info": {"w": w, "v": [w]}} for w in (math.nan, 1.0)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = load_tasks(path)
    assert "weight" not in first.reward_kwargs
    assert second.reward_kwargs["weight"] == 1.0
    assert first.extra_info.get("w") is None
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "ground_truth": "1", "weight": math.inf}]), path)
    with pytest.raises(DataError, match=r"weight.*is inf, which is not valid JSON"):
        load_tasks(path)


class Frame:
    """Iterates over its columns, as a DataFrame does."""

    def __iter__(self) -> Any:
        return iter(["prompt", "ground_truth"])

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize(("rows", "hint"), [(Frame(), "to_dict"), ([("2 + 2?", "4")], 'write {"prompt": …}')])
def test_rows_that_are_no_dictionaries_are_refused(rows: Any, hint: str) -> None:
    with pytest.raises(DataError, match="is no dictionary of columns") as told:
        tasks_from_rows(Path("tasks"), rows)
    assert hint in str(told.value)
