"""The `search` tool: searches a task's own documents, or a corpus that all tasks share.

A corpus is inline documents, a folder, a file of rows, or WordNet.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from toolwise.data.files import read_rows, row_error
from toolwise.errors import ConfigError, DataError
from toolwise.tools.base import BuiltinTool, OpenAIFunctionToolSchema, ToolResult, one_argument_schema
from toolwise.tools.builtin.search.index import (
    Corpus,
    CorpusIndex,
    Document,
    DocumentIndex,
    SearchResult,
    open_index,
)
from toolwise.tools.function import checked, checked_seconds

NO_RESULTS = "No results."
MAX_SNIPPET_WORDS = 64
"""The limit of FTS5."""
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl")
WORDNET_FOLDER = Path("/usr/share/wordnet")
"""Where Debian's package wordnet-base installs it."""

_ADJECTIVE_MARKER = re.compile(r"\((?:a|p|ip)\)$")


class SearchTool(BuiltinTool):
    """Searches the task's documents (`create_kwargs`: documents, k), or else the corpus of its configuration.

    A corpus is `documents` (strings, or objects with title and text), `folder` (.txt and .md files, one document each,
    and .jsonl; no hidden files, and no links that lead out of it), `file` (.jsonl or .parquet, one document per row, in
    `text_field` and `title_field`), `wordnet` (true, or the folder of its data files), or several of these. A search
    returns `k` documents (1). `snippet_words` cuts each to the words around the match (40 for a corpus in files, at
    most 64) and adds the number of matches; 0 returns only full texts. `timeout_s` (10); `cache`: the folder of cached
    indexes.
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
        self._snippet_words = checked(
            self.config.get("snippet_words", 40 if corpora else 0),
            Annotated[int, Field(ge=0, le=MAX_SNIPPET_WORDS)],
            "tool search: snippet_words",
            f"an integer from 0 to {MAX_SNIPPET_WORDS}",
        )
        self._shared: DocumentIndex | CorpusIndex = DocumentIndex(documents)
        if corpora:
            cache = self.config.get("cache")
            all_corpora: list[Corpus] = [InlineCorpus(tuple(documents)), *corpora] if documents else [*corpora]
            self._shared = open_index(all_corpora, Path(cache).expanduser() if cache else None)
        self._instances: dict[str, tuple[DocumentIndex | CorpusIndex, int]] = {}  # the index to search, and k

    async def create(
        self, instance_id: str | None = None, documents: Any = None, k: int | None = None, **kwargs: Any
    ) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        task_documents = read_documents(documents, "search create_kwargs")
        task_k = self._k if k is None else _checked_k(k, "search create_kwargs")
        self._instances[instance_id] = (DocumentIndex(task_documents) if task_documents else self._shared, task_k)
        return instance_id

    async def run(self, instance_id: str, text: str) -> ToolResult:
        index, k = self._instances[instance_id]
        result = await index.search(text, k, snippet_words=self._snippet_words, timeout_s=self._timeout_s)
        found = format_results(result, self._snippet_words)
        return found, None, {"ok": True, "hits": len(result.documents), "total": result.total}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        index, _ = self._instances.pop(instance_id, (None, 0))
        if isinstance(index, DocumentIndex) and index is not self._shared:
            index.close()


def format_results(result: SearchResult, snippet_words: int) -> str:
    """Text for the model: full texts, or the number of matches and one line per document."""
    if not result.documents:
        return NO_RESULTS
    if not snippet_words:
        return "\n".join(document.text for document in result.documents)
    lines = [f"{len(result.documents)} of {result.total} result{'s' if result.total != 1 else ''}"]
    for n, document in enumerate(result.documents, start=1):
        words = document.text.split()
        title = f"{document.title}: " if document.title else ""
        lines.append(f"{n}. {title}{' '.join(words[:snippet_words])}{'…' if len(words) > snippet_words else ''}")
    return "\n".join(lines)


def _checked_k(value: Any, where: str) -> int:
    return int(checked(value, PositiveInt, f"{where}: k", "an integer ≥ 1"))


@dataclass(frozen=True, slots=True)
class InlineCorpus:
    """Documents written in a configuration."""

    inline_documents: tuple[Document, ...]

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.inline_documents).encode()).hexdigest()

    def documents(self) -> Iterator[Document]:
        return iter(self.inline_documents)


@dataclass(frozen=True, slots=True)
class FileCorpus:
    """Files: .txt and .md are one document each, .jsonl and .parquet have one per row (a text, maybe a title)."""

    files: tuple[Path, ...]
    text_field: str = "text"
    title_field: str = "title"

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([self.text_field, self.title_field]).encode())
        for path in self.files:
            digest.update(json.dumps([path.stem, path.suffix]).encode() + file_sha256(path))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            if path.suffix.lower() in (".jsonl", ".parquet"):
                yield from self._rows(path)
            else:
                yield Document(path.stem, path.read_text(encoding="utf-8", errors="replace"))

    def _rows(self, path: Path) -> Iterator[Document]:
        for number, row in enumerate(read_rows(path)):
            for option, name in (("text_field", self.text_field), ("title_field", self.title_field)):
                value = row.get(name)
                if not isinstance(value, str) and (value is not None or option == "text_field"):
                    problem = f"must be a string, got {type(value).__name__}; select another with {option}"
                    raise row_error(path, number, name, problem)
            yield Document(row.get(self.title_field) or "", row[self.text_field])


@dataclass(frozen=True, slots=True)
class WordNet:
    """WordNet's data files: one document per meaning, with its words as title and its gloss as text."""

    folder: Path = WORDNET_FOLDER

    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(file_sha256(path) for path in self.data_files().values())).hexdigest()

    def documents(self) -> Iterator[Document]:
        for part, path in self.data_files().items():
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.startswith("  "):  # the licence, at the top of each file
                        yield _read_synset(line, part, f"{path}: line {number}")

    def data_files(self) -> dict[str, Path]:
        files = {part: self.folder / f"data.{part}" for part in ("noun", "verb", "adj", "adv")}
        if missing := [path for path in files.values() if not path.is_file()]:
            raise ConfigError(
                f"tool search: WordNet is not installed ({missing[0]} is missing): apt-get install wordnet-base, or "
                "set wordnet to the folder of its data files"
            )
        return files


