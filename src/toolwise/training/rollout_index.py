"""An index of stored rollouts: for each file, a small Parquet file with one row per rollout and where to read the rest.

A run writes the index of a file together with it. For files without one, such as of runs of earlier versions, or that
have changed since, it is built from the lines.
"""

from __future__ import annotations

import contextlib
import io
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise.serialization.files import write_atomic
from toolwise.serialization.gzip_blocks import DAMAGES, open_text
from toolwise.serialization.json_text import load_json, valid_text
from toolwise.training.records import RolloutRecord
from toolwise.training.rollout_paths import stem
from toolwise.training.token_records import SUFFIX as TOKENS
from toolwise.training.trackers.conversation import clean_text, conversation_turns, shorten

SUFFIX = ".index.parquet"
VERSION = "2"
"""Of the columns; an index with another version is built again."""
QUESTION_CHARS = 120
MAX_LINE_BYTES = 1 << 28
"""Longer lines are left out."""
MAX_INT32 = 2**31 - 1

log = logging.getLogger("toolwise.training")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a stored rollout is."""

    offset: int
    """Of its line in the JSONL file, in bytes; in a compressed one, of its text."""
    length: int
    token_row: int = -1
    """Its first row in the token file; −1 if its tokens are not stored."""


def index_path(rollouts: Path) -> Path:
    return rollouts.with_name(stem(rollouts) + SUFFIX)


def token_path(rollouts: Path) -> Path:
    return rollouts.with_name(stem(rollouts) + TOKENS)


def index_row(record: RolloutRecord, location: Location) -> dict[str, Any]:
    """What can be filtered and sorted by."""
    advantages = [step.advantage for step in record.steps if step.advantage is not None]
    row = {
        "rollout_id": record.rollout_id,
        "group_id": record.group_id,
        "task_id": record.task_id,
        "kind": None if record.kind is None else shorten(clean_text(record.kind), 80),
        "route": record.route,
        "question": question_of(record),
        "score": record.score,
        "correct": record.correct,
        "cost": record.cost,
        "advantage": sum(advantages) / len(advantages) if advantages else None,
        "steps": len(record.steps),
        "tokens": _clamp(sum(max(0, step.tokens) for step in record.steps)),
        "calls": _count(record.calls),
        "failed_calls": _count(record.failed_calls),
        "tools": sorted(valid_text(str(name)) for name in record.calls),
        "stop_reason": record.stop_reason,
        "fault": record.fault is not None or record.error is not None or record.infrastructure_fault,
        "trained_on": record.trained_on,
        "answered_by": record.answered_by or None,
        "thinking": bool(record.thinking),
        "offset": location.offset,
        "length": location.length,
        "token_row": location.token_row,
    }
    return {name: valid_text(value) if isinstance(value, str) else value for name, value in row.items()}


def try_index_row(record: RolloutRecord, location: Location) -> dict[str, Any] | None:
    """The row; None if a value of the record cannot be shown, such as a foreign object."""
    try:
        return index_row(record, location)
    except Exception:  # str() of a value may raise anything
        return None


def question_of(record: RolloutRecord) -> str:
    """The first question in one line, or the name of the task."""
    for message in record.messages:
        if message.get("role") == "user":
            content = message.get("content")
            short = {**message, "content": content[: 8 * QUESTION_CHARS] if isinstance(content, str) else content}
            (turn,) = conversation_turns([short])
            return shorten(turn.text, QUESTION_CHARS)
    return clean_text(record.task_id)


def _count(counts: Mapping[str, Any]) -> int:
    return _clamp(sum(n for n in counts.values() if isinstance(n, int)))


def _clamp(number: int) -> int:
    return max(-MAX_INT32, min(number, MAX_INT32))


def schema() -> Any:
    import pyarrow as pa

    word, number = pa.dictionary(pa.int32(), pa.string()), pa.int32()
    return pa.schema(
        {
            "rollout_id": pa.string(),
            "group_id": pa.string(),
            "task_id": pa.string(),
            "kind": word,
            "route": word,
            "question": pa.string(),
            "score": pa.float64(),
            "correct": pa.bool_(),
            "cost": pa.float64(),
            "advantage": pa.float64(),
            "steps": number,
            "tokens": number,
            "calls": number,
            "failed_calls": number,
            "tools": pa.list_(pa.string()),
            "stop_reason": word,
            "fault": pa.bool_(),
            "trained_on": pa.bool_(),
            "answered_by": word,
            "thinking": pa.bool_(),
            "offset": pa.int64(),
            "length": pa.int64(),
            "token_row": pa.int32(),
        }
    )


def index_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a table. Rows with values that do not fit the columns are left out."""
    import pyarrow as pa

    columns = schema()
    try:
        return pa.Table.from_pylist(list(rows), schema=columns)
    except (ValueError, TypeError, OverflowError):  # also those of Arrow
        if len(rows) < 2:
            return columns.empty_table()
        half = len(rows) // 2
        parts = [index_table(rows[:half]), index_table(rows[half:])]
        return pa.concat_tables(parts).unify_dictionaries().combine_chunks()


