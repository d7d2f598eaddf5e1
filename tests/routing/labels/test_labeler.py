"""Labels from a model over real HTTP: good and bad answers, resuming; and labels from rules."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.data import load_tasks
from toolwise.errors import DataError
from toolwise.remote.endpoint import Endpoint
from toolwise.remote.server_errors import ServerError
from toolwise.routing.families import MIXED, Family, RouteAction
from toolwise.routing.labels.labeler import AnswerCache, LabellingResult, label_by_model, label_by_rules
from toolwise.tools.catalog import build_tools
from toolwise.types import Task

RLLA = Path(__file__).parents[2] / "fixtures" / "rlla_test.parquet"
Serve = Callable[..., Any]


def said(text: str) -> tuple[int, bytes, dict[str, str]]:
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    return 200, json.dumps(body).encode(), {}


def is_tool(question: dict[str, Any]) -> bool:
    return "sort tools" in question["messages"][0]["content"]


def sensible(question: dict[str, Any], times: int) -> tuple[int, bytes, dict[str, str]]:
    """The answers of a good model, by a rule that the heuristic does not have."""
    if is_tool(question):
        return said(json.dumps({"family": "CALCULATE" if "a" in question["messages"][1]["content"] else "OTHER"}))
    return said('Sure!\n```json\n{"router_target_action": "MIXED"}\n```')


def ask(tasks: list[Task], server: Any, cache: Path, **more: Any) -> LabellingResult:
    async def work() -> LabellingResult:
        endpoint = Endpoint(f"{server.base_url}/chat/completions", backoff_s=0.001, **({"max_retries": 3} | more))
        answers = AnswerCache(cache)
        try:
            return await label_by_model(tasks, endpoint, "a-model", answers)
        finally:
            await endpoint.aclose()

    return asyncio.run(work())


@pytest.fixture
def tasks() -> list[Task]:
    return load_tasks(RLLA)[:6]


def test_a_model_is_asked_once_for_each_tool_and_once_for_each_row(
    serve: Serve, tasks: list[Task], tmp_path: Path
) -> None:
    server = serve(sensible)
    found = ask(tasks, server, tmp_path / "cache.jsonl")
    assert [label.task_id for label in found.labels] == [task.task_id for task in tasks]
    assert all(label.target == MIXED and label.labelled_by == "a-model" for label in found.labels)
    assert {family for label in found.labels for family in label.families.values()} == {Family.CALCULATE}
    rows = [question for question in server.questions if not is_tool(question)]
    assert len(rows) == 6
    names = {(name, label.task_id) for label in found.labels for name in label.families}
    assert len(server.questions) - 6 <= len(names)
    assert found.asked == len(server.questions)
    assert (found.from_cache, found.failed) == (0, [])


def test_a_row_is_asked_about_with_its_tools_its_question_and_the_right_answer(
    serve: Serve, tasks: list[Task], tmp_path: Path
) -> None:
    server = serve(sensible)
    ask(tasks[:1], server, tmp_path / "cache.jsonl")
    (row,) = [question for question in server.questions if not is_tool(question)]
    assert row["model"] == "a-model"
    told = row["messages"][1]["content"]
    assert "- GetNews: CALCULATE" in told
    assert str(tasks[0].ground_truth)[:60] in told
    mark = told.splitlines()[0]
    assert told.count(mark) == 2
    assert mark in row["messages"][0]["content"]


def test_resuming_asks_only_missing_questions(serve: Serve, tasks: list[Task], tmp_path: Path) -> None:
    server = serve(sensible)
    cache = tmp_path / "cache.jsonl"
    first = ask(tasks[:3], server, cache)
    asked = len(server.questions)
    again = ask(tasks[:3], server, cache)
    assert len(server.questions) == asked
    assert again.labels == first.labels
    assert (again.asked, again.from_cache) == (0, asked)
    cut = cache.read_text().splitlines()
    cache.write_text("\n".join(cut[:-2]) + "\n" + cut[-2][:20])  # killed in the middle of a line
    third = ask(tasks[:3], server, cache)
    assert third.labels == first.labels
    assert len(server.questions) == asked + 2
    assert ask(tasks[:3], server, cache).asked == 0


HALF = b'{"choices": [{"message": {"role": "assistant", "content": "{\\"router_tar'


@pytest.mark.parametrize(
    "trouble",
    [
        (429, b'{"error": "slow down"}', {"retry-after": "0"}),
        (503, b"busy", {}),
        (200, HALF, {}),
        (200, HALF, {"content-length": "4000"}),
        said('{"router_target_action": "SEAR'),
        said('{"router_target_action": "GO HOME"}'),
        said('{"action": "ANSWER"}'),
        said("I would search."),
        (200, b'{"choices": []}', {}),
    ],
    ids=["429", "503", "broken", "half", "half JSON", "no route", "other key", "prose", "no choice"],
)
def test_transient_errors_are_retried(serve: Serve, tasks: list[Task], tmp_path: Path, trouble: Any) -> None:
    def behave(question: dict[str, Any], times: int) -> Any:
        return trouble if times == 0 and not is_tool(question) else sensible(question, times)

    server = serve(behave)
    found = ask(tasks[:2], server, tmp_path / "cache.jsonl")
    assert found.failed == []
    assert [label.target for label in found.labels] == [MIXED, MIXED]
    assert sum(not is_tool(question) for question in server.questions) == 4


def test_permanent_errors_leave_one_label_out_and_are_asked_again(
    serve: Serve, tasks: list[Task], tmp_path: Path
) -> None:
    broken = True

    def behave(question: dict[str, Any], times: int) -> Any:
        bad = broken and str(tasks[1].ground_truth)[:80] in question["messages"][1]["content"]
        return said("no idea") if bad else sensible(question, times)

    server = serve(behave)
    cache = tmp_path / "cache.jsonl"
    found = ask(tasks[:3], server, cache)
    assert [label.target for label in found.labels] == [MIXED, None, MIXED]
    assert [name for name, _ in found.failed] == [tasks[1].task_id]
    assert "cannot be used" in found.failed[0][1]
    broken = False
    again = ask(tasks[:3], server, cache)
    assert again.asked == 1
    assert [label.target for label in again.labels] == [MIXED] * 3


def test_a_tool_without_an_answer_keeps_the_family_of_the_rules(
    serve: Serve, tasks: list[Task], tmp_path: Path
) -> None:
    server = serve(lambda q, n: said("hm") if is_tool(q) else said('{"router_target_action": "search-family"}'))
    found = ask(tasks[:1], server, tmp_path / "cache.jsonl", max_retries=0)
    assert found.labels[0].families == label_by_rules(tasks[:1]).labels[0].families
    assert found.labels[0].target is RouteAction.SEARCH_FAMILY
    assert all(name.startswith("tool ") for name, _ in found.failed)


def test_a_server_that_refuses_is_a_one_line_error(serve: Serve, tasks: list[Task], tmp_path: Path) -> None:
    server = serve(lambda question, times: (401, b'{"error": {"message": "wrong key"}}', {}))
    with pytest.raises(ServerError, match="wrong key"):
        ask(tasks, server, tmp_path / "cache.jsonl")


def test_real_tools_are_described_by_their_schemas_and_those_that_name_their_family_are_not_asked_about(
    serve: Serve, tmp_path: Path
) -> None:
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        return city

    tools = build_tools(["calculator", weather])
    task = Task(task_id="t", prompt=[{"role": "user", "content": "Is it wet?"}], ground_truth="yes")
    server = serve(sensible)

    async def work() -> LabellingResult:
        endpoint = Endpoint(f"{server.base_url}/chat/completions")
        try:
            return await label_by_model([task], endpoint, "m", AnswerCache(tmp_path / "c.jsonl"), tools)
        finally:
            await endpoint.aclose()

    found = asyncio.run(work())
    about = [question["messages"][1]["content"] for question in server.questions if is_tool(question)]
    assert len(about) == 1
    assert "Tells the weather of a city." in about[0]
    assert found.labels[0].families["calculator"] is Family.CALCULATE


def test_the_rules_label_all_rlla_rows_offline() -> None:
    found = label_by_rules(load_tasks(RLLA))
    assert len(found.labels) == 80
    assert all(label.target is not None and label.families for label in found.labels)
    assert sum(label.target is RouteAction.ANSWER for label in found.labels) == 9  # 11.25 % respond only


ONE, TWO = {"q": 1, "r": [1]}, {"q": 2}


def test_answers_are_on_disk_immediately(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "new" / "c.jsonl")
    assert cache.get(ONE) is None
    cache.put(ONE, "yes")
    other = AnswerCache(tmp_path / "new" / "c.jsonl")  # the first is still open: as after a kill
    assert (other.get({"r": [1], "q": 1}), other.get(TWO), len(other)) == ("yes", None, 1)


def test_a_truncated_line_is_skipped_and_the_next_one_intact(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    first = AnswerCache(path)
    first.put(ONE, "yes")
    path.write_text(path.read_text() + '{"key": "abc", "ans')
    second = AnswerCache(path)
    second.put(TWO, "no")
    third = AnswerCache(path)
    assert (third.get(ONE), third.get(TWO), len(third)) == ("yes", "no", 2)


def test_a_cache_that_is_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--cache"):
        AnswerCache(tmp_path)


def test_a_label_says_who_really_made_it(serve: Serve, tasks: list[Task], tmp_path: Path) -> None:
    """The model answers about tools and not about rows; then about rows and not about tools."""
    for answers_tools in (True, False):

        def behave(question: dict[str, Any], times: int, *, tools: bool = answers_tools) -> Any:
            return sensible(question, times) if is_tool(question) == tools else said("I would rather not.")

        found = ask(tasks[:2], serve(behave), tmp_path / f"cache-{answers_tools}.jsonl")
        makers = {maker for label in found.labels for maker in label.families_by.values()}
        assert makers == ({"a-model"} if answers_tools else {"rules"})
        assert {label.labelled_by for label in found.labels} == ({""} if answers_tools else {"a-model"})


def test_the_heuristic_says_what_was_declared_and_what_the_rules_found(tasks: list[Task]) -> None:
    found = label_by_rules(tasks, build_tools(["calculator"]))
    assert {label.labelled_by for label in found.labels} <= {"heuristic", ""}
    for label in found.labels:
        declared = {name for name, maker in label.families_by.items() if maker == "declared"}
        assert declared == {"calculator"}
        assert label.families_by.keys() == label.families.keys()
