"""Full-text indexes (SQLite FTS5, bm25): a small one in memory per task, a shared one on disk per corpus.

A corpus is indexed once and cached under a hash of its content; all rollouts read the same file.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from toolwise.concurrency.deadlines import exclude_pool_queue_time
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.tools.call_errors import SERVER_DOWN, ToolCallError

log = logging.getLogger("toolwise.search")

MAX_TERMS = 128
"""Maximum number of terms used from one query; a model may paste a whole page."""
FORMAT = 1
"""Version of the cached files; a new number rebuilds them."""
MAX_CONCURRENT_SEARCHES = min(4, os.cpu_count() or 1)
_INSTRUCTIONS_PER_CHECK = 10_000
# Few threads: SQLite computes in them, so more threads than cores would only compete. None of them can hang.
_threads = ThreadPoolExecutor(MAX_CONCURRENT_SEARCHES, thread_name_prefix="toolwise-search")
THREADED_SEARCH_CHARS = 200_000
"""Larger document collections of a task are searched in a thread; below this, starting one takes longer."""

# A word for FTS5's unicode61; everything else, operators and quotes included, separates words.
_TERM = re.compile(r"[^\W_]+")
# In a large corpus these match nearly everything: slow to rank, and useless for ranking.
_STOP_WORDS = frozenset(
    """
    a an and are as at be but by for from had has have he her his how i in is it its me my of on or our she so that
    the their them they this to us was we were what when where which who why will with you your
    """.split()  # noqa: SIM905 (words read better than a list of them)
)
_TABLE = "CREATE VIRTUAL TABLE documents USING fts5(title, text, {}tokenize='porter unicode61')"


class Document(NamedTuple):
    title: str
    text: str


class Corpus(Protocol):
    """Documents in a fixed order. Equal fingerprints mean equal documents."""

    def fingerprint(self) -> str: ...

    def documents(self) -> Iterator[Document]: ...


class SearchResult(NamedTuple):
    """The best documents, and the total number of matches."""

    total: int
    documents: list[Document]


def query_terms(query: str) -> list[str]:
    """The distinct words of a query; the model's text is never interpreted as FTS5 syntax."""
    return list(dict.fromkeys(term.casefold() for term in _TERM.findall(query)))[:MAX_TERMS]


def match_expression(terms: Iterable[str]) -> str:
    return " OR ".join(f'"{term}"' for term in terms)


class DocumentIndex:
    """A small in-memory index, built on first use; it does not copy the texts."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def search(self, query: str, k: int, *, snippet_words: int = 0, timeout_s: float) -> SearchResult:
        """The best `k` documents that contain any of the query's terms; ties keep the order of the documents."""
        if sum(len(document.text) for document in self.documents) > THREADED_SEARCH_CHARS:
            return await _run_in_pool(lambda limit: self._search(query, k, limit), timeout_s)
        return self._search(query, k, QueryDeadline())

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _search(self, query: str, k: int, limit: QueryDeadline) -> SearchResult:
        match = match_expression(query_terms(query))
        if not match or not self.documents:
            return SearchResult(0, [])
        with self._lock:  # parallel calls in one turn share the connection
            if self._connection is None:
                self._connection = self._build(limit)
            _install_interrupt(self._connection, limit)
            rows = self._connection.execute(
                "SELECT rowid FROM documents WHERE documents MATCH ? ORDER BY rank, rowid", (match,)
            ).fetchall()
        return SearchResult(len(rows), [self.documents[row] for (row,) in rows[:k]])

    def _build(self, limit: QueryDeadline) -> sqlite3.Connection:
        with ExitStack() as stack:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            stack.callback(connection.close)
            # content='': the texts stay in Python; SQLite stores only the index.
            _fill(connection, self.documents, "content='', ", limit)
            stack.pop_all()
        return connection


