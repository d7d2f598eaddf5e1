"""Cache of a labelling model's answers, one line per answer, so that an interrupted labelling resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from toolwise.errors import DataError
from toolwise.serialization.json_text import json_text


class AnswerCache:
    """Question -> answer, keyed by the question's digest. One process per file; truncated lines are skipped."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._answers: dict[str, Any] = {}
        self._file: IO[str] | None = None
        try:
            if self.path.exists():
                self._read()
        except OSError as fault:
            raise DataError(f"{self.path}: cannot be read ({fault.strerror}); give another --cache") from fault

    def _read(self) -> None:
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                self._answers[entry["key"]] = entry["answer"]
            except (ValueError, KeyError, TypeError, RecursionError):  # truncated when the process died
                continue

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, question: Mapping[str, Any]) -> Any | None:
        return self._answers.get(key_of(question))

    def put(self, question: Mapping[str, Any], answer: Any) -> None:
        key = key_of(question)
        self._answers[key] = answer
        line = json_text({"key": key, "answer": answer})
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
                if self._file.tell() and not _ends_in_newline(self.path):
                    self._file.write("\n")  # after a truncated line
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as fault:
            raise DataError(f"{self.path}: cannot be written ({fault.strerror}); give another --cache") from fault

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def key_of(question: Mapping[str, Any]) -> str:
    """The digest of the request body, including the model's name and the prompt."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def _ends_in_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
