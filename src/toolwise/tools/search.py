"""Full-text search (SQLite FTS5, bm25) over a task's own documents, or over a corpus that all tasks share."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from toolwise.errors import ConfigError, DataError, ToolwiseError
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema

NO_RESULTS = "No results."
MAX_TERMS = 128
"""Terms of one query that count; a model may paste a whole page."""

_FOLDER_SUFFIXES = (".txt", ".md")
# What FTS5's unicode61 takes for a word; all else, operators and quotes included, only separates words.
_TERM = re.compile(r"[^\W_]+")


class Document(NamedTuple):
    title: str
    text: str


class DocumentIndex:
    """An in-memory index of documents, built when it is first searched."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self._connection: sqlite3.Connection | None = None

    def search(self, query: str, k: int) -> list[Document]:
        """The best `k` documents that hold any of the query's terms; equals in the order of the documents."""
        terms = list(dict.fromkeys(term.casefold() for term in _TERM.findall(query)))[:MAX_TERMS]
        if not terms or not self.documents:
            return []
        self._connection = self._connection or self._build()
        rows = self._connection.execute(
            "SELECT rowid FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{term}"' for term in terms), k),
        )
        return [self.documents[row] for (row,) in rows]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _build(self) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            # content='': the texts stay in Python, where they are already; SQLite holds the index alone.
            connection.execute(
                "CREATE VIRTUAL TABLE documents USING fts5(title, text, content='', tokenize='porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            connection.close()
            raise ToolwiseError(f"search needs an SQLite with FTS5: {error}") from error
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO documents(rowid, title, text) VALUES (?, ?, ?)",
            ((row, _encodable(d.title), _encodable(d.text)) for row, d in enumerate(self.documents)),
        )
        connection.execute("COMMIT")
        return connection


@dataclass(slots=True)
class _Instance:
    index: DocumentIndex
    k: int


class SearchTool(BaseTool):
    """Searches what the task brings (`create_kwargs`: documents, k), or else the corpus of its configuration.

    Configuration: `documents` (strings, or objects with title and text), `folder` (of .txt and .md files, one
    document each), `k` (documents a search gives back, 1).
    """

    family = "SEARCH"
    config_keys: ClassVar[frozenset[str]] = frozenset({"documents", "folder", "k"})

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or _SCHEMA)
        self._k = _checked_k(self.config.get("k", 1), "tool search")
        documents = _read_documents(self.config.get("documents"), "tool search")
        if self.config.get("folder") is not None:
            documents += _read_folder(Path(self.config["folder"]))
        self._shared = DocumentIndex(documents)
        self._instances: dict[str, _Instance] = {}

    async def create(
        self, instance_id: str | None = None, documents: Any = None, k: int | None = None, **kwargs: Any
    ) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        own = _read_documents(documents, "search create_kwargs")
        self._instances[instance_id] = _Instance(
            index=DocumentIndex(own) if own else self._shared,
            k=self._k if k is None else _checked_k(k, "search create_kwargs"),
        )
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        query = parameters.get("query")
        if not isinstance(query, str):
            return "error: query must be a string", None, {"ok": False}
        instance = self._instances[instance_id]
        found = instance.index.search(query, instance.k)
        text = "\n".join(document.text for document in found) or NO_RESULTS
        return text, None, {"ok": True, "hits": len(found)}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is not None and instance.index is not self._shared:
            instance.index.close()


def _read_documents(value: Any, where: str) -> list[Document]:
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise DataError(f"{where}: documents must be a list, got {type(value).__name__}")
    return [_read_document(item, f"{where}: documents[{i}]") for i, item in enumerate(value)]


def _read_document(item: Any, where: str) -> Document:
    if isinstance(item, str):
        return Document("", item)
    if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
        raise DataError(f"{where} must be a string, or an object with a title and a text")
    title = item.get("title")
    if title is not None and not isinstance(title, str):
        raise DataError(f"{where}.title must be a string, got {type(title).__name__}")
    return Document(title or "", item["text"])


def _read_folder(folder: Path) -> list[Document]:
    if not folder.is_dir():
        raise ConfigError(f"tool search: folder {folder} is not there; name a folder of .txt or .md files")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _FOLDER_SUFFIXES)
    if not files:
        raise ConfigError(f"tool search: folder {folder} has no .txt or .md file")
    return [Document(path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in files]


def _checked_k(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: k must be a whole number from 1 up, got {value!r}")
    return value


def _encodable(text: str) -> str:
    """`text` as SQLite can take it: lone surrogates, which JSON may bring, have no UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


_SCHEMA = OpenAIFunctionToolSchema(
    function=FunctionSchema(
        name="search",
        description="Searches the documents at hand and gives back the text that fits the query best.",
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to look for."}},
            "required": ["query"],
        },
    )
)
