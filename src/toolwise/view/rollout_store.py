"""The stored rollouts of a run, finished or not: their index in memory, everything else read when asked for."""

from __future__ import annotations

import io
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from toolwise.errors import CheckpointError, ToolwiseError
from toolwise.serialization.gzip_blocks import DAMAGES, open_text
from toolwise.serialization.json_text import load_json, valid_text
from toolwise.training.diagnosis.examination import run_state
from toolwise.training.records import RolloutRecord
from toolwise.training.rollout_index import index_table, load_index, token_path
from toolwise.training.rollout_paths import NAME as FILE_NAME
from toolwise.training.rollout_paths import existing_path, rollout_file, rollout_files
from toolwise.training.run_folder import RunFolder, open_run
from toolwise.training.token_records import StepTokens, read_old_tokens, read_tokens, row_group_starts
from toolwise.training.vocabulary_file import NAME as VOCABULARY
from toolwise.training.vocabulary_file import read_vocabulary

WORDS = ("kind", "route", "stop_reason", "answered_by")
"""Columns that repeat a few words."""
log = logging.getLogger("toolwise.view")


class NotFoundError(ToolwiseError):
    """The page asks for a run, a file or a rollout that does not exist, or no longer does."""


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    stamp: tuple[int, int]
    """Size and time of the last change."""
    table: Any


class RunStore:
    """One run. `refresh` looks for new files; everything else works on what it found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self.folder: RunFolder = open_run(path)
        self._rollouts = path / "rollouts" if (path / "rollouts").is_dir() else path
        self._files: dict[str, _File] = {}
        self._stamp: tuple[Any, ...] = ()
        self.table: Any = None
        """The index of all files, with `phase`, `step` and `file` of each rollout, in this order."""
        self.refresh()

    @property
    def signature(self) -> str:
        """Changes whenever a file that the pages show does."""
        return f"{hash(self._stamp) & (1 << 52) - 1:x}"

    def state(self) -> str:
        """Whether a process still trains the run, or how it ended; "damaged" if its summary cannot be read, "deleted"
        if its folder is gone, "" if nothing was trained, such as by `toolwise rollout`."""
        if not self.path.is_dir():
            return "deleted"
        try:
            state = run_state(self.folder)
        except CheckpointError:
            return "damaged"
        return "" if state == "crashed" and not (self.path / "metrics.jsonl").exists() else state

    def refresh(self) -> bool:
        """Read what has changed; returns whether anything has."""
        if not self._rollouts.exists() or self._rollouts == self.path:
            self._rollouts = self.path / "rollouts" if (self.path / "rollouts").is_dir() else self.path
        names = [name for name in rollout_files(self._rollouts, "*") if _is_rollouts(name)]
        found = {name: path for name in names if (path := rollout_file(self._rollouts, name)) is not None}
        stamps = {name: _stamp(path) for name, path in found.items()}
        others = ("metrics.jsonl", "summary.json", "diagnosis.json", "frontier.json", "config.toml")
        stamp = (*sorted(stamps.items()), *(_stamp(self.path / name) for name in others))
        if stamp == self._stamp and self.table is not None:
            return False
        changed = [name for name in found if name not in self._files or self._files[name].stamp != stamps[name]]
        for name in changed:
            self._files[name] = _File(
                found[name], stamps[name], _with_file(load_index(existing_path(found[name])), name)
            )
        removed = self._files.keys() - found.keys()
        for name in removed:
            del self._files[name]
        if changed or removed or self.table is None:
            self._join()
        self._stamp, self.folder = stamp, RunFolder(self.path)  # which may be gone
        self.__dict__.pop("vocabulary", None)
        return True

    def _join(self) -> None:
        """One table for all files; those of single files then share its memory."""
        names = sorted(self._files, key=_order)
        self.table = _concatenate([self._files[name].table for name in names])
        start = 0
        for name in names:
            count = self._files[name].table.num_rows
            self._files[name] = replace(self._files[name], table=self.table.slice(start, count))
            start += count

    def files(self) -> list[dict[str, Any]]:
        """Names of the files in order, with phase, step and number of rollouts."""
        names = sorted(self._files, key=_order)
        return [
            {"file": name, "phase": _phase(name), "step": _step(name), "rollouts": self._files[name].table.num_rows}
            for name in names
        ]

    def path_of(self, file: str) -> Path:
        if file not in self._files:
            raise NotFoundError(f"{self.name} has no file of rollouts {file!r:.80}")
        return existing_path(self._files[file].path)

    def row(self, file: str, rollout_id: str) -> dict[str, Any]:
        """The index's row of a rollout."""
        import pyarrow.compute as pc

        self.path_of(file)
        table = self._files[file].table
        rows = table.filter(pc.equal(table["rollout_id"], rollout_id)).slice(0, 1).to_pylist()
        if not rows:
            raise NotFoundError(f"{file} of {self.name} has no rollout {rollout_id!r:.120}")
        row: dict[str, Any] = rows[0]
        return row

    def group(self, file: str, group_id: str) -> list[dict[str, Any]]:
        """The index's rows of a group."""
        import pyarrow.compute as pc

        self.path_of(file)
        table = self._files[file].table
        rows: list[dict[str, Any]] = table.filter(pc.equal(table["group_id"], group_id)).to_pylist()
        return rows

    def of_file(self, file: str) -> Any:
        self.path_of(file)
        return self._files[file].table

    def record(self, row: dict[str, Any]) -> RolloutRecord:
        """Read one line."""
        return next(self.records([row]))

    def records(self, rows: Iterable[dict[str, Any]]) -> Iterator[RolloutRecord]:
        """Read the line of each row. Rows of one file that follow each other open it once, and in the order of the file
        each of its blocks is decompressed once."""
        for name, members in groupby(rows, key=itemgetter("file")):
            try:
                with open_text(self.path_of(name)) as file:
                    for row in members:
                        yield self._read_line(file, row)
            except DAMAGES as fault:
                raise NotFoundError(f"{name} of {self.name} is damaged: {fault}") from fault

    def _read_line(self, file: io.BufferedIOBase, row: dict[str, Any]) -> RolloutRecord:
        file.seek(row["offset"])
        parsed = load_json(file.read(row["length"]))
        record = RolloutRecord.from_json(parsed) if isinstance(parsed, dict) else None
        if record is None or valid_text(record.rollout_id) != row["rollout_id"]:  # a resumed run repeats its steps
            raise NotFoundError(f"{row['file']} of {self.name} has changed: load the page again")
        return record

    def tokens(self, row: dict[str, Any]) -> list[StepTokens]:
        """The tokens of one rollout; empty if they are not stored, or cannot be read."""
        try:
            return self._read_tokens(row)
        except Exception as fault:  # a damaged or a half-replaced file: the conversation is there without it
            log.warning("the tokens of %s in %s cannot be read: %s", row["rollout_id"], self.name, fault)
            return []

    def _read_tokens(self, row: dict[str, Any]) -> list[StepTokens]:
        path = self.path_of(row["file"])
        tokens = token_path(path)
        if row["token_row"] >= 0 and tokens.is_file():
            stamp = _stamp(tokens)
            starts = _row_group_starts(tokens, stamp)
            group = bisect_right(starts, row["token_row"]) - 1
            rows = _row_group(tokens, stamp, starts[group], starts[group + 1])
            return [step for step in rows if step.rollout_id == row["rollout_id"]]
        old = path.with_name(f"{row['file']}.safetensors")
        return read_old_tokens(old, row["rollout_id"]) if old.exists() else []

    @cached_property
    def vocabulary(self) -> dict[int, bytes]:
        return read_vocabulary(self._rollouts / VOCABULARY)


