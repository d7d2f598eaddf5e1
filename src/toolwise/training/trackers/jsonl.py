"""A run's metrics as JSON lines: one flat object per line, appended after each step, truncated on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolwise.errors import CheckpointError
from toolwise.protocols import Tracker
from toolwise.serialization.files import write_atomic
from toolwise.serialization.gzip_blocks import DAMAGES, read_text
from toolwise.serialization.json_text import json_line
from toolwise.untrusted.bounds import truncate_text

_MAX_BITS = 1000
"""Of an integer that still is a finite float."""


class JsonlTracker(Tracker):
    """Appends and flushes one line per call. Non-finite values become null, so that every line is valid JSON."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(self.path, math.inf)  # the next line would be appended to an incomplete one
        self._file = self.path.open("ab")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # float: JSON has no NumPy scalars
        plain = {name: v if v is None or isinstance(v, bool | int) else float(v) for name, v in metrics.items()}
        self._file.write(json_line({"step": int(step)} | plain | {"step": int(step)}))
        self._file.flush()

    def sync(self) -> None:
        """fsync the file."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | os.PathLike[str], *, missing_ok: bool = True) -> list[dict[str, Any]]:
    """All complete lines of a file, also of a compressed one, in order. A last line still being written is omitted; a
    missing file gives no lines, or a FileNotFoundError."""
    return [line for line, _ in _complete_lines(Path(path), missing_ok=missing_ok)]


def truncate_after(path: str | os.PathLike[str], step: float, *, validation: bool = True) -> int:
    """Atomically drop lines logged after `step` and an incomplete last line; return the number of dropped lines.
    Without `validation`, that of `step` itself is dropped too, since it will be repeated.

    Call it before a tracker opens the file: an open tracker would keep writing to the replaced file.
    """
    path = Path(path)
    before = path.read_bytes() if path.exists() else b""
    remaining = [raw for line, raw in _complete_lines(path) if _is_until(line, step, validation=validation)]
    dropped = sum(1 for raw in before.split(b"\n") if raw.strip()) - len(remaining)
    if dropped or before[-1:] not in (b"\n", b""):
        write_atomic(path, b"".join(raw + b"\n" for raw in remaining))
    return dropped


def _is_until(line: Mapping[str, Any], step: float, *, validation: bool) -> bool:
    at = line.get("step")
    if not isinstance(at, int | float):
        return True
    repeated = at == step and not validation and any(name.startswith("eval/") for name in line)
    return at <= step and not repeated


def _complete_lines(path: Path, *, missing_ok: bool = True) -> list[tuple[dict[str, Any], bytes]]:
    """Each line with its bytes. Only the last may be incomplete: a crash cannot break an earlier line."""
    try:
        raw_lines = enumerate(read_text(path).split(b"\n"), start=1)
    except FileNotFoundError:
        if not missing_ok:
            raise
        return []
    except DAMAGES as fault:
        raise CheckpointError(f"{path}: cannot be decompressed ({fault}); remove it and try again") from None
    numbered = [(number, raw) for number, raw in raw_lines if raw.strip()]
    lines = []
    for number, raw in numbered:
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            if (problem := _problem(parsed)) is not None:
                raise CheckpointError(f"{path}, line {number}: {problem}; remove that line and try again")
            lines.append((parsed, raw))
        elif number != numbered[-1][0]:
            raise CheckpointError(f"{path}, line {number}: not a JSON object; remove that line and try again")
    return lines


def _problem(line: Mapping[str, Any]) -> str | None:
    """What no tracker writes, and no reader of metrics can compute with; None if there is nothing such."""
    step = line.get("step", 0)
    is_huge = isinstance(step, int) and step.bit_length() > _MAX_BITS
    if isinstance(step, bool) or not isinstance(step, int | float) or is_huge or not math.isfinite(step):
        return f"step is {truncate_text(repr(step), 60)}, not a number"
    for name, value in line.items():
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            return f"{truncate_text(repr(name), 60)} is a number of more than {_MAX_BITS} bits"
    return None
