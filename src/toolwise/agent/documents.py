"""Documents that the user gives an agent's search tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.data.files import read_rows
from toolwise.errors import ConfigError, DataError


def with_documents(entries: Sequence[Any], documents: Sequence[Any]) -> list[Any]:
    """The `tools` entries, with these documents for the search tool."""
    if not any(_tool_name(entry) == "search" for entry in entries):
        raise ConfigError("documents need the search tool, which is not among the tools: add --tools search")
    return [
        {**(entry if isinstance(entry, Mapping) else {"name": entry}), "documents": list(documents)}
        if _tool_name(entry) == "search"
        else entry
        for entry in entries
    ]


def _tool_name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else entry


def read_documents(path: str | Path) -> list[Any]:
    """Documents to search: the lines of a text file, or rows with `text` (and optionally `title`)."""
    path = Path(path)
    if path.suffix.lower() in (".txt", ".md"):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"{path}: cannot be read ({fault}); give a text file, .jsonl, .json or .parquet") from fault
        documents: list[Any] = [line.strip() for line in lines if line.strip()]
    else:
        documents = [{key: row[key] for key in ("title", "text") if key in row} for row in read_rows(path)]
        if any("text" not in row for row in documents):
            raise DataError(f"{path}: a row has no `text`; write objects with `text` and optionally `title`")
    if not documents:
        raise DataError(f"{path}: contains no documents; write one per line")
    return documents
