from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from toolwise.view.report import before_after_table, write_report
from toolwise.view.view_server import Pages

MakeRun = Callable[..., Path]
VOID = {"meta", "img", "source", "br", "link"}


class Page(HTMLParser):
    """The page as a browser takes it: every element, and whether each was closed where it should be."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if not self.open or self.open[-1] != "style" else ""

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [a for _, a in self.elements if name in (a.get("class") or "").split()]


def set_answer(run: Path, file: str, text: str, **changes: Any) -> None:
    path = run / "rollouts" / file
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["messages"][-1]["content"] = text
        record |= changes
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_report_is_a_page_and_a_picture(make_run: MakeRun) -> None:
    run = make_run()
    path = write_report(run)
    assert path == run / "report.html"
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run.glob("*.tmp"))


def test_the_headline_says_before_and_after(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    assert len(page.with_class("figure")) == 4
    assert "23.7%" in page.text
    assert "90.9%" in page.text
    assert "+67.2 points" in page.text
    assert "not finished" not in page.text


def test_each_kind_has_a_row(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    assert all(kind in page.text for kind in ("all tasks", "known", "lookup", "arithmetic", "two_step"))


def test_nothing_is_fetched_from_anywhere(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    assert not page.named("script")
    assert not page.named("link")
    addresses = [a[k] or "" for _, a in page.elements for k in ("src", "srcset", "href") if k in a]
    assert addresses
    assert all(address.startswith("data:image/png;base64,") for address in addresses)
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert re.search(r'http-equiv="Content-Security-Policy" content="default-src \'none\'', page.source)


def test_the_embedded_picture_is_the_one_beside_the_page(make_run: MakeRun) -> None:
    run = make_run()
    [image] = Page(write_report(run)).named("img")
    assert base64.b64decode((image["src"] or "").partition(",")[2]) == (run / "report.png").read_bytes()


def test_light_dark_and_phones_are_provided_for(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    assert "prefers-color-scheme: dark" in page.source
    assert any(meta.get("name") == "viewport" for meta in page.named("meta"))


def test_text_from_models_is_escaped_wherever_it_stands(make_run: MakeRun) -> None:
    run = make_run()
    attack = "<script>alert(1)</script><img src=x onerror=alert(1)> \" ' & {{ 7*7 }}"
    for file in ("eval-000000.jsonl", "eval-000060.jsonl", "step-000060.jsonl"):
        set_answer(run, file, attack, kind=attack, reason=attack, stop_reason=attack, ground_truth=attack)
    (run / "config.toml").write_text(f"# {attack}\n")
    page = Page(write_report(run))
    assert not page.named("script")
    assert len(page.named("img")) == 1
    assert not any("onerror" in attributes for _, attributes in page.elements)
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7*7 }}" in page.text


def test_a_hostile_question_or_tool_result_is_escaped_too(make_run: MakeRun) -> None:
    run = make_run()
    path = run / "rollouts" / "eval-000060.jsonl"
    path.write_text(path.read_text().replace("Tarn", "<b onclick=x>Tarn</b>").replace("How high", "<i>How high</i>"))
    page = Page(write_report(run))
    assert not page.named("i")
    assert not any("onclick" in attributes for _, attributes in page.elements)


def test_strange_characters_do_not_stop_a_report(make_run: MakeRun) -> None:
    run = make_run()
    set_answer(run, "eval-000060.jsonl", "\ud800 \x00 \x1b[31m \u202e end")
    page = Page(write_report(run))
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page.source)


def test_the_same_tasks_stand_side_by_side(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    tasks = page.with_class("task")
    assert page.text.count("wrong → right") == 8
    assert page.text.count("still wrong") == 3
    assert page.text.count("right → wrong") == 2
    assert len(tasks) == 13
    assert "I believe 900 m." in page.text
    assert 'lookup(name="Tarn")' in page.text


def test_steps_of_training_are_coloured_by_their_advantage(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    good, bad = page.with_class("shade-good"), page.with_class("shade-bad")
    assert [a["style"] for a in good] == ["--strength: 0.82"] * 4
    assert [a["style"] for a in bad] == ["--strength: 1.00"] * 2
    assert "+0.90" in page.text
    assert "-1.10" in page.text


def test_assistant_messages_of_the_prompt_get_no_advantage(make_run: MakeRun) -> None:
    run = make_run()
    path = run / "rollouts" / "step-000060.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record["messages"].insert(1, {"role": "assistant", "content": "an example"})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = Page(write_report(run))
    assert len(page.with_class("shade-good")) == 4
    assert len(page.with_class("shade-bad")) == 2


def test_a_very_long_text_is_cut(make_run: MakeRun) -> None:
    run = make_run()
    set_answer(run, "eval-000000.jsonl", "word " * 20_000)
    page = Page(write_report(run))
    assert "more characters]" in page.text
    assert len(page.text) < 200_000


def test_the_training_table_has_some_of_many_steps_with_the_first_and_the_last(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(steps=100)))
    assert "24 of the steps" in page.text
    assert "<tr><td>1</td>" in page.source
    assert "<tr><td>100</td>" in page.source
    assert "actor/grad_norm" in page.text


def test_validations_that_were_logged_late_change_no_page(make_run: MakeRun) -> None:
    """As in asynchronous training: behind steps that went on meanwhile."""
    run = make_run(steps=45, finished=False)
    ordered = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    before = write_report(run).read_text("utf-8"), shown_by(run)

    def place(line: str) -> float:
        row = json.loads(line)
        return row["step"] + (3.5 if "eval/score" in row and row["step"] else 0.0)

    late = sorted(ordered, key=place)
    assert late != ordered
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in late), "utf-8")
    assert (write_report(run).read_text("utf-8"), shown_by(run)) == before


def shown_by(run: Path) -> list[Any]:
    pages, names = Pages([run]), ("score/mean", "eval/score", "eval/correct")
    parameters = {"file": "eval-000000", "other_file": "eval-000040"}
    asked = [pages.answer("overview", {}), pages.answer("series", {"names": "|".join(names)})]
    assert asked[1][1]["eval/score"]["steps"] == [0, 10, 20, 30, 40]
    return [*asked, pages.answer("compare", parameters)]


def test_the_configuration_is_there_to_unfold(make_run: MakeRun) -> None:
    assert 'train = "tasks.jsonl"' in Page(write_report(make_run())).text


def test_an_unfinished_run_has_a_report(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(steps=25, finished=False)))
    assert "not finished" in page.text
    assert "at step 20" in page.text
    assert "before training" in page.text


def test_a_run_with_one_validation_says_that_the_rest_is_not_known(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(steps=4, finished=False)))
    assert "not yet known" in page.text


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert "No validation yet." in page.text


def test_a_run_torn_by_a_crash_has_a_report(make_run: MakeRun) -> None:
    run = make_run(finished=False)
    for path in (run / "metrics.jsonl", run / "rollouts" / "step-000060.jsonl"):
        path.write_bytes(path.read_bytes()[:-20])
    Page(write_report(run))


def shown(summary: dict[str, Any]) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(before_after_table(summary))
    return out.getvalue()


def test_the_terminal_table_has_all_tasks_and_each_kind(make_run: MakeRun) -> None:
    text = shown(json.loads((make_run() / "summary.json").read_text()))
    assert re.search(r"all tasks\s+│\s+64\s+│\s+23\.7%\s+│\s+90\.9%\s+│\s+1\.580\s+│\s+0\.630", text)
    assert re.search(r"two_step\s+│\s+16", text)
    assert "score 0.079 → 0.846" in text


@pytest.mark.parametrize("summary", [{}, {"before": {"score": 0.5, "correct": None}}, {"before": None, "after": None}])
def test_the_terminal_table_bears_what_is_missing(summary: dict[str, Any]) -> None:
    assert "all tasks" in shown(summary)


def test_kinds_named_like_markup_are_shown_as_they_are() -> None:
    side = {"correct": 0.5, "cost": 1.0, "n": 2, "by_kind": {"[/red]": {"correct": 0.5, "cost": 1.0, "n": 2}}}
    assert "[/red]" in shown({"before": side, "after": side})


FINDING = {"kind": "constant_reward", "cause": "All <b>rewards</b> are 0", "cure": "Check the reward", "step": 3}


@pytest.mark.parametrize("finished", [True, False])
def test_what_keeps_a_run_from_learning_stands_on_top(finished: bool, make_run: MakeRun) -> None:
    """By the summary of a run that has ended, and by diagnosis.json of one that has not."""
    run = make_run(finished=finished)
    if finished:
        summary = json.loads((run / "summary.json").read_bytes()) | {"updated": False, "diagnosis": [FINDING]}
        (run / "summary.json").write_text(json.dumps(summary))
    else:
        (run / "diagnosis.json").write_text(json.dumps([FINDING, "nonsense"]))
    page = Page(write_report(run))
    assert len(page.with_class("diagnosis")) == 1
    assert "constant_reward All <b>rewards</b> are 0." in page.text
    assert "What to do: Check the reward. (at step 3)" in page.text
    assert ("was never updated" in page.text) is finished


def test_a_healthy_run_s_page_has_no_diagnosis(make_run: MakeRun) -> None:
    run = make_run()
    (run / "diagnosis.json").write_text("torn")
    assert not Page(write_report(run)).with_class("diagnosis")
