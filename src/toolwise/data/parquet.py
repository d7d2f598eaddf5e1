"""Reads Parquet files as plain rows: a few rows at a time within a budget, converted to JSON values."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID

from toolwise.data.files import MIN_CELL_BYTES, ReadBudget, one_line
from toolwise.errors import DataError

_MAX_BATCH_ROWS = 1024
_MIN_BATCH_ROWS = 16
_MAX_BATCH_BYTES = 128 << 20
"""Limit on what one read unpacks, assuming that each row is as large as its whole row group."""
_PLAIN_TYPES = frozenset({str, bool, int, float, type(None)})
_MAX_COMPRESSION_RATIO = 50
"""Text compresses about 5 to 1; 50 to 1 suggests a decompression bomb."""


def read_parquet(path: Path, file: BinaryIO, budget: ReadBudget, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yields the rows of an open file; any problem with it raises `DataError`."""
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            _check_size(path, parquet, budget, limit)
            for group in range(parquet.num_row_groups):
                batch_size = min(limit or _MAX_BATCH_ROWS, _batch_rows(parquet.metadata.row_group(group)))
                for encoded in parquet.iter_batches(batch_size=batch_size, row_groups=[group]):
                    batch = _decode_batch(encoded)
                    budget.spend(batch.nbytes + batch.num_rows * (batch.num_columns + 1) * MIN_CELL_BYTES)
                    yield from _rows(path, batch)
    except DataError:
        raise
    except Exception as error:  # a bad file can make the reader raise anything
        raise DataError(f"{path}: not a Parquet file, or damaged ({one_line(error)}); write the file again") from error


def _check_size(path: Path, parquet: Any, budget: ReadBudget, limit: int | None) -> None:
    """Checks the file's metadata before anything is unpacked; the budget still applies if the metadata is wrong."""
    names = parquet.schema_arrow.names
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise DataError(f"{path}: has two columns named {duplicates[0]!r:.80}; give each a different name")
    groups = [parquet.metadata.row_group(index) for index in range(parquet.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    min_bytes = (rows if limit is None else min(rows, limit)) * (len(names) + 1) * MIN_CELL_BYTES
    if min_bytes > budget.bytes or any(group.total_byte_size > budget.bytes for group in groups[: limit or None]):
        budget.raise_exceeded()


def _batch_rows(group: Any) -> int:
    """Rows per read, few enough that a row group larger than it claims cannot exhaust memory in one read."""
    unpacked: int = max(1, group.total_byte_size)
    count = min(_MAX_BATCH_ROWS, _MAX_BATCH_BYTES // unpacked)
    if count >= _MIN_BATCH_ROWS:
        return count
    packed = sum(group.column(index).total_compressed_size for index in range(group.num_columns))
    return max(1, count) if unpacked > _MAX_COMPRESSION_RATIO * max(1, packed) else _MIN_BATCH_ROWS


def _decode_batch(batch: Any) -> Any:
    """Expands dictionary and other encodings that store a value once for many rows, so that sizes are those of the
    rows.

    Also converts nanoseconds to microseconds, since Python's times have no nanoseconds.
    """
    import pyarrow as pa

    columns = []
    for column in batch.columns:
        target_type = _plain_type(column.type)
        if isinstance(column, pa.ExtensionArray):
            column = column.storage
        columns.append(column if column.type == target_type else column.cast(target_type, safe=False))
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain_type(arrow_type: Any) -> Any:
    import pyarrow as pa

    if isinstance(arrow_type, pa.BaseExtensionType):
        return _plain_type(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type) or pa.types.is_run_end_encoded(arrow_type):
        return _plain_type(arrow_type.value_type)
    if pa.types.is_timestamp(arrow_type) and arrow_type.unit == "ns":
        return pa.timestamp("us", arrow_type.tz)
    if pa.types.is_time64(arrow_type):
        return pa.time64("us")
    if pa.types.is_duration(arrow_type) and arrow_type.unit == "ns":
        return pa.duration("us")
    if pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type):
        make_list = pa.list_ if pa.types.is_list(arrow_type) else pa.large_list
        return make_list(arrow_type.value_field.with_type(_plain_type(arrow_type.value_type)))
    if pa.types.is_struct(arrow_type):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in arrow_type])
    return arrow_type


def _rows(path: Path, batch: Any) -> Iterator[dict[str, Any]]:
    names, columns = batch.schema.names, []
    for name, column in zip(names, batch.columns, strict=True):
        try:
            columns.append(column.to_pylist(maps_as_pydicts="strict"))
        except Exception as error:
            raise _unsupported_value(path, name, f"values that cannot be read ({one_line(error)})") from error
    for values in zip(*columns, strict=True):
        yield {
            name: _to_json_value(path, name, value)
            for name, value in zip(names, values, strict=True)
            if value is not None
        }


def _to_json_value(path: Path, column: str, value: Any) -> Any:
    """Converts a value to JSON. Times become ISO text, durations seconds.

    Nulls under keys are dropped: a struct column has the same keys in all rows, so Parquet fills in nulls.
    """
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, list | tuple):
        return [_to_json_value(path, column, item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(path, column, item) for key, item in value.items() if item is not None}
    for kind, convert, problem in _CONVERTERS:
        if isinstance(value, kind):
            try:
                return convert(value)
            except ValueError:
                raise _unsupported_value(path, column, problem.format(value)) from None
    raise _unsupported_value(path, column, f"a {type(value).__name__}")


def _decimal_to_json(value: Decimal) -> int | float | str:
    """An int or float, or text if a float would lose digits."""
    if not math.isfinite(float(value)):
        raise ValueError
    if value == value.to_integral_value():
        return int(value)
    return float(value) if Decimal(repr(float(value))) == value else str(value)


_CONVERTERS: tuple[tuple[Any, Callable[[Any], Any], str], ...] = (
    (datetime.date | datetime.time, methodcaller("isoformat"), ""),
    (datetime.timedelta, datetime.timedelta.total_seconds, ""),
    (Decimal, _decimal_to_json, "the decimal {}"),
    (UUID, str, ""),
    (bytes, bytes.decode, "bytes that are not UTF-8 text"),
)
"""Type, conversion, and what a value is that cannot be converted (a ValueError)."""


def _unsupported_value(path: Path, column: str, what: str) -> DataError:
    return DataError(f"{path}: column {column!r:.80} holds {what}; write it as text or numbers")
