"""The published RLLA rows, all 480 of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from toolwise.data import load_tasks
from toolwise.data.prepare import prepare_rlla
from toolwise.data.rlla_rows import TOOL_ENTRY, gold_calls, gold_kind, parse_tools
from toolwise.errors import DataError
from toolwise.types import Task

DATA = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def test_rows() -> list[Task]:
    return load_tasks(DATA / "rlla_test.parquet")


@pytest.fixture(scope="module")
def sft_rows(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    out = tmp_path_factory.mktemp("rlla") / "sft.parquet"
    prepare_rlla(DATA / "rlla_sft.json", out)
    return load_tasks(out)


@pytest.fixture(scope="module")
def all_rows(test_rows: list[Task], sft_rows: list[Task]) -> list[Task]:
    return test_rows + sft_rows


def test_all_480_rows_load(test_rows: list[Task], sft_rows: list[Task]) -> None:
    assert (len(test_rows), len(sft_rows)) == (80, 400)
    assert len({task.task_id for task in test_rows + sft_rows}) == 480


def test_a_row_is_one_system_and_one_user_message_with_a_gold_answer(all_rows: list[Task]) -> None:
    for task in all_rows:
        assert [message.role for message in task.prompt] == ["system", "user"]
        assert task.data_source == "rlla"
        assert task.ground_truth == task.extra_info["output"]
        assert task.prompt[0].content == task.extra_info["instruction"]
        assert task.prompt[1].content == task.extra_info["input"]
        assert task.tools is None
        assert task.reward_kwargs == {}


def test_every_tool_entry_of_every_row_is_read(all_rows: list[Task]) -> None:
    for task in all_rows:
        system = task.prompt[0].content or ""
        block = system.split("**Available Tools**", 1)[1].split("**Steps for Each Turn**", 1)[0]
        numbered = re.findall(r"^\d+\. Name: ", block, re.MULTILINE)
        entries = parse_tools(system)
        assert len(entries) == len(numbered) >= 1
        assert all(entry.name and isinstance(entry.parameters, dict) for entry in entries)


def test_tools_a_row_of_the_test_split(test_rows: list[Task]) -> None:
    counts = [len(parse_tools(task.prompt[0].content or "")) for task in test_rows]
    assert (min(counts), max(counts)) == (1, 7)
    assert sum(counts) / len(counts) == pytest.approx(3.3, abs=0.05)


def test_shares_of_the_test_split(test_rows: list[Task]) -> None:
    kinds = [gold_kind(task.ground_truth) for task in test_rows]
    assert kinds.count("tool-only") / len(kinds) == 0.8875
    assert kinds.count("response-only") / len(kinds) == 0.1125


def test_calls_a_row_of_the_test_split(test_rows: list[Task]) -> None:
    calls = [len(gold_calls(task.ground_truth)) for task in test_rows]
    calling = [count for count in calls if count]
    assert sum(calls) / len(calls) == pytest.approx(1.54, abs=0.005)
    assert sum(calling) / len(calling) == pytest.approx(1.73, abs=0.005)


def test_gold_calls_fit_their_kind_and_have_names_and_parameters(all_rows: list[Task]) -> None:
    for task in all_rows:
        calls = gold_calls(task.ground_truth)
        assert bool(calls) == (gold_kind(task.ground_truth) == "tool-only")
        assert all(isinstance(call["parameters"], dict) for call in calls)


def test_a_thought_that_names_a_tag_does_not_count(all_rows: list[Task]) -> None:
    naming = [task for task in all_rows if "<response>" in task.ground_truth and "<tool_call>" in task.ground_truth]
    assert len(naming) == 5
    assert {gold_kind(task.ground_truth) for task in naming} == {"tool-only"}


def test_gold_with_both_and_with_neither() -> None:
    call = '<tool_call>\n{"name": "a", "parameters": {}}\n</tool_call>'
    assert gold_kind(f"<think> t </think>\n{call}\n<response> done </response>") == "both"
    assert gold_kind("<think> <tool_call> </think>") == "neither"
    assert gold_calls(f"<think> t </think>\n{call}\n<response> done </response>") == [{"name": "a", "parameters": {}}]


def test_converted_rows_have_the_published_layout(tmp_path: Path) -> None:
    assert prepare_rlla(DATA / "rlla_sft.json", tmp_path) == {tmp_path / "rlla_sft.parquet": 400}
    published = pq.read_schema(DATA / "rlla_test.parquet")
    made = pq.read_schema(tmp_path / "rlla_sft.parquet")
    assert made.names == published.names
    for name in made.names:
        fields = made.field(name).type
        if name in ("reward_model", "extra_info"):
            assert {f.name: f.type for f in fields} == {f.name: f.type for f in published.field(name).type}


def test_conversion_loses_no_text(tmp_path: Path) -> None:
    source = json.loads((DATA / "rlla_sft.json").read_text())
    prepare_rlla(DATA / "rlla_sft.json", tmp_path / "sft.jsonl")
    for row, task in zip(source, load_tasks(tmp_path / "sft.jsonl"), strict=True):
        assert [message.content for message in task.prompt] == [row["instruction"], row["input"]]
        assert task.ground_truth == row["output"]
        assert task.extra_info["split"] == "train"


def test_a_converted_file_comes_through_unchanged(tmp_path: Path) -> None:
    prepare_rlla(DATA / "rlla_test.parquet", tmp_path / "test.parquet")
    made = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert made == pq.read_table(DATA / "rlla_test.parquet").to_pylist()


def test_what_a_converted_row_lacks_is_filled_in(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "No tools."}, {"role": "user", "content": "Hi"}]
    row = {"prompt": prompt, "reward_model": {"ground_truth": "<think> t </think>"}, "weight": 2}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    prepare_rlla(tmp_path / "test.jsonl", tmp_path / "out.jsonl")
    (task,) = load_tasks(tmp_path / "out.jsonl")
    assert task.data_source == "rlla"
    assert task.reward_kwargs == {"weight": 2}
    assert task.extra_info == {
        "index": 0,
        "input": "Hi",
        "instruction": "No tools.",
        "output": "<think> t </think>",
        "split": "test",
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"instruction": "a", "input": "b"},
            "field output: missing or empty (the row has instruction, input)",
        ),
        ({"prompt": "Hi", "ground_truth": "x"}, "an RLLA row is one system and one user message"),
        (
            {"instruction": "1. Name: a\nDescription: b\nParameters: {", "input": "b", "output": "c"},
            "not JSON",
        ),
        (
            {"instruction": "1. Name: a\nDescription: b\nParameters: []", "input": "b", "output": "c"},
            "object",
        ),
        (
            {"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            "field reward_model.ground_truth: missing",
        ),
    ],
)
def test_a_row_that_is_not_rllas_is_named(tmp_path: Path, row: dict[str, object], problem: str) -> None:
    (tmp_path / "x.json").write_text(json.dumps([row]))
    with pytest.raises(DataError) as caught:
        prepare_rlla(tmp_path / "x.json", tmp_path / "out.parquet")
    assert f"{tmp_path / 'x.json'}: row 0 (0-based)" in str(caught.value)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_system_message_without_tools_has_none() -> None:
    assert parse_tools("You are a helpful assistant.") == []


def test_a_tool_entry_is_read_whole() -> None:
    text = '1. Name: Get News\nDescription: Fetch: news\nParameters: {"page": {"type": "int"}}\n\nmore'
    assert parse_tools(text) == [("Get News", "Fetch: news", {"page": {"type": "int"}})]
    assert len(TOOL_ENTRY.findall(text)) == 1


@pytest.mark.parametrize("line", ["{", '{"parameters": {}}', "[]"])
def test_a_gold_call_that_is_none_is_an_error(line: str) -> None:
    with pytest.raises(DataError, match="gold call"):
        gold_calls(f"<think> t </think>\n<tool_call>\n{line}\n</tool_call>")