def write_index(rollouts: Path, rows: Sequence[Mapping[str, Any] | None]) -> None:
    """Write the index of the file `rollouts`, as it is now; None is a line that cannot be indexed."""
    save_index(rollouts, _counted_table(rollouts, rows))


def _counted_table(rollouts: Path, rows: Sequence[Mapping[str, Any] | None]) -> Any:
    table = index_table([row for row in rows if row is not None])
    omitted = len(rows) - table.num_rows
    if omitted:
        log.warning("%s: lines that are no rollouts, or damaged, and are not shown: %s", rollouts, f"{omitted:,}")
    return table


def _state(rollouts: Path) -> dict[bytes, bytes]:
    """What an index stores to know the file it belongs to."""
    found = rollouts.stat()
    return {
        b"version": VERSION.encode(),
        b"bytes": b"%d" % found.st_size,
        b"mtime_ns": b"%d" % found.st_mtime_ns,
        b"crc32": b"%d" % _checksum(rollouts),
    }


def _checksum(path: Path) -> int:
    """Of the whole file: half a millisecond per megabyte."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _belongs(stored: Mapping[bytes, bytes], rollouts: Path) -> bool:
    """Whether an index that stores this is of the file as it is now. A copy has another time: its content decides."""
    found = rollouts.stat()
    if stored.get(b"version") != VERSION.encode() or stored.get(b"bytes") != b"%d" % found.st_size:
        return False
    return stored.get(b"mtime_ns") == b"%d" % found.st_mtime_ns or stored.get(b"crc32") == b"%d" % _checksum(rollouts)


def save_index(rollouts: Path, table: Any, state: Mapping[bytes, bytes] | None = None) -> None:
    """`state`: of the file that was read; that of the file as it is now, if not given."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    state = _state(rollouts) if state is None else state
    buffer = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata(dict(state)), buffer, compression="zstd")
    write_atomic(index_path(rollouts), buffer.getvalue().to_pybytes())


def read_index(rollouts: Path) -> Any | None:
    """The index that belongs to the file as it is now; None if there is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not index_path(rollouts).is_file():  # missing, or a pipe, which would block
        return None
    try:
        table = pq.ParquetFile(index_path(rollouts)).read()
        stored = table.schema.metadata or {}
    except (OSError, pa.ArrowException):
        return None
    return table.cast(schema()) if _belongs(stored, rollouts) else None


def build_index(rollouts: Path) -> Any:
    """The index of a file, from its lines. Lines that are not JSON objects, or cannot be indexed, are left out."""
    first_rows = _first_token_rows(token_path(rollouts))
    rows: list[dict[str, Any] | None] = []
    try:
        with open_text(rollouts) as file:
            for offset, line in _whole_lines(file):
                rows.append(_row_of_line(line, offset, first_rows))
    except DAMAGES as fault:  # those before are shown
        log.warning("%s: cannot be decompressed to its end: %s", rollouts, fault)
    return _counted_table(rollouts, rows)


def _whole_lines(file: io.BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """Offset and text of each line that has an end; the text of a line that is too long is empty."""
    offset = 0
    while line := file.readline(MAX_LINE_BYTES):
        start, whole, end = offset, line, line[-1:]
        offset += len(line)
        while end != b"\n" and (line := file.readline(MAX_LINE_BYTES)):
            whole, end = b"", line[-1:]
            offset += len(line)
        if end == b"\n":
            yield start, whole


def _row_of_line(line: bytes, offset: int, first_rows: Mapping[str, int]) -> dict[str, Any] | None:
    parsed = load_json(line)
    if not isinstance(parsed, dict):
        return None
    try:
        record = RolloutRecord.from_json(parsed)
    except Exception:  # a damaged line may hold anything, and must not hide the others
        return None
    return try_index_row(record, Location(offset, len(line), first_rows.get(valid_text(record.rollout_id), -1)))


def _first_token_rows(path: Path) -> dict[str, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return {}
    try:
        names = pq.read_table(path, columns=["rollout_id"])["rollout_id"].to_pylist()
    except (OSError, pa.ArrowException):
        return {}
    first: dict[str, int] = {}
    for row, name in enumerate(names):
        first.setdefault(name, row)
    return first


def load_index(rollouts: Path) -> Any:
    """The index of a file, built if it has none, and stored for the next time where that is allowed."""
    table = read_index(rollouts)
    if table is None:
        state = _state(rollouts)  # before it is read: it may grow
        table = build_index(rollouts)
        with contextlib.suppress(OSError):  # a folder that can only be read
            save_index(rollouts, table, state)
    return table
