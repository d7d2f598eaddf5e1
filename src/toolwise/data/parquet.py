"""Parquet files as plain rows: read a few rows at a time within a budget, as values that JSON has words for."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

from toolwise.data.limits import MIN_CELL_BYTES, ReadBudget
from toolwise.errors import DataError

_MAX_BATCH_ROWS = 1024
_MIN_BATCH_ROWS = 16
_MAX_BATCH_BYTES = 128 << 20
"""What one read may unpack to, if every row were as large as all of its row group together."""
_MAX_COMPRESSION_RATIO = 50
"""Text packs to a fifth; what packs to a fiftieth was made to."""


def read_parquet(path: Path, file: BinaryIO, budget: ReadBudget, limit: int | None) -> Iterator[dict[str, Any]]:
    """The rows of an open file. Whatever is wrong with it is a `DataError`."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as found:
            _check_size(path, found, budget, limit)
            for group in range(found.num_row_groups):
                few = min(limit or _MAX_BATCH_ROWS, _batch_rows(found.metadata.row_group(group)))
                for packed in found.iter_batches(batch_size=few, row_groups=[group]):
                    batch = _decode_batch(packed)
                    budget.spend(batch.nbytes + batch.num_rows * (batch.num_columns + 1) * MIN_CELL_BYTES)
                    yield from _rows(path, batch)
    except DataError:
        raise
    except Exception as error:  # whatever a file can make the reader raise, it is the file's fault
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(f"{path}: not a Parquet file that can be read ({reason}); write the file again") from error


def _check_size(path: Path, found: Any, budget: ReadBudget, limit: int | None) -> None:
    """By what the file says of itself, before anything is unpacked; the budget holds where it lies."""
    names = found.schema_arrow.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: has two columns {twice[0]!r:.80}; give each its own name")
    groups = [found.metadata.row_group(place) for place in range(found.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    least = (rows if limit is None else min(rows, limit)) * (len(names) + 1) * MIN_CELL_BYTES
    if least > budget.bytes or any(group.total_byte_size > budget.bytes for group in groups[: limit or None]):
        budget.raise_exceeded()


def _batch_rows(group: Any) -> int:
    """So few that a row group that unpacks to much more than it says cannot fill the memory with one read."""
    unpacked: int = max(1, group.total_byte_size)
    few = min(_MAX_BATCH_ROWS, _MAX_BATCH_BYTES // unpacked)
    if few >= _MIN_BATCH_ROWS:
        return few
    packed = sum(group.column(place).total_compressed_size for place in range(group.num_columns))
    return max(1, few) if unpacked > _MAX_COMPRESSION_RATIO * max(1, packed) else _MIN_BATCH_ROWS


def _decode_batch(batch: Any) -> Any:
    """Without dictionaries and other types that hold a value once for many rows: their size is that of the rows; and
    without nanoseconds, which Python's times do not have."""
    import pyarrow as pa

    columns = []
    for column in batch.columns:
        plain = _plain_type(column.type)
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        columns.append(column if column.type == plain else column.cast(plain, safe=False))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain_type(kind: Any) -> Any:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_time64(kind):
        return pa.time64("us")
    if pa.types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind


def _rows(path: Path, batch: Any) -> Iterator[dict[str, Any]]:
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except Exception as error:
        name, reason = _failing_column(batch), " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"{path}: column {name!r:.80} cannot be read ({reason}); write it as text or numbers"
        ) from error
    for row in rows:
        yield {name: _to_json_value(path, name, value) for name, value in row.items() if value is not None}


def _failing_column(batch: Any) -> str:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.to_pylist(maps_as_pydicts="strict")
        except Exception:
            return str(name)
    return "?"


def _to_json_value(path: Path, column: str, value: Any) -> Any:
    """Without nulls under keys: a struct column has one set of keys for all rows, so Parquet fills in nulls no one
    wrote. Times become ISO text, durations seconds."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_to_json_value(path, column, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(path, column, item) for key, item in value.items() if item is not None}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return _decimal_to_json(path, column, value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise _unsupported_value(path, column, "bytes that are not UTF-8 text") from None
    if isinstance(value, UUID):
        return str(value)
    raise _unsupported_value(path, column, f"a {type(value).__name__}")


def _decimal_to_json(path: Path, column: str, value: Decimal) -> int | float | str:
    """As text where a float would lose digits."""
    if not value.is_finite() or not math.isfinite(float(value)):
        raise _unsupported_value(path, column, f"the decimal {value}")
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


def _unsupported_value(path: Path, column: str, what: str) -> DataError:
    return DataError(f"{path}: column {column!r:.80} holds {what}; write it as text or numbers")
