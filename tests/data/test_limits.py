"""Odd, hostile and huge files: each gives a one-line error, quickly and with little memory."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from selection import quick_first

from toolwise.data.files import MAX_DATA_VARIABLE, MAX_LINE_MB, read_rows, write_rows
from toolwise.errors import ConfigError, DataError, ToolwiseError


def refused(path: Path | str, **options: Any) -> str:
    with pytest.raises(ToolwiseError) as caught:
        read_rows(path, **options)
    text = str(caught.value)
    assert "\n" not in text.replace(str(path), "")
    assert len(text) < 1000 + len(str(path))
    return text


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("digits.jsonl", b'{"a": ' + b"1" * 5_000 + b"}\n", "not JSON"),
        ("digits.json", b'[{"a": ' + b"1" * 5_000 + b"}]", "not JSON"),
        ("gzip.jsonl", gzip.compress(b'{"a": 1}\n', mtime=0), "gzip"),
        ("gzip.json", gzip.compress(b'[{"a": 1}]', mtime=0), "gzip"),
        ("zip.jsonl", b"PK\x03\x04rest", "zip archive"),
        ("zstd.jsonl", b"\x28\xb5\x2f\xfdrest", "zstd"),
        ("parquet.jsonl", b"PAR1restPAR1", "end its name with .parquet"),
        ("utf16.jsonl", '{"a": 1}\n'.encode("utf-16"), "UTF-16"),
        ("utf16be.json", b"\xfe\xff" + '[{"a": 1}]'.encode("utf-16-be"), "UTF-16"),
        ("utf16nobom.jsonl", '{"a": 1}\n'.encode("utf-16-le"), "not JSON"),
        ("nul.jsonl", b"\x00" * 100, "not JSON"),
        ("nul.json", b"\x00" * 100, "not JSON"),
        ("latin.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "byte 7, line 2"),
        ("deep.jsonl", b'{"a":' * 5_000 + b"\n", "not JSON"),
        ("jsonl.parquet", b'{"a": 1}\n', "not a Parquet file"),
        ("magic.parquet", b"PAR1" + b"\xff" * 60 + b"PAR1", "not a Parquet file"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert problem in refused(tmp_path / name)


def test_a_byte_order_mark_is_no_trouble(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '\ufeff{"a": 1}\n'), ("a.json", '\ufeff[{"a": 1}]')):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_rows(tmp_path / name) == [{"a": 1}]


def test_numbers_that_json_has_no_word_for_are_still_read(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text('{"a": NaN, "b": -Infinity}\n')
    assert str(read_rows(tmp_path / "old.jsonl")) == "[{'a': nan, 'b': -inf}]"


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _pipe_behind_a_link(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.mkdir()


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [_pipe, _pipe_behind_a_link, _device, _terminal, _loop, _folder, _dangling])
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    make(path)
    answers: list[str] = []
    reader = threading.Thread(target=lambda: answers.append(refused(path)), daemon=True)
    reader.start()
    reader.join(10)
    assert len(answers) == 1, "it waits for ever"


LONG = ("x" * 300 + ".jsonl", "x/" * 3_000 + "y.jsonl")


@pytest.mark.parametrize("name", [*LONG, "a\x00b.jsonl", "a\nb.jsonl", "\udcff.parquet"])
def test_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    assert "cannot be read" in refused(tmp_path / name) or "no such file" in refused(tmp_path / name)


@pytest.mark.parametrize("name", LONG)
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write_rows([{"a": 1}], tmp_path / name)


def test_odd_names_that_files_have(tmp_path: Path) -> None:
    for name in ("a\nb.jsonl", "\udcff.parquet", "\x1b]0;x\x07.jsonl"):
        write_rows([{"a": 1}], tmp_path / name)
        assert read_rows(tmp_path / name) == [{"a": 1}]


def test_a_line_has_a_longest_length(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate((MAX_LINE_MB << 20) + 100)
    assert f"line 2 is longer than {MAX_LINE_MB} MB" in refused(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_a_file_has_a_largest_size_that_can_be_raised(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"x.{ending}"
    rows = [{"text": "x" * 10_000} for _ in range(200)]
    if ending == "json":
        path.write_text(json.dumps(rows))
    else:
        write_rows(rows, path)
    monkeypatch.setenv(MAX_DATA_VARIABLE, "1")
    assert f"more than 1 MB; split the file, or read more with {MAX_DATA_VARIABLE}=4" in refused(path)
    if ending != "json":
        assert len(read_rows(path, limit=3)) == 3
    monkeypatch.setenv(MAX_DATA_VARIABLE, "4")
    assert read_rows(path) == rows


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5", "9" * 5_000, "٣"])
def test_a_size_that_is_none(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows([{"a": 1}], tmp_path / "x.jsonl")
    monkeypatch.setenv(MAX_DATA_VARIABLE, given)
    with pytest.raises(ConfigError, match=MAX_DATA_VARIABLE):
        read_rows(tmp_path / "x.jsonl")


def _dictionary_bomb(path: Path) -> None:
    """A long text stored once in the dictionaries of many row groups."""
    text = pa.array(["a" * 100_000] * 50)
    schema = pa.schema([("prompt", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(pa.table({"prompt": text}), row_group_size=3_000)


def _one_group_bomb(path: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000, pa.int32()), pa.array(["a" * 300_000]))
    pq.write_table(pa.table({"prompt": values}), path, compression="zstd")


def _row_bomb(path: Path) -> None:
    """Ten million empty rows."""
    rows = 10_000_000
    pq.write_table(pa.table({"a": pa.nulls(rows, pa.bool_())}), path, compression="zstd", row_group_size=rows)


_MEASURE = """
import sys
from pathlib import Path
from toolwise.data.files import read_rows
from toolwise.errors import DataError
try:
    read_rows(sys.argv[1])
    print("read")
