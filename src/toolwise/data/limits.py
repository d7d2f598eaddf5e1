"""Bounded reading of data files: regular files only, never more than a budget, whatever the file's metadata claims."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from toolwise.errors import ConfigError, DataError

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


class ReadBudget:
    """The number of bytes that may still be read from one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = self._left = max_data_bytes()

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
    try:
        _check_kind(path, os.fstat(descriptor))
    except DataError:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise _unreadable(path, error) from error


def _check_kind(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path}: is a folder; give one of the files in it")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is a pipe or a device; write its content to a file and give that")
    if status.st_size == 0:
        raise DataError(f"{path}: the file is empty; give a file with at least one row")


def _unreadable(path: Path, error: OSError | ValueError) -> DataError:
    reason = " ".join(str(getattr(error, "strerror", None) or error).split())
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
    number = 0
    while line := file.readline((MAX_LINE_MB << 20) + 1):
        number += 1
        if len(line) > MAX_LINE_MB << 20:
            hint = "each line is one JSON object; if the file is one list, end its name with .json"
            raise DataError(f"{path}: line {number} is longer than {MAX_LINE_MB} MB; {hint}")
        budget.spend(len(line) + MIN_CELL_BYTES)
        yield line
