"""Reads and writes rows as plain dictionaries: Parquet, JSONL and JSON lists.

Reading is bounded: regular files only, never more than a budget, whatever the file's metadata claims.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from toolwise.errors import ConfigError, DataError
from toolwise.serialization.json_text import json_line

READABLE = (".parquet", ".jsonl", ".json")
WRITABLE = (".parquet", ".jsonl")

Row = dict[str, Any]

MAX_DATA_VARIABLE = "TOOLWISE_MAX_DATA_MB"
MAX_DATA_MB = 2048
"""Limit on the unpacked rows of one file. As Python objects they take several times as much memory."""
MAX_LINE_MB = 64
"""Limit on one line of a JSONL file."""
MIN_CELL_BYTES = 64
"""Minimum cost of a value as a Python object: a small file may claim a billion rows."""

_MAGIC_HINTS = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first (gunzip)",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first (unzstd)",
    b"BZh": "is compressed with bzip2; unpack it first (bunzip2)",
    b"\xfd7zXZ": "is compressed with xz; unpack it first (unxz)",
    b"PAR1": "is a Parquet file; end its name with .parquet",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}


def read_rows(path: str | Path, *, limit: int | None = None) -> list[Row]:
    """Reads at most `limit` rows; an empty file is an error."""
    path = Path(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; give at least 1, or leave it out to read every row of {path}")
    return [row for row, _ in iterate_rows(path, ReadBudget(path), limit=limit)]


def iterate_rows(path: Path, budget: ReadBudget, *, limit: int | None = None) -> Iterator[tuple[Row, bytes | None]]:
    """Yields at most `limit` rows, each with its line if the file is JSONL; an empty file is an error."""
    if path.suffix.lower() not in READABLE:
        if path.is_dir():
            raise DataError(f"{path}: is a folder; give a file in it, or a pattern such as {path / '*.jsonl'}")
        raise DataError(
            f"{path}: has {path.suffix or 'no suffix'}; tasks are read from {', '.join(READABLE)} files: convert it"
        )
    row = None
    with open_data(path) as file:
        if path.suffix.lower() == ".parquet":
            from toolwise.data.parquet import read_parquet

            source: Iterator[tuple[Row, bytes | None]] = (
                (row, None) for row in read_parquet(path, file, budget, limit)
            )
        else:
            check_text(path, file)
            source = (_read_jsonl if path.suffix.lower() == ".jsonl" else _read_json)(path, file, budget)
        for row in islice(source, limit):
            yield row
    if row is None:
        raise DataError(f"{path}: has no rows; give a file with at least one")


def write_rows(rows: Sequence[Row], path: str | Path) -> None:
    """Writes Parquet or JSONL depending on the suffix of `path`, replacing an existing file atomically."""
    path = Path(path)
    if (suffix := path.suffix.lower()) not in WRITABLE:
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


def _read_jsonl(path: Path, file: BinaryIO, budget: ReadBudget) -> Iterator[tuple[Row, bytes | None]]:
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
        yield value, line
        row += 1


def _read_json(path: Path, file: BinaryIO, budget: ReadBudget) -> Iterator[tuple[Row, bytes | None]]:
    raw = file.read(budget.bytes + 1)
    budget.spend(len(raw))
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        _raise_not_utf8(path, error)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: not JSON ({one_line(error)}); a .json file is one list of objects; if every line is an object, "
            "end the name with .jsonl"
        ) from error
    if not isinstance(value, list):
        raise DataError(f"{path}: holds a {_json_type(value)}; a .json file must be one list of objects")
    for row, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(
                f"{path}: row {row} (0-based): a {_json_type(item)}, not an object; make every row an object"
            )
        yield item, None


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
    return {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


class ReadBudget:
    """The number of bytes that may still be read from one file."""

    def __init__(self, path: Path, *, at_least: int = 0) -> None:
        """`at_least` raises the default limit, not one that the user has set."""
        self.path = path
        limit = max_data_bytes()
        self.bytes = self._left = limit if os.environ.get(MAX_DATA_VARIABLE) else max(limit, at_least)

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            self.raise_exceeded()

    def raise_exceeded(self) -> None:
        raise DataError(
            f"{self.path}: its rows take more than {self.bytes >> 20:,} MB; split the file, or read more with "
            f"{MAX_DATA_VARIABLE}={4 * self.bytes >> 20}"
        )


def max_data_bytes() -> int:
    value = os.environ.get(MAX_DATA_VARIABLE, "")
    if value and (not value.isascii() or not value.isdigit() or not 0 < len(value) < 10 or int(value) == 0):
        raise ConfigError(f"{MAX_DATA_VARIABLE}={value!r:.40}: give a whole number of megabytes, such as {MAX_DATA_MB}")
    return (int(value) if value else MAX_DATA_MB) << 20


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Opens a non-empty regular file; rejects anything else without blocking."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would block
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path (relative paths start at {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        status = os.fstat(descriptor)
        for is_bad, problem in (
            (stat.S_ISDIR(status.st_mode), "is a folder; give one of the files in it"),
            (not stat.S_ISREG(status.st_mode), "is a pipe or a device; write its content to a file and give that"),
            (status.st_size == 0, "the file is empty; give a file with at least one row"),
        ):
            if is_bad:
                raise DataError(f"{path}: {problem}")
        try:
            yield stack.enter_context(os.fdopen(descriptor, "rb", closefd=False))
        except OSError as error:
            raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError | ValueError) -> DataError:
    reason = getattr(error, "strerror", None) or one_line(error)
    return DataError(f"{path}: cannot be read ({reason}); check the path and its permissions")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def check_text(path: Path, file: BinaryIO) -> None:
    """Rejects files whose first bytes show that they are not UTF-8 text."""
    start = file.read(8)
    for magic, problem in _MAGIC_HINTS.items():
        if start.startswith(magic):
            raise DataError(f"{path}: {problem}")
    file.seek(0)


def read_lines(path: Path, file: BinaryIO, budget: ReadBudget) -> Iterator[bytes]:
    """Yields the lines of a text file, each of bounded length."""
    for number, line in enumerate(iter(lambda: file.readline((MAX_LINE_MB << 20) + 1), b""), start=1):
        if len(line) > MAX_LINE_MB << 20:
            raise DataError(
                f"{path}: line {number} is longer than {MAX_LINE_MB} MB; each line is one JSON object; if the file is "
                "one list, end its name with .json"
            )
        budget.spend(len(line) + MIN_CELL_BYTES)
        yield line