def _read_synset(line: str, part: str, where: str) -> Document:
    head, bar, gloss = line.partition(" | ")
    fields = head.split(" ")
    try:
        words = [_ADJECTIVE_MARKER.sub("", fields[4 + 2 * i]) for i in range(int(fields[3], 16))]
    except (IndexError, ValueError):
        words = []
    if not bar or not words:
        raise DataError(f"{where}: not a line of WordNet data; install wordnet-base again")
    return Document(f"{', '.join(words).replace('_', ' ')} ({part})", gloss.strip())


def read_corpora(config: Mapping[str, Any]) -> list[FileCorpus | WordNet]:
    """The corpora in files of a search tool's configuration."""
    fields = {key: config[key] for key in ("text_field", "title_field") if key in config}
    if not all(isinstance(name, str) and name for name in fields.values()):
        raise ConfigError("tool search: text_field and title_field must be names of fields")
    corpora: list[FileCorpus | WordNet] = []
    for key, find_files in (("folder", _files_in), ("file", _document_file)):
        if config.get(key) is not None:
            corpora.append(FileCorpus(find_files(_path(config, key)), **fields))
    if config.get("wordnet"):
        corpora.append(WordNet() if config["wordnet"] is True else WordNet(_path(config, "wordnet")))
    return corpora


def corpus_files(config: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files that a search tool with this configuration reads."""
    files: list[Path] = []
    for corpus in read_corpora(config):
        files += corpus.files if isinstance(corpus, FileCorpus) else corpus.data_files().values()
    return tuple(files)


def read_documents(value: Any, where: str) -> list[Document]:
    """Parse the documents of a task or a configuration: strings, or objects with a title and a text."""
    if value is None:
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise DataError(f"{where}: documents must be a list, got {type(value).__name__}")
    return [_read_document(item, f"{where}: documents[{i}]") for i, item in enumerate(value)]


def file_sha256(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise ConfigError(f"tool search: {path} cannot be read ({error.strerror}); check its permissions") from error


def _read_document(item: Any, where: str) -> Document:
    if isinstance(item, str):
        return Document("", item)
    if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
        raise DataError(f"{where} must be a string, or an object with a title and a text")
    title = item.get("title")
    if title is not None and not isinstance(title, str):
        raise DataError(f"{where}.title must be a string, got {type(title).__name__}")
    return Document(title or "", item["text"])


def _path(config: Mapping[str, Any], key: str) -> Path:
    if not isinstance(config[key], str | Path) or not str(config[key]):
        raise ConfigError(f"tool search: {key} must be a path, got {config[key]!r:.80}")
    return Path(config[key]).expanduser()


def _files_in(folder: Path) -> tuple[Path, ...]:
    endings = ".txt, .md or .jsonl"
    if not folder.is_dir():
        raise ConfigError(f"tool search: folder {folder} does not exist; use a folder of {endings} files")
    files = sorted(path for path in folder.rglob("*") if _is_document(path, folder))
    if not files:
        raise ConfigError(f"tool search: folder {folder} has no {endings} files; use another folder")
    return tuple(files)


def _is_document(path: Path, folder: Path) -> bool:
    """Neither a hidden file nor a link that leads out of the folder."""
    if path.suffix.lower() not in FOLDER_SUFFIXES or not path.is_file():
        return False
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return not hidden and path.resolve().is_relative_to(folder.resolve())


def _document_file(path: Path) -> tuple[Path, ...]:
    if path.suffix.lower() not in (".jsonl", ".parquet", *FOLDER_SUFFIXES):
        raise ConfigError(f"tool search: file {path} must end in .jsonl or .parquet; convert it, or use a folder")
    if not path.is_file():
        raise ConfigError(f"tool search: file {path} does not exist; check the path")
    return (path,)
