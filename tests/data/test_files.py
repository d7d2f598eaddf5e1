"""Files that cannot be read or written give a one-line error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toolwise.data.files import read_rows, write_rows
from toolwise.errors import DataError


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("missing.jsonl", None, "no such file"),
        ("rows.csv", b"a,b\n", "has .csv; tasks are read from .parquet, .jsonl, .json"),
        ("rows", b"{}", "no suffix"),
        ("empty.jsonl", b"", "empty"),
        ("empty.parquet", b"", "empty"),
        ("blank.jsonl", b"\n\n", "no rows"),
        ("none.json", b"[]", "no rows"),
        ("torn.jsonl", b'{"a": 1}\n\n{"a": \n', "row 1 (0-based; line 3): not JSON"),
        ("numbers.jsonl", b"3\n", "row 0 (0-based; line 1): a number, not a JSON object"),
        ("lines.json", b'{"a": 1}\n{"a": 2}\n', "end the name with .jsonl"),
        ("object.json", b'{"a": 1}', "holds a object"),
        ("mixed.json", b'[{"a": 1}, "b"]', "row 1 (0-based): a string"),
        ("latin.jsonl", b'{"a": "\xe9"}\n', "not UTF-8"),
        ("latin.json", b'["\xe9"]', "not UTF-8"),
        ("text.parquet", b"this is no parquet file", "not a Parquet file"),
        ("deep.jsonl", b"[" * 100_000 + b"\n", "not JSON"),
        ("deep.json", b"[" * 100_000, "not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, problem: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert problem in text
    assert "\n" not in text


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        read_rows(tmp_path / "x.parquet")


def test_a_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="no rows"):
        read_rows(tmp_path / "x.parquet")


def test_a_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_rows([{"a": i} for i in range(100)], path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a Parquet file"):
        read_rows(path)


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_what_only_later_rows_have_is_written_too(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any]] = [{"a": 1}, {"a": 2, "b": {"c": "é"}}]
    write_rows(rows, tmp_path / name)
    assert read_rows(tmp_path / name) == rows


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    write_rows([{"a": 1}], tmp_path / "new" / "deeper" / "x.jsonl")
    assert read_rows(tmp_path / "new" / "deeper" / "x.jsonl") == [{"a": 1}]


def test_rows_that_do_not_fit_parquet_leave_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_rows([{"a": 1}], path)
    with pytest.raises(DataError, match=r"x\.parquet: cannot store these rows as Parquet .* write to a \.jsonl file"):
        write_rows([{"a": {}}], path)
    assert read_rows(path) == [{"a": 1}]
    assert [file.name for file in tmp_path.iterdir()] == ["x.parquet"]


def test_only_parquet_and_jsonl_are_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.parquet or \.jsonl"):
        write_rows([{"a": 1}], tmp_path / "x.csv")


def test_a_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_rows([{"a": 1}], tmp_path / "file" / "x.jsonl")
