"""Indexes are built once and shared, complete or not at all, and searches stop at their deadline."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from toolwise.errors import ConfigError
from toolwise.tools.builtin.search.index import (
    Corpus,
    CorpusIndex,
    Document,
    DocumentIndex,
    cache_folder,
    match_expression,
    open_index,
    query_terms,
)
from toolwise.tools.builtin.search.tool import InlineCorpus
from toolwise.tools.call_errors import ToolCallError

FACTS = InlineCorpus((Document("Nile", "The river Nile flows."), Document("Alps", "The Alps rise.")))


@dataclass
class Broken:
    """A corpus that fails halfway through reading."""

    def fingerprint(self) -> str:
        return "broken"

    def documents(self) -> Iterator[Document]:
        yield Document("", "first")
        raise RuntimeError("half-way")


def search(index: CorpusIndex, query: str, timeout_s: float = 10.0) -> list[str]:
    found = asyncio.run(index.search(query, 5, snippet_words=0, timeout_s=timeout_s))
    assert found.total >= len(found.documents)
    return [document.text for document in found.documents]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> CorpusIndex:
    words = [f"w{n}" for n in range(50)]
    documents = tuple(Document("", " ".join(words[n % 7 :])) for n in range(20_000))
    return open_index([InlineCorpus(documents)], tmp_path_factory.mktemp("cache"))


def test_an_index_is_built_once(tmp_path: Path) -> None:
    first = open_index([FACTS], tmp_path)
    made = first.path.stat()
    assert open_index([FACTS], tmp_path).path.stat().st_mtime_ns == made.st_mtime_ns
    assert search(first, "rivers") == ["The river Nile flows."]
    assert first.size == 2
    assert open_index([InlineCorpus(FACTS.inline_documents[:1])], tmp_path).path != first.path
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half-way"):
        open_index([Broken()], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"no database at all", b"SQLite format 3\x00" + b"\x00" * 5000])
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: bytes) -> None:
    path = open_index([FACTS], tmp_path).path
    path.write_bytes(damage)
    assert search(open_index([FACTS], tmp_path), "alps") == ["The Alps rise."]


@pytest.mark.long
def test_two_processes_that_build_at_once_end_with_one_index(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from toolwise.tools.builtin.search.index import Document, open_index
from toolwise.tools.builtin.search.tool import InlineCorpus
corpus = InlineCorpus(tuple(Document("", f"text {{n}}") for n in range(20_000)))
print(open_index([corpus], Path({str(tmp_path)!r})).size)
"""
    workers = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for _ in range(2)]
    assert [worker.communicate(timeout=60)[0].strip() for worker in workers] == [b"20000", b"20000"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write an index to .*file.*: free space there, or set cache"):
        open_index([FACTS], tmp_path / "file")


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the corpus has no documents"):
        open_index([InlineCorpus(())], tmp_path)


def test_where_indexes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/toolwise/search")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "toolwise" / "search"
    monkeypatch.setenv("TOOLWISE_CACHE", "/y")
    assert cache_folder() == Path("/y/search")


@pytest.mark.long
def test_many_searches_at_once_do_not_mix(large: CorpusIndex) -> None:
    async def run() -> list[int]:
        founds = [large.search(f"w{n % 7}", 1, snippet_words=5, timeout_s=60) for n in range(100)]
        return [found.total for found in await asyncio.gather(*founds)]

    holding = [sum(1 for d in range(20_000) if d % 7 <= n) for n in range(7)]
    assert asyncio.run(run()) == [holding[n % 7] for n in range(100)]


def test_equals_come_in_the_order_of_the_documents(tmp_path: Path) -> None:
    corpus = InlineCorpus(tuple(Document(f"{n}", "same words here") for n in range(50)))
    found = asyncio.run(open_index([corpus], tmp_path).search("words", 50, snippet_words=0, timeout_s=10))
    assert [document.title for document in found.documents] == [f"{n}" for n in range(50)]


def test_a_deadline_ends_the_search_itself(large: CorpusIndex) -> None:
    every_word = " ".join(f"w{n}" for n in range(50))
    with pytest.raises(ToolCallError) as caught:
        search(large, every_word, timeout_s=0.01)
    assert (caught.value.failure, str(caught.value)) == ("timeout", "took longer than 0.01 s")
    assert search(large, "w0")  # the thread is free again


def test_a_search_nobody_waits_for_ends(large: CorpusIndex) -> None:
    every_word = " ".join(f"w{n}" for n in range(50))

    async def run() -> float:
        waiting = [asyncio.create_task(large.search(every_word, 5, snippet_words=0, timeout_s=600)) for _ in range(40)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        began = time.monotonic()
        await large.search("w0", 1, snippet_words=0, timeout_s=600)
        return time.monotonic() - began

    assert asyncio.run(run()) < 5  # all forty would take far longer


def test_the_event_loop_goes_on_while_a_search_runs(large: CorpusIndex) -> None:
    every_word = " ".join(f"w{n}" for n in range(50))

    async def run() -> int:
        ticks = 0
        work = asyncio.create_task(large.search(every_word, 5, snippet_words=0, timeout_s=60))
        while not work.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 5


def test_an_index_that_vanishes_is_nobodys_mistake(tmp_path: Path) -> None:
    index = open_index([FACTS], tmp_path)
    os.unlink(index.path)
    with pytest.raises(ToolCallError) as caught:
        search(index, "nile")
    assert caught.value.infrastructure


def test_terms_are_words_once_each() -> None:
    assert query_terms('Nile "nile" NILE* -AND_or\x00') == ["nile", "and", "or"]
    assert match_expression(["nile", "and"]) == '"nile" OR "and"'
    assert len(query_terms(" ".join(f"w{n}" for n in range(1000)))) == 128


def test_an_index_in_memory_is_built_when_first_searched() -> None:
    index = DocumentIndex(FACTS.inline_documents)
    assert asyncio.run(index.search("nile", 1, timeout_s=10)).total == 1
    index.close()
    assert asyncio.run(index.search("the", 1, timeout_s=10)) == (2, [FACTS.inline_documents[1]])
    corpora: list[Corpus] = [FACTS]
    assert corpora[0].fingerprint() == FACTS.fingerprint()


@pytest.mark.skipif(not Path("/usr/share/wordnet/data.noun").is_file(), reason="needs Debian's wordnet-base")
def test_wordnet_is_searched(tmp_path: Path) -> None:
    from toolwise.tools.builtin.search.tool import WordNet

    index = open_index([WordNet()], tmp_path)
    assert index.size == 117_659
    assert "genus Canis" in search(index, "domestic dog canis familiaris")[0]