@lru_cache(maxsize=64)
def _row_group_starts(path: Path, stamp: tuple[int, int]) -> list[int]:
    return row_group_starts(path)


@lru_cache(maxsize=4)
def _row_group(path: Path, stamp: tuple[int, int], start: int, end: int) -> list[StepTokens]:
    """The rows of one row group: rollouts of a group, which are shown together, are usually in the same."""
    return read_tokens(path, start, end - start, prompts=False)


def _is_rollouts(name: str) -> bool:
    return FILE_NAME.fullmatch(name) is not None or name == "rollouts"


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return -1, 0
    return found.st_size, found.st_mtime_ns


def _phase(name: str) -> str:
    match = FILE_NAME.fullmatch(name)
    return "other" if match is None else {"step": "train", "eval": "eval"}[match[1]]


def _step(name: str) -> int:
    match = FILE_NAME.fullmatch(name)
    return 0 if match is None else int(match[2])


def _order(name: str) -> tuple[int, str]:
    return _step(name), name


def _with_file(table: Any, name: str) -> Any:
    import pyarrow as pa

    for word in WORDS:
        table = table.set_column(table.schema.get_field_index(word), word, table[word].cast(pa.string()))
    count = table.num_rows
    for column, value, kind in (
        ("phase", _phase(name), pa.string()),
        ("step", _step(name), pa.int32()),
        ("file", name, pa.string()),
    ):
        table = table.append_column(column, pa.repeat(pa.scalar(value, kind), count))
    return table


def _concatenate(tables: list[Any]) -> Any:
    import pyarrow as pa

    return pa.concat_tables(tables).combine_chunks() if tables else _with_file(index_table([]), "rollouts")
