"""Sources of documents for the search tool: inline documents, a folder, a file of rows, or WordNet."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from toolwise.data.files import read_rows, row_error
from toolwise.errors import ConfigError, DataError

FOLDER_SUFFIXES = (".txt", ".md", ".jsonl")
WORDNET_FOLDER = Path("/usr/share/wordnet")
"""Where Debian's package wordnet-base installs it."""

_ADJECTIVE_MARKER = re.compile(r"\((?:a|p|ip)\)$")


class Document(NamedTuple):
    title: str
    text: str


class Corpus(Protocol):
    """Documents in a fixed order. Equal fingerprints mean equal documents."""

    def fingerprint(self) -> str: ...

    def documents(self) -> Iterator[Document]: ...


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
            text, title = row.get(self.text_field), row.get(self.title_field)
            if not isinstance(text, str):
                problem = f"must be a string, got {type(text).__name__}; select another with text_field"
                raise row_error(path, number, self.text_field, problem)
            if title is not None and not isinstance(title, str):
                problem = f"must be a string, got {type(title).__name__}; select another with title_field"
                raise row_error(path, number, self.title_field, problem)
            yield Document(title or "", text)


@dataclass(frozen=True, slots=True)
class WordNet:
    """WordNet's data files: one document per meaning, with its words as title and its gloss as text."""

    folder: Path = WORDNET_FOLDER

    def fingerprint(self) -> str:
        return hashlib.sha256(b"".join(file_sha256(path) for path in self._files().values())).hexdigest()

    def documents(self) -> Iterator[Document]:
        for part, path in self._files().items():
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.startswith("  "):  # the licence, at the top of each file
                        yield _read_synset(line, part, f"{path}: line {number}")

    def _files(self) -> dict[str, Path]:
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


def read_corpora(config: Mapping[str, Any]) -> list[Corpus]:
    """The corpora in files of a search tool's configuration."""
    fields = {key: config[key] for key in ("text_field", "title_field") if key in config}
    if not all(isinstance(name, str) and name for name in fields.values()):
        raise ConfigError("tool search: text_field and title_field must be names of fields")
    corpora: list[Corpus] = []
    if config.get("folder") is not None:
        corpora.append(FileCorpus(_files_in(_path(config, "folder")), **fields))
    if config.get("file") is not None:
        corpora.append(FileCorpus((_document_file(_path(config, "file")),), **fields))
    if config.get("wordnet"):
        corpora.append(WordNet() if config["wordnet"] is True else WordNet(_path(config, "wordnet")))
    return corpora


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
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in FOLDER_SUFFIXES and path.is_file())
    if not files:
        raise ConfigError(f"tool search: folder {folder} has no {endings} files; use another folder")
    return tuple(files)


def _document_file(path: Path) -> Path:
    if path.suffix.lower() not in (".jsonl", ".parquet", *FOLDER_SUFFIXES):
        raise ConfigError(f"tool search: file {path} must end in .jsonl or .parquet; convert it, or use a folder")
    if not path.is_file():
        raise ConfigError(f"tool search: file {path} does not exist; check the path")
    return path
