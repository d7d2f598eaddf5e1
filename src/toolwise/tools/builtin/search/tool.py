"""The `search` tool: searches a task's own documents, or a corpus that all tasks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolwise.tools.base import OpenAIFunctionToolSchema
from toolwise.tools.builtin import BuiltinTool, one_argument_schema
from toolwise.tools.builtin.search.corpora import Document, InlineCorpus, read_corpora, read_documents
from toolwise.tools.builtin.search.index import CorpusIndex, DocumentIndex, SearchResult, open_index
from toolwise.tools.function import checked_number, checked_seconds

NO_RESULTS = "No results."
THREADED_SEARCH_CHARS = 200_000
"""Larger document collections of a task are searched in a thread; below this, starting one takes longer."""
MAX_SNIPPET_WORDS = 64
"""The limit of FTS5."""


@dataclass(slots=True)
class _Instance:
    index: DocumentIndex | CorpusIndex
    k: int
    large: bool


class SearchTool(BuiltinTool):
    """Searches the task's documents (`create_kwargs`: documents, k), or else the corpus of its configuration.

    A corpus is `documents` (strings, or objects with title and text), `folder` (.txt and .md files, one document each,
    and .jsonl), `file` (.jsonl or .parquet, one document per row, in `text_field` and `title_field`), `wordnet` (true,
    or the folder of its data files), or several of these. A search returns `k` documents (1). `snippet_words` cuts each
    to the words around the match (40 for a corpus in files, at most 64) and adds the number of matches; 0 returns only
    full texts. `timeout_s` (10); `cache`: the folder of cached indexes.
    """

    family = "SEARCH"
    config_keys: ClassVar[frozenset[str]] = frozenset(
        {
            *("documents", "folder", "file", "text_field", "title_field", "wordnet"),
            *("k", "snippet_words", "timeout_s", "cache"),
        }
    )
    default_schema = one_argument_schema(
        "search",
        "Searches the documents at hand and gives back the text that fits the query best.",
        "query",
        "Words to look for.",
    )

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._k = _checked_k(self.config.get("k", 1), "tool search")
        self._timeout_s = checked_seconds(self.config.get("timeout_s", 10.0), "tool search: timeout_s")
        documents = read_documents(self.config.get("documents"), "tool search")
        corpora = read_corpora(self.config)
        self._snippet_words = checked_number(
            self.config.get("snippet_words", 40 if corpora else 0),
            "tool search: snippet_words",
            f"an integer from 0 to {MAX_SNIPPET_WORDS}",
            whole=True,
            low=0,
            high=MAX_SNIPPET_WORDS,
        )
        self._shared: DocumentIndex | CorpusIndex = DocumentIndex(documents)
        if corpora:
            cache = self.config.get("cache")
            all_corpora = [InlineCorpus(tuple(documents)), *corpora] if documents else corpora
            self._shared = open_index(all_corpora, Path(cache).expanduser() if cache else None)
        self._instances: dict[str, _Instance] = {}

    async def create(
        self, instance_id: str | None = None, documents: Any = None, k: int | None = None, **kwargs: Any
    ) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        task_documents = read_documents(documents, "search create_kwargs")
        index = DocumentIndex(task_documents) if task_documents else self._shared
        in_memory = index.documents if isinstance(index, DocumentIndex) else ()
        self._instances[instance_id] = _Instance(
            index=index,
            k=self._k if k is None else _checked_k(k, "search create_kwargs"),
            large=sum(len(document.text) for document in in_memory) > THREADED_SEARCH_CHARS,
        )
        return instance_id

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float | None, dict[str, Any]]:
        query = parameters.get("query")
        if not isinstance(query, str):
            return "error: query must be a string", None, {"ok": False}
        result = await self._search(self._instances[instance_id], query)
        text = format_results(result, self._snippet_words)
        return text, None, {"ok": True, "hits": len(result.documents), "total": result.total}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is not None and instance.index is not self._shared and isinstance(instance.index, DocumentIndex):
            instance.index.close()

    async def _search(self, instance: _Instance, query: str) -> SearchResult:
        index = instance.index
        if isinstance(index, CorpusIndex):
            return await index.search(query, instance.k, snippet_words=self._snippet_words, timeout_s=self._timeout_s)
        if instance.large:
            return await index.search_in_thread(query, instance.k, timeout_s=self._timeout_s)
        return index.search(query, instance.k)


def format_results(result: SearchResult, snippet_words: int) -> str:
    """Text for the model: full texts, or the number of matches and one line per document."""
    if not result.documents:
        return NO_RESULTS
    if not snippet_words:
        return "\n".join(document.text for document in result.documents)
    head = f"{len(result.documents)} of {result.total} result{'s' if result.total != 1 else ''}"
    lines = (f"{n}. {_line(document, snippet_words)}" for n, document in enumerate(result.documents, start=1))
    return "\n".join((head, *lines))


def _line(document: Document, snippet_words: int) -> str:
    words = document.text.split()
    text = " ".join(words[:snippet_words]) + ("…" if len(words) > snippet_words else "")
    return f"{document.title}: {text}" if document.title else text


def _checked_k(value: Any, where: str) -> int:
    return int(checked_number(value, f"{where}: k", "an integer ≥ 1", whole=True, low=1))
