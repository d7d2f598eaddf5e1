"""Search: ranking, determinism, hostile queries, and sources of documents."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolwise.errors import ConfigError, DataError
from toolwise.tools.builtin.search.index import THREADED_SEARCH_CHARS
from toolwise.tools.builtin.search.tool import NO_RESULTS, SearchTool
from toolwise.tools.call_errors import ToolCallError

FACTS = [
    "The Eiffel Tower stands in Paris and is 330 metres high.",
    "Mount Everest is the highest mountain on Earth.",
    "The river Nile flows through Egypt.",
    "Paris is the capital of France.",
]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLWISE_CACHE", str(tmp_path_factory.mktemp("cache")))


def ask(query: Any, documents: Any = None, k: int | None = None, config: dict[str, Any] | None = None) -> str:
    async def run() -> str:
        tool = SearchTool(config or {})
        instance = await tool.create(documents=documents, k=k)
        text, reward, _ = await tool.execute(instance, {"query": query})
        assert reward is None
        await tool.release(instance)
        return text

    return asyncio.run(run())


def test_the_best_document_comes_first() -> None:
    assert ask("highest mountain", FACTS) == FACTS[1]
    assert ask("capital of France", FACTS) == FACTS[3]


def test_words_are_matched_by_their_stem_without_case_or_accents() -> None:
    assert ask("FLOWING rivers", FACTS) == FACTS[2]
    assert ask("cafe", ["Le café est ouvert.", "Nothing here."]) == "Le café est ouvert."


def test_any_term_is_enough_and_more_terms_rank_higher() -> None:
    documents = ["apple", "apple banana", "cherry"]
    assert ask("banana apple zebra", documents, k=3) == "apple banana\napple"


def test_k_limits_the_results_and_config_sets_its_default() -> None:
    assert ask("the", FACTS, k=2).count("\n") == 1
    assert ask("paris", FACTS, config={"k": 5}).count("\n") == 1
    assert ask("paris", FACTS, k=1, config={"k": 5}).count("\n") == 0


def test_equal_documents_come_in_their_order() -> None:
    documents = [{"title": "same", "text": f"{i}"} for i in "abcdef"]
    assert ask("same", documents, k=6) == "a\nb\nc\nd\ne\nf"


def test_a_title_is_searched() -> None:
    documents = [
        {"title": "Lima", "text": "A city of ten million."},
        {"title": None, "text": "Peru has llamas."},
    ]
    assert ask("lima", documents) == "A city of ten million."


@pytest.mark.parametrize("query", ["", "   ", '"', "***", "zebra", "-", "()", "\x00"])
def test_nothing_found_is_said(query: str) -> None:
    assert ask(query, FACTS) == NO_RESULTS


@pytest.mark.parametrize(
    "query",
    [
        'Everest" OR "x',
        "Everest AND",
        "NOT Everest",
        "NEAR(Everest, 2)",
        "text:Everest",
        "title : Everest",
        "Everest*",
        "^Everest",
        "{title text}: Everest",
        "'; DROP TABLE documents; -- Everest",
        "Everest\x00Everest",
        "Everest \ud800",
        "Everest_",
        "Everest " + "filler " * 20_000,
        "Everest " + " ".join(f"w{i}" for i in range(5_000)),
    ],
)
def test_operators_in_a_query_are_only_words(query: str) -> None:
    assert ask(query, FACTS) == FACTS[1]


@given(st.text(max_size=80), st.lists(st.text(max_size=40), max_size=5))
@settings(deadline=None)
def test_any_text_may_be_asked_of_any_documents(query: str, documents: list[str]) -> None:
    first = ask(query, documents, k=3)
    assert first == ask(query, documents, k=3)
    assert first == NO_RESULTS or set(first) <= set("\n".join(documents))


@given(st.lists(st.sampled_from(FACTS), min_size=1, max_size=6), st.sampled_from(["paris", "the", "nile egypt"]))
@settings(deadline=None)
def test_every_hit_holds_a_term_of_the_query(documents: list[str], query: str) -> None:
    found = ask(query, documents, k=10)
    expected = [d for d in documents if set(query.split()) & set(d.lower().replace(".", "").split())]
    assert sorted([] if found == NO_RESULTS else found.split("\n")) == sorted(expected)


def test_documents_with_lone_surrogates_are_found_and_given_back() -> None:
    assert ask("odd", ["odd \ud800 text"]) == "odd \ud800 text"


def test_a_query_that_is_no_string_is_an_error_for_the_model() -> None:
    assert ask(5, FACTS) == "error: query must be a string"


def test_the_shared_corpus_serves_tasks_without_documents_and_survives_release() -> None:
    async def run() -> None:
        tool = SearchTool({"documents": FACTS})
        for documents in (None, []):
            instance = await tool.create(documents=documents)
            assert (await tool.execute(instance, {"query": "nile"}))[0] == FACTS[2]
            await tool.release(instance)
        own = await tool.create(documents=["The Nile is a river in my task."])
        assert (await tool.execute(own, {"query": "nile"}))[0] == "The Nile is a river in my task."
        await tool.release(own)

    asyncio.run(run())


def test_instances_do_not_see_each_others_documents() -> None:
    async def run() -> None:
        tool = SearchTool()
        first = await tool.create("first", documents=["alpha one"])
        second = await tool.create("second", documents=["alpha two"])
        assert (await tool.execute(first, {"query": "alpha"}))[0] == "alpha one"
        await tool.release(first)
        assert (await tool.execute(second, {"query": "alpha"}))[0] == "alpha two"
        await tool.release(second)

    asyncio.run(run())


def test_a_folder_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "nile.md").write_text("A long river.")
    (tmp_path / "deep" / "alps.txt").write_text("High mountains.")
    (tmp_path / "more.jsonl").write_text('{"text": "Short rivers.", "title": "Isar"}\n{"text": "A lake."}\n')
    (tmp_path / "data.json").write_text("river")
    config = {"folder": str(tmp_path), "k": 5}
    assert ask("rivers", config=config) == "2 of 2 results\n1. Isar: Short rivers.\n2. nile: A long river."
    assert ask("lake", config={"folder": tmp_path}) == "1 of 1 result\n1. A lake."
    assert ask("alps", config={"folder": tmp_path, "snippet_words": 0}) == "High mountains."


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_of_rows_is_a_corpus(tmp_path: Path, ending: str) -> None:
    from toolwise.data.files import write_rows

    path = tmp_path / f"corpus.{ending}"
    write_rows([{"body": "The Nile flows.", "head": "Nile"}, {"body": "The Alps rise.", "head": "Alps"}], path)
    config = {"file": str(path), "text_field": "body", "title_field": "head"}
    assert ask("nile", config=config) == "1 of 1 result\n1. Nile: The Nile flows."


def test_results_are_snippets_around_what_was_found_and_say_how_many_there_are(tmp_path: Path) -> None:
    for n in range(7):
        filler = " ".join(["word"] * 500)
        (tmp_path / f"{n}.txt").write_text(f"{filler}\nthe needle {n}\n{filler}")
    head, *lines = ask("needles", config={"folder": tmp_path, "k": 3, "snippet_words": 8}).split("\n")
    assert head == "3 of 7 results"
    assert [line[:5] for line in lines] == ["1. 0:", "2. 1:", "3. 2:"]  # ties keep the order of the files
    assert all("the needle" in line and len(line) < 80 for line in lines)


@given(query=st.text(max_size=60))
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_may_be_asked_of_a_corpus(query: str, corpus: SearchTool) -> None:
    async def run() -> str:
        instance = await corpus.create()
        text, _, info = await corpus.execute(instance, {"query": query})
        await corpus.release(instance)
        assert (text == NO_RESULTS) == (info["total"] == 0)
        return text

    assert asyncio.run(run()) == asyncio.run(run())


@pytest.mark.parametrize("query", ["", '"', "\x00", "AND", "NEAR(", "\ud800", "*", "'; DROP TABLE documents; --", "😀"])
def test_no_query_is_syntax_to_a_corpus(query: str, corpus: SearchTool) -> None:
    async def run() -> str:
        instance = await corpus.create()
        return (await corpus.execute(instance, {"query": f"{query} everest"}))[0]

    assert "Mount Everest" in asyncio.run(run())


def test_stop_words_count_only_where_there_is_nothing_else(corpus: SearchTool) -> None:
    async def run(query: str) -> Any:
        return (await corpus.execute(await corpus.create(), {"query": query}))[2]["total"]

    assert asyncio.run(run("the of and")) == 4
    assert asyncio.run(run("the capital of the and")) == 1


def test_a_task_may_bring_its_own_documents_beside_a_corpus(corpus: SearchTool) -> None:
    async def run() -> str:
        instance = await corpus.create(documents=["Everest is mine."])
        return (await corpus.execute(instance, {"query": "everest"}))[0]

    assert asyncio.run(run()) == "1 of 1 result\n1. Everest is mine."


@pytest.fixture
def corpus(tmp_path: Path) -> SearchTool:
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps({"text": fact}) + "\n" for fact in FACTS))
    return SearchTool({"file": path})


def test_a_task_with_many_documents_is_searched_aside_and_in_time() -> None:
    documents = [f"document {n} " + "filler " * 200 for n in range(1 + THREADED_SEARCH_CHARS // 1400)]
    assert ask("document 7", documents).startswith("document 7 ")
    with pytest.raises(ToolCallError) as caught:
        ask("document", documents, config={"timeout_s": 1e-4})
    assert caught.value.failure == "timeout"


def test_a_folder_that_cannot_serve_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no [.]txt, [.]md or [.]jsonl file"):
        SearchTool({"folder": str(tmp_path)})
    with pytest.raises(ConfigError, match="missing does not exist"):
        SearchTool({"folder": str(tmp_path / "missing")})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"file": "no/such.jsonl"}, "file no/such.jsonl does not exist"),
        ({"file": "corpus.csv"}, "must end in .jsonl or .parquet"),
        ({"folder": 3}, "folder must be a path, got 3"),
        ({"text_field": ""}, "text_field and title_field must be names"),
        ({"snippet_words": 65}, "snippet_words must be an integer from 0 to 64, got 65"),
        ({"timeout_s": 0}, "timeout_s must be a number of seconds above 0, got 0"),
        ({"wordnet": "/no/such/folder"}, "apt-get install wordnet-base"),
    ],
)
def test_mistakes_in_a_configuration_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SearchTool(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("one string", "documents must be a list, got str"),
        (["fine", 3], r"documents\[1\] must be a string"),
        ([{"title": "no text"}], r"documents\[0\] must be a string"),
        ([{"title": 3, "text": "x"}], r"documents\[0\].title must be a string, got int"),
    ],
)
def test_bad_documents_are_named(documents: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask("x", documents)


@pytest.mark.parametrize("k", [0, -1, True, "2", 1.5])
def test_k_must_be_a_positive_whole_number(k: Any) -> None:
    with pytest.raises(ConfigError, match="k must be an integer ≥ 1"):
        SearchTool({"k": k})
