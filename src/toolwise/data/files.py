"""Reads and writes rows as plain dictionaries: Parquet, JSONL and JSON lists."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from toolwise.data.limits import ReadBudget, check_text, one_line, open_data, read_lines
from toolwise.data.parquet import read_parquet
from toolwise.errors import ConfigError, DataError
from toolwise.serialization.json_text import json_line

READABLE = (".parquet", ".jsonl", ".json")
WRITABLE = (".parquet", ".jsonl")

Row = dict[str, Any]


def read_rows(path: str | Path, *, limit: int | None = None) -> list[Row]:
    """Reads at most `limit` rows; an empty file is an error."""
    path = Path(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; give at least 1, or leave it out to read every row of {path}")
    if path.suffix.lower() not in READABLE:
        suffix = path.suffix or "no suffix"
        raise DataError(f"{path}: has {suffix}; tasks are read from {', '.join(READABLE)} files: convert it")
    budget = ReadBudget(path)
    with open_data(path) as file:
        if path.suffix.lower() == ".parquet":
            source = read_parquet(path, file, budget, limit)
        else:
            check_text(path, file)
            source = (_read_jsonl if path.suffix.lower() == ".jsonl" else _read_json)(path, file, budget)
        rows = list(islice(source, limit))
    if not rows:
        raise DataError(f"{path}: has no rows; give a file with at least one")
    return rows


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Writes Parquet or JSONL depending on the suffix of `path`, replacing an existing file atomically."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in WRITABLE:
        raise DataError(f"{path}: rows are written as {' or '.join(WRITABLE)}; give the output one of these suffixes")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".parquet":
            _write_parquet(rows, temporary)
        else:
            with temporary.open("wb") as file:
                file.writelines(map(json_line, rows))
        os.replace(temporary, path)
    except UnicodeEncodeError as error:
        raise DataError(f"{path}: a row contains invalid Unicode ({error.reason}); fix it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error}); give another output path") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def row_error(path: Path, row: int, field: str, problem: str) -> DataError:
    """The error for a bad row: file, row, field, and what is wrong and how to fix it (`problem`)."""
    return DataError(f"{path}: row {row} (0-based), field {field}: {problem}")


def drop_nulls(value: Any) -> Any:
    """Removes dictionary keys whose value is None, at any depth. List items stay."""
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    return value


def _read_jsonl(path: Path, file: BinaryIO, budget: ReadBudget) -> Iterator[Row]:
    row = 0
    for number, raw in enumerate(read_lines(path, file, budget), start=1):
        line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if not line.strip():
            continue
        where = f"{path}: row {row} (0-based; line {number})"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            _raise_not_utf8(path, error, f", line {number}")
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({one_line(error)}); each line must be one JSON object") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: a {_json_type(value)}, not a JSON object; each line must be one object")
        yield value
        row += 1


def _read_json(path: Path, file: BinaryIO, budget: ReadBudget) -> Iterator[Row]:
    raw = file.read(budget.bytes + 1)
    budget.spend(len(raw))
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        _raise_not_utf8(path, error)
    except (ValueError, RecursionError) as error:
        hint = "a .json file is one list of objects; if every line is an object, end the name with .jsonl"
        raise DataError(f"{path}: not JSON ({one_line(error)}); {hint}") from error
    if not isinstance(value, list):
        raise DataError(f"{path}: holds a {_json_type(value)}; a .json file must be one list of objects")
    for row, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(
                f"{path}: row {row} (0-based): a {_json_type(item)}, not an object; make every row an object"
            )
        yield item


def _write_parquet(rows: Sequence[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Not Table.from_pylist: it takes its columns from the first row and drops those that only later rows have.
    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pa.table({name: [row.get(name) for row in rows] for name in columns})
        with path.open("wb") as file:
            pq.write_table(table, file)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{path.stem}: cannot store these rows as Parquet ({one_line(error)}); write to a .jsonl file instead"
        ) from error


def _raise_not_utf8(path: Path, error: UnicodeDecodeError, where: str = "") -> NoReturn:
    raise DataError(f"{path}: not UTF-8 text ({error.reason}, byte {error.start}{where}); save it as UTF-8") from error


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