class CorpusIndex:
    """An index on disk that many rollouts read concurrently, without blocking the event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._idle: list[sqlite3.Connection] = []
        with closing(self._connect()) as connection:
            (self.size,) = connection.execute("SELECT size FROM about").fetchone()

    async def search(self, query: str, k: int, *, snippet_words: int, timeout_s: float) -> SearchResult:
        """Like `DocumentIndex.search`, with texts cut to `snippet_words` around the terms (0: full text). The search is
        interrupted at the deadline, or when the caller is cancelled."""
        terms = query_terms(query)
        match = match_expression([term for term in terms if term not in _STOP_WORDS] or terms)
        if not match:
            return SearchResult(0, [])
        return await _run_in_pool(lambda limit: self._search(limit, match, k, snippet_words), timeout_s)

    def _search(self, limit: QueryDeadline, match: str, k: int, snippet_words: int) -> SearchResult:
        connection = self._idle.pop() if self._idle else self._connect()
        shown = f"snippet(documents, 1, '', '', '…', {snippet_words:d})" if snippet_words else "text"
        try:
            _install_interrupt(connection, limit)
            (total,) = connection.execute("SELECT count(*) FROM documents WHERE documents MATCH ?", (match,)).fetchone()
            rows = connection.execute(
                f"SELECT title, {shown} FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?", (match, k)
            ).fetchall()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return SearchResult(total, [Document(*row) for row in rows])

    def _connect(self) -> sqlite3.Connection:
        # immutable: a finished index is never written, so readers need no locks, which some file systems lack.
        uri = f"{self.path.resolve().as_uri()}?mode=ro&immutable=1"
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


@dataclass(slots=True)
class QueryDeadline:
    """Decides when the work on one query should stop."""

    end: float = math.inf
    cancelled: bool = False

    @property
    def expired(self) -> bool:
        return self.cancelled or time.monotonic() > self.end

    def check(self) -> None:
        if self.expired:
            raise sqlite3.OperationalError("interrupted")  # like SQLite


def _install_interrupt(connection: sqlite3.Connection, limit: QueryDeadline) -> None:
    """Make SQLite check the deadline regularly, and interrupt the query when it has passed."""
    connection.set_progress_handler(lambda: limit.expired, _INSTRUCTIONS_PER_CHECK)


async def _run_in_pool(work: Callable[[QueryDeadline], SearchResult], timeout_s: float) -> SearchResult:
    """Run `work` in a thread. It stops at its deadline, or when the caller is cancelled."""
    limit = QueryDeadline()

    def run() -> SearchResult:
        limit.end = time.monotonic() + timeout_s  # only now: waiting for a thread does not count
        limit.check()
        return work(limit)

    try:
        return await asyncio.wrap_future(_threads.submit(exclude_pool_queue_time(run)))
    except sqlite3.OperationalError as error:
        if limit.expired:
            raise ToolCallError(f"took longer than {timeout_s:g} s", "timeout") from None
        raise ToolCallError(f"the index cannot be read: {error}", SERVER_DOWN) from None
    except sqlite3.DatabaseError as error:
        raise ToolCallError(f"the index is damaged: {error}", SERVER_DOWN) from None
    finally:
        limit.cancelled = True


def open_index(corpora: Sequence[Corpus], cache: Path | None = None) -> CorpusIndex:
    """The index of these corpora, from the cache, or built now and cached."""
    key = hashlib.sha256(repr((FORMAT, [corpus.fingerprint() for corpus in corpora])).encode()).hexdigest()
    folder = cache if cache is not None else cache_folder()
    path = folder / f"{key[:32]}.sqlite"
    if path.exists():
        try:
            return CorpusIndex(path)
        except sqlite3.DatabaseError as error:
            log.warning("%s is damaged (%s): rebuilding it", path, error)
    try:
        _build(corpora, path)
    except (OSError, sqlite3.OperationalError) as error:
        raise ConfigError(
            f"tool search: cannot write an index to {folder} ({error}): free space there, or set cache, or "
            "TOOLWISE_CACHE, to another folder"
        ) from error
    return CorpusIndex(path)


def cache_folder() -> Path:
    """TOOLWISE_CACHE, or else toolwise in the user's XDG cache folder."""
    if override := os.environ.get("TOOLWISE_CACHE"):
        return Path(override) / "search"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolwise" / "search"


def _build(corpora: Sequence[Corpus], path: Path) -> None:
    """Write to a temporary file and rename it when complete; concurrent builders produce the same index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".part", dir=path.parent)
    try:
        with closing(sqlite3.connect(name, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")
            connection.execute("PRAGMA synchronous = OFF")
            documents = (document for corpus in corpora for document in corpus.documents())
            size = _fill(connection, documents, "", QueryDeadline())
            if size == 0:
                raise ConfigError("tool search: the corpus has no documents; use another")
            connection.execute("CREATE TABLE about (size INTEGER)")
            connection.execute("INSERT INTO about VALUES (?)", (size,))
        os.fsync(handle)
        os.replace(name, path)
    finally:
        os.close(handle)
        with suppress(FileNotFoundError):
            os.unlink(name)


def _fill(connection: sqlite3.Connection, documents: Iterable[Document], options: str, limit: QueryDeadline) -> int:
    try:
        connection.execute(_TABLE.format(options))
    except sqlite3.OperationalError as error:
        if "fts5" not in str(error):
            raise
        raise ToolwiseError(f"search needs an SQLite with FTS5: {error}") from error
    connection.execute("BEGIN")
    size = 0
    for row, document in enumerate(documents):
        limit.check()
        # Lone surrogates, which JSON may contain, have no UTF-8 encoding.
        texts = (text.encode("utf-8", "replace").decode("utf-8") for text in document)
        connection.execute("INSERT INTO documents(rowid, title, text) VALUES (?, ?, ?)", (row, *texts))
        size += 1
    connection.execute("COMMIT")
    return size
