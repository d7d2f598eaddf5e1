"""Any rows are tasks or one line that names the row; any bytes are rows or one line that names the file."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fuzzing import JSON, NUMBERS, TEXT, fuzz, nested
from hypothesis import strategies as st

from toolwise.data.files import read_rows, write_rows
from toolwise.data.rows import KNOWN_COLUMNS, read_task
from toolwise.data.stats import describe_tasks, stats_table
from toolwise.data.task_rows import task_to_row
from toolwise.errors import DataError, ToolwiseError
from toolwise.serialization.json_text import json_text

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.one_of(st.sampled_from(["user", "system", "assistant", "tool"]), JSON),
            "content": st.one_of(TEXT, JSON),
        },
        optional={"tool_calls": JSON, "name": JSON, "tool_call_id": JSON, "reasoning_content": JSON},
    ),
    max_size=3,
)
FIELDS = dict.fromkeys(KNOWN_COLUMNS, JSON) | {
    "prompt": st.one_of(TEXT, MESSAGES, JSON),
    "prompt_ids": st.one_of(st.lists(NUMBERS, max_size=4), JSON),
    "task_id": st.one_of(TEXT, NUMBERS),
    "extra_info": st.one_of(st.fixed_dictionaries({}, optional={"index": JSON, "split": JSON, "tools": JSON}), JSON),
    "data_source": st.one_of(st.just("rlla"), TEXT, JSON),
    "odd": JSON,
}
ROWS = st.fixed_dictionaries({"prompt": FIELDS.pop("prompt")}, optional=FIELDS)


def told(fault: ToolwiseError) -> None:
    assert str(fault)
    assert len(str(fault)) < 30_000


@fuzz(ROWS, examples=40)
def test_any_row_is_a_task_or_a_line(row: dict[str, Any]) -> None:
    try:
        task = read_task(Path("x.jsonl"), 0, row, {})
    except DataError as fault:
        return told(fault)
    json_text(task.model_dump()).encode()
    try:
        task_to_row(task, "x", 0)
    except DataError as fault:
        told(fault)


@fuzz(st.lists(ROWS, min_size=1, max_size=3), st.sampled_from(["jsonl", "json", "parquet"]))
def test_any_file_of_rows_is_described_or_refused(rows: list[dict[str, Any]], ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{ending}"
        try:
            if ending == "json":
                path.write_text(json_text(rows), encoding="utf-8")
            else:
                write_rows(rows, path)
            stats_table(described := describe_tasks(path))
            json.dumps(described, allow_nan=False)
        except ToolwiseError as fault:
            told(fault)


@fuzz(
    st.one_of(st.binary(max_size=200), st.just(json.dumps(nested(300)).encode())),
    st.sampled_from(["jsonl", "json", "parquet"]),
)
def test_any_bytes_are_rows_or_a_line(content: bytes, ending: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"x.{ending}"
        path.write_bytes(content)
        try:
            read_rows(path)
        except ToolwiseError as fault:
            told(fault)


def _parquet() -> bytes:
    buffer = io.BytesIO()
    columns = {"prompt": ["hello"] * 30, "x": list(range(30)), "y": [[{"a": 1.5, "b": None}]] * 30}
    pq.write_table(pa.table(columns), buffer, row_group_size=10)
    return buffer.getvalue()


PARQUET = _parquet()


@fuzz(
    st.lists(st.tuples(st.integers(0, len(PARQUET) - 1), st.integers(0, 255)), max_size=6), st.integers(1, len(PARQUET))
)
def test_a_damaged_parquet_file_is_read_or_refused(changes: list[tuple[int, int]], length: int) -> None:
    content = bytearray(PARQUET)
    for place, value in changes:
        content[place] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        path.write_bytes(content if length % 3 else content[:length])
        try:
            for row in read_rows(path):
                json_text(row)
        except ToolwiseError as fault:
            told(fault)


@fuzz(JSON)
def test_any_value_is_json(value: Any) -> None:
    text = json_text({"value": value, float("nan"): {1, "a"}})
    text.encode("utf-8")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    json.loads(text, parse_constant=refuse)