except DataError as error:
    print(error)
# Not getrusage, which starts at the memory of the process that forked this one.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", quick_first([_dictionary_bomb, _one_group_bomb, _row_bomb], [_one_group_bomb]))
def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "x.parquet"
    make(path)
    assert path.stat().st_size < 200_000
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)],
        env={**os.environ, MAX_DATA_VARIABLE: "32", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said, memory = done.stdout.strip().splitlines()
    assert "take more than 32 MB" in said, done.stdout + done.stderr
    assert int(memory) < 700, "the whole of it was unpacked"


def arrow_file(tmp_path: Path, array: Any, name: str = "odd") -> Path:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": ["q"] * len(array), name: array}), path)
    return path


DAY = datetime.datetime(2024, 2, 29, 12, 30, 1, 5)


@pytest.mark.parametrize(
    ("array", "value"),
    [
        (pa.array([DAY], pa.timestamp("us")), "2024-02-29T12:30:01.000005"),
        (pa.array([DAY], pa.timestamp("ms", "UTC")), "2024-02-29T12:30:01+00:00"),
        (pa.array([1_600_000_000_123_456_789], pa.timestamp("ns")), "2020-09-13T12:26:40.123456"),
        (
            pa.array([[{"at": 1_001}]], pa.list_(pa.struct([("at", pa.timestamp("ns", "UTC"))]))),
            [{"at": "1970-01-01T00:00:00.000001+00:00"}],
        ),
        (pa.array([3_001], pa.time64("ns")), "00:00:00.000003"),
        (pa.array([1_500_000_001], pa.duration("ns")), 1.5),
        (pa.array([datetime.date(1, 1, 1)], pa.date32()), "0001-01-01"),
        (pa.array([datetime.time(1, 2)], pa.time64("us")), "01:02:00"),
        (pa.array([datetime.timedelta(seconds=90)], pa.duration("us")), 90.0),
        (pa.array([Decimal("12.50")], pa.decimal128(10, 2)), 12.5),
        (pa.array([Decimal("12345678901234567.89")], pa.decimal128(20, 2)), "12345678901234567.89"),
        (pa.array([Decimal("7")], pa.decimal256(60, 0)), 7),
        (pa.array([b"text"], pa.binary()), "text"),
        (pa.array([b"text"], pa.large_binary()), "text"),
        (pa.array([b"four"], pa.binary(4)), "four"),
        (pa.array(["x"], pa.large_string()), "x"),
        (pa.array([["x"]], pa.large_list(pa.string())), ["x"]),
        (pa.array([[1, 2]], pa.list_(pa.int8(), 2)), [1, 2]),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), {"k": 1}),
        (pa.array([[(3, 1)]], pa.map_(pa.int32(), pa.int64())), {"3": 1}),
        (pa.array(["x"]).dictionary_encode(), "x"),
        (pa.array([1.5], pa.float16() if hasattr(pa, "float16") else pa.float32()), 1.5),
        (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        (pa.array([{"a": None, "b": {"c": None, "d": 1}}]), {"b": {"d": 1}}),
    ],
)
def test_odd_columns_become_plain_values(tmp_path: Path, array: Any, value: Any) -> None:
    row = read_rows(arrow_file(tmp_path, array))[0]
    assert row["odd"] == value
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    "array",
    [
        pa.array([2**40], pa.timestamp("s")),
        pa.array([-(2**62)], pa.timestamp("us")),
        pa.array([1], pa.timestamp("us", "Mars/Olympus")),
        pa.array([2**62], pa.duration("s")),
        pa.array([2**31 - 1], pa.date32()),
        pa.array([b"\xff\xfe"], pa.binary()),
        pa.array([Decimal(10) ** 70], pa.decimal256(76, 0)),
        pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64())),
    ],
    ids=str,
)
def test_columns_that_python_cannot_hold_are_named_or_plain(tmp_path: Path, array: Any) -> None:
    path = arrow_file(tmp_path, array, "odd\x1b[2J")
    try:
        json.dumps(read_rows(path), allow_nan=False)
    except DataError:
        assert "column 'odd\\x1b[2J'" in refused(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
    assert "has two columns named 'a'" in refused(path)


def test_a_file_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["hello"] * 50, "x": list(range(50))}), buffer)
    whole = buffer.getvalue()
    path = tmp_path / "x.parquet"
    for length in range(1, len(whole), 97):
        path.write_bytes(whole[:length])
        refused(path)


def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["hello"] * 20, "x": list(range(20))}), buffer, compression="none")
    whole = buffer.getvalue()
    path = tmp_path / "x.parquet"
    for place in range(4, len(whole), 13):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(DataError):
            read_rows(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": "' + "x" * 1000 + '"}\n' + "".join('{"a": 1}\n' for _ in range(100_000)))
    from toolwise.data.files import ReadBudget, open_data, read_lines

    with open_data(path) as file:
        lines = read_lines(path, file, ReadBudget(path))
        assert len(next(lines)) > 1000
        os.truncate(path, 10)
        assert sum(1 for _ in lines) < 100_000
