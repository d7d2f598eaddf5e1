"""What a manifest records of a file."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from toolwise.errors import CheckpointError
from toolwise.serialization.files import file_digest


class FileEntry(BaseModel):
    size: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> FileEntry:
        return cls(size=file.stat().st_size, sha256=file_sha256(file))


def file_sha256(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): use an earlier checkpoint") from error
