"""Preparing GSM8K with a calculator or with the oracle tool."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from toolwise.data import load_tasks
from toolwise.data.prepare import prepare_gsm8k
from toolwise.errors import DataError

DATA = Path(__file__).parents[1] / "fixtures"
SOURCE = DATA / "gsm8k.jsonl"


def test_rows_come_with_a_calculator_and_no_answer_for_it(tmp_path: Path) -> None:
    out = tmp_path / "train.parquet"
    assert prepare_gsm8k(SOURCE, out) == {out: 60}
    for number, task in enumerate(load_tasks(out)):
        system, user = task.prompt
        assert task.task_id == f"train/train/{number}"
        assert task.data_source == "openai/gsm8k"
        assert task.ability == "math"
        assert task.tools == ["calculator"]
        assert task.tools_kwargs == {}
        assert "`calculator`" in (system.content or "")
        assert "`#### <answer>`" in (system.content or "")
        assert task.interaction_kwargs == {"query": user.content, "ground_truth": task.ground_truth}


def test_the_layout_of_oracle_rows(tmp_path: Path) -> None:
    prepare_gsm8k(SOURCE, tmp_path / "train.parquet", oracle_tool=True)
    row = pq.read_table(tmp_path / "train.parquet").to_pylist()[0]
    source = json.loads(SOURCE.read_text().splitlines()[0])
    assert row.keys() == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert row["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert row["extra_info"] == {
        "split": "train",
        "index": 0,
        "answer": source["answer"],
        "question": source["question"],
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
        "interaction_kwargs": {"query": source["question"], "ground_truth": "72"},
    }
    (task, *_) = load_tasks(tmp_path / "train.parquet")
    assert task.tools == ["calc_gsm8k_reward"]
    assert "at least once and refine your answer" in (task.prompt[0].content or "")


def test_answers_are_plain_numbers(tmp_path: Path) -> None:
    prepare_gsm8k(SOURCE, tmp_path / "train.jsonl")
    answers = [task.ground_truth for task in load_tasks(tmp_path / "train.jsonl")]
    assert answers[-3:-1] == ["1080", "850000"]
    assert all(answer.lstrip("-").isdigit() for answer in answers)
    assert answers[-1].startswith("-")


def test_parquet_and_json_lines_give_the_same_tasks(tmp_path: Path) -> None:
    for oracle in (False, True):
        prepare_gsm8k(SOURCE, tmp_path / "a" / "x.parquet", oracle_tool=oracle)
        prepare_gsm8k(SOURCE, tmp_path / "b" / "x.jsonl", oracle_tool=oracle)
        assert load_tasks(tmp_path / "a" / "x.parquet") == load_tasks(tmp_path / "b" / "x.jsonl")


def test_a_folder_gives_both_splits(tmp_path: Path) -> None:
    lines = SOURCE.read_text().splitlines(keepends=True)
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.jsonl").write_text("".join(lines[:40]))
    (source / "test.jsonl").write_text("".join(lines[40:]))
    written = prepare_gsm8k(source, tmp_path / "out")
    assert written == {
        tmp_path / "out" / "train.parquet": 40,
        tmp_path / "out" / "test.parquet": 20,
    }
    assert load_tasks(tmp_path / "out" / "test.parquet")[0].extra_info["split"] == "test"


def test_a_file_into_a_folder_keeps_its_name(tmp_path: Path) -> None:
    (written,) = prepare_gsm8k(SOURCE, tmp_path / "out")
    assert written == tmp_path / "out" / "gsm8k.parquet"


@pytest.mark.parametrize("answer", ["no mark", "#### ", "#### many", "#### 3 apples"])
def test_an_answer_without_a_final_number_is_named(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "train.jsonl"
    good = json.dumps({"question": "1 + 1?", "answer": "<<1+1=2>>2\n#### 2"})
    path.write_text(good + "\n" + json.dumps({"question": "How many?", "answer": answer}))
    with pytest.raises(DataError, match=r"row 1 \(0-based\), field answer: .*#### <number>"):
        prepare_gsm8k(path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234,567", "1234567"), ("-12", "-12"), ("3.50", "3.50"), ("$1,000", "1000"), (" 7 ", "7")],
)
def test_final_answers_are_cleaned(tmp_path: Path, text: str, number: str) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "?", "answer": f"so #### it is\n#### {text}"}))
    prepare_gsm8k(tmp_path / "x.jsonl", tmp_path / "out.jsonl")
    assert load_tasks(tmp_path / "out.jsonl")[0].ground_truth == number


def test_another_dataset_is_recognised_as_such(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"field question: missing or empty .* right dataset"):
        prepare_gsm8k(DATA / "rlla_sft.json", tmp_path / "out.parquet")


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    source.write_bytes(SOURCE.read_bytes())
    with pytest.raises(DataError, match="replace its own source"):
        prepare_gsm8k(source, source)
    assert source.read_bytes() == SOURCE.read_bytes()


def test_a_folder_without_splits_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no train or test file"):
        prepare_gsm8k(tmp_path, tmp_path / "out")


def test_a_split_in_two_formats_is_ambiguous(tmp_path: Path) -> None:
    for name in ("train.jsonl", "train.json"):
        (tmp_path / name).write_text("")
    with pytest.raises(DataError, match="two formats"):
        prepare_gsm8k(tmp_path, tmp_path / "out")


def test_a_folder_cannot_go_into_one_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give a folder"):
        prepare_gsm8k(tmp_path, tmp_path / "out.parquet")
