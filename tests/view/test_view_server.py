"""The server of the pages: what it answers, to whom, and that it never imports torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from view_runs import sample_run

from toolwise.errors import ConfigError
from toolwise.serve.request import BadRequestError
from toolwise.serve.server import Server
from toolwise.view.overview_page import fault_totals
from toolwise.view.rollout_store import RunStore
from toolwise.view.view_server import STATIC, Pages, build_view_app, is_loopback, serve_view

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_run(tmp_path_factory.mktemp("view") / "sample")


@pytest.fixture(scope="module")
def pages(run: Path) -> Pages:
    return Pages([run])


@pytest.fixture(scope="module")
def address(pages: Pages) -> Iterator[str]:
    with Server(build_view_app(pages)) as server:
        yield f"http://127.0.0.1:{server.port}"


def get(pages: Pages, name: str, **parameters: str) -> Any:
    status, value = pages.answer(name, parameters)
    assert status == 200, value
    return value


@pytest.mark.parametrize(
    ("parameters", "keeps"),
    [
        ({"kind": "lookup|known"}, lambda r: r["kind"] in ("lookup", "known")),
        ({"correct": "true", "phase": "train"}, lambda r: r["correct"] and r["phase"] == "train"),
        ({"tool": "search", "step_min": "2"}, lambda r: "search" in r["tools"] and r["step"] >= 2),
        ({"score_max": "0.5", "cost_min": "1"}, lambda r: r["score"] <= 0.5 and r["cost"] >= 1),
        ({"stop_reason": "max_tokens"}, lambda r: r["stop_reason"] == "max_tokens"),
        ({"route": "ANSWER"}, lambda r: r["route"] == "ANSWER"),
        ({"trained_on": "false"}, lambda r: not r["trained_on"]),
    ],
)
def test_filters_keep_what_they_say(pages: Pages, parameters: dict[str, str], keeps: Any) -> None:
    expected = [r for r in pages.stores[0].table.to_pylist() if keeps(r)]
    found = get(pages, "rollouts", **parameters, limit="500")
    assert found["total"] == len(expected) > 0
    assert [r["rollout_id"] for r in found["rows"]] == [r["rollout_id"] for r in expected]


@pytest.mark.parametrize("text", ["OSPREY 3", "<script>", "role", "score", "845 wells", 'window.hacked = 1"', "\u202e"])
def test_text_is_found_in_values_and_not_in_names_of_fields(run: Path, pages: Pages, text: str) -> None:
    def values(value: Any) -> Iterator[str]:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                yield from values(item)
        elif isinstance(value, str):
            yield value.lower()

    expected = sum(
        any(text.lower() in value for value in values(json.loads(line)))
        for file in (run / "rollouts").glob("*-*.jsonl")
        for line in file.read_bytes().splitlines()
    )
    assert get(pages, "rollouts", q=text)["total"] == expected


def test_a_search_in_a_run_that_has_just_begun_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.toml").touch()
    assert get(Pages([tmp_path]), "rollouts", q="bridges")["total"] == 0


def test_capitals_beyond_ascii_are_found_and_lines_that_are_left_out_are_not(tmp_path: Path) -> None:
    lines = ['{"rollout_id": "r", "reason": "Große ÄRGER"}', '["Ärgernis"]']
    (tmp_path / "step-000001.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")
    pages = Pages([tmp_path])
    totals = [get(pages, "rollouts", q=text)["total"] for text in ("große", "GROßE", "Ärger", "\ud800", "Ärgernis")]
    assert totals == [1, 1, 1, 0, 0]


def test_pipes_and_devices_are_no_files_of_rollouts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-000001.jsonl")
    (tmp_path / "step-000002.jsonl").symlink_to("/dev/null")
    (tmp_path / "step-000003.jsonl").write_text('{"rollout_id": "r"}\n')
    os.mkfifo(tmp_path / "step-000003.index.parquet")
    os.mkfifo(tmp_path / "step-000003.tokens.parquet")
    assert [file["file"] for file in RunStore(tmp_path).files()] == ["step-000003"]


@pytest.mark.parametrize("column", ["score", "question", "tokens", "kind", "advantage"])
@pytest.mark.parametrize("descending", [True, False])
def test_rows_are_sorted_and_those_without_a_value_come_last(pages: Pages, column: str, descending: bool) -> None:
    rows = get(pages, "rollouts", sort=column, desc=str(descending).lower(), limit="500")["rows"]
    values = [row[column] for row in rows]
    known = [value for value in values if value is not None]
    assert values[: len(known)] == sorted(known, reverse=descending)


def test_pages_of_rows_join_to_the_whole(pages: Pages) -> None:
    whole = get(pages, "rollouts", limit="500")["rows"]
    parts = [get(pages, "rollouts", offset=str(start), limit="50")["rows"] for start in range(0, len(whole), 50)]
    assert [row for part in parts for row in part] == whole


@pytest.mark.parametrize(
    ("name", "parameters", "status"),
    [
        ("rollout", {"file": "../../etc", "id": "x"}, 404),
        ("rollout", {"file": "step-000001", "id": "x"}, 404),
        ("rollout", {"file": "step-000001", "id": "\ud800"}, 404),
        ("group", {"file": "step-000001", "group": "\ud800"}, 404),
        ("message", {"file": "step-000001", "id": "step-1/0/0", "index": "99"}, 404),
        ("group", {"file": "step-000001", "group": "x"}, 404),
        ("rollouts", {"run": "3"}, 404),
        ("rollouts", {"score_min": "high"}, 400),
        ("rollouts", {"limit": "-1"}, 400),
        ("points", {"x": "question"}, 400),
        ("nothing", {}, 404),
    ],
)
def test_bad_requests_are_answered_in_one_line(pages: Pages, name: str, parameters: Any, status: int) -> None:
    found, value = pages.answer(name, parameters)
    assert (found, "\n" in value["error"]) == (status, False)


def test_new_files_are_found_and_removed_ones_forgotten(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    store = RunStore(copy)
    before, count = store.signature, store.table.num_rows
    assert not store.refresh()
    for suffix in (".jsonl", ".index.parquet", ".tokens.parquet"):
        rollouts = copy / "rollouts"
        shutil.copy(rollouts / f"step-000003{suffix}", rollouts / f"step-000004{suffix}")
    assert store.refresh()
    assert store.signature != before
    assert store.table.num_rows == count + 36
    (copy / "rollouts" / "step-000004.jsonl").unlink()
    assert store.refresh()
    assert store.table.num_rows == count


def test_a_run_that_has_only_begun_can_be_opened(tmp_path: Path) -> None:
    pages = Pages([tmp_path])
    assert get(pages, "runs")[0]["rollouts"] == 0
    assert get(pages, "overview")["metric_names"] == []
    assert get(pages, "rollouts")["total"] == 0
    assert get(pages, "facets")["tools"] == []


@pytest.mark.parametrize(
    ("holder", "summary", "state"),
    [
        ("own", None, "running"),
        ("own", {"interrupted": True}, "running"),  # it was resumed
        (None, None, "crashed"),
        (2**22 - 1, None, "crashed"),
        (10**20, None, "crashed"),
        (None, {"steps": 3, "total_steps": 3}, "finished"),
        (None, {"steps": 2, "total_steps": 3, "interrupted": True}, "interrupted"),
    ],
)
def test_a_run_is_live_while_its_process_is(tmp_path: Path, holder: Any, summary: Any, state: str) -> None:
    if holder is not None:
        holder = os.getpid() if holder == "own" else holder
        (tmp_path / ".lock").write_text(f"{holder} {socket.gethostname()}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    if summary is not None:
        (tmp_path / "summary.json").write_text(json.dumps(summary))
    (run,) = get(Pages([tmp_path]), "runs")
    assert (run["state"], run["ended"]) == (state, state != "running")


def test_rollouts_that_no_training_made_have_not_crashed(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text('{"rollout_id": "r"}\n')
    (run,) = get(Pages([tmp_path]), "runs")
    assert (run["state"], run["ended"], run["rollouts"]) == ("", True, 1)


def test_the_planned_steps_of_a_live_run_are_those_of_its_settings(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[trainer]\ntotal_steps = 70\n")
    assert get(Pages([tmp_path]), "overview")["total_steps"] == 70


def test_faults_of_a_run_without_a_summary_are_those_that_were_logged() -> None:
    """Also if a step was repeated after a crash, or a line has something else than a number."""
    line = {
        "step": 1,
        "rollouts": 8.0,
        "calls/mean": 1.5,
        "calls/failed": 0.5,
        "faults/policy": 3.0,
        "faults/tool/x": 0.5,
    }
    rows = [
        line | {"faults/policy": 7.0},
        line,
        {"step": 1, "eval/score": 1.0},
        line | {"step": 2, "faults/policy": None},
    ]
    assert fault_totals(rows) == {"policy": 3, "rollouts": 16, "calls": 24}


def test_a_kind_with_a_bar_in_its_name_can_be_chosen(tmp_path: Path) -> None:
    lines = [{"rollout_id": str(n), "kind": kind} for n, kind in enumerate(("a|b", "a", "c"))]
    (tmp_path / "step-000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pages = Pages([tmp_path])
    assert {row["kind"] for row in get(pages, "rollouts", kind="a|b")["rows"]} == {"a|b", "a"}
    assert {row["kind"] for row in get(pages, "rollouts", kind="c|a")["rows"]} == {"a", "c"}


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        ({"score": 0.5, "cost": 1.0}, "cheaper"),
        ({"score": 0.5, "cost": 3.0}, "dearer"),
        ({"score": 0.7, "cost": 1.0}, "better"),
        ({"score": 0.2, "cost": 2.0}, "worse"),
        ({"score": 0.5, "cost": 2.0}, "same"),
    ],
)
def test_tasks_are_compared_without_a_metric_of_correctness_too(
    tmp_path: Path, after: dict[str, float], outcome: str
) -> None:
    for name, values in (("eval-000000", {"score": 0.5, "cost": 2.0}), ("eval-000003", after)):
        line = {"rollout_id": "r", "task_id": "t", **values}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line) + "\n")
    page = get(Pages([tmp_path]), "compare", file="eval-000000", other_file="eval-000003", other_run="0")
    assert [task["outcome"] for task in page["tasks"]] == [outcome]


def test_a_damaged_run_does_not_hide_the_others(run: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"torn')
    pages = Pages([tmp_path, run])
    assert [(one["state"], one["rollouts"]) for one in get(pages, "runs")] == [("damaged", 0), ("crashed", 124)]
    status, value = pages.answer("overview", {"run": "0"})
    assert (status, "delete it to view the run" in value["error"]) == (400, True)
    assert get(pages, "overview", run="1")["rollouts"] == 124


def test_a_run_that_is_deleted_while_it_is_viewed_does_not_hide_the_others(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "gone"))
    pages = Pages([folder, run])
    assert [one["rollouts"] for one in get(pages, "runs")] == [124, 124]
    before = pages.stores[0].signature
    shutil.rmtree(folder)
    status, value = pages.answer("rollout", {"file": "step-000001", "id": "step-1/0/0"})  # the page has not noticed yet
    assert (status, "no longer there" in value["error"]) == (404, True)
    found = get(pages, "runs")
    assert [(one["state"], one["ended"], one["rollouts"]) for one in found] == [
        ("deleted", True, 0),
        ("crashed", True, 124),
    ]
    assert found[0]["signature"] != before  # open pages read it again
    assert (get(pages, "overview")["metric_names"], get(pages, "rollouts")["total"]) == ([], 0)
    assert pages.answer("rollout", {"file": "step-000001", "id": "step-1/0/0"})[0] == 404
    assert get(pages, "overview", run="1")["rollouts"] == 124
    shutil.copytree(run, folder)
    assert [one["rollouts"] for one in get(pages, "runs")] == [124, 124]  # another run of the same name


def test_values_that_no_run_writes_are_an_answer_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": [1], "score/mean": 0.5}\n')
    pages = Pages([tmp_path])
    status, value = pages.answer("overview", {})
    assert (status, "\n" in value["error"]) == (400, False)
    assert "line 1: step is [1], not a number" in value["error"]


def test_a_page_that_fails_is_an_answer_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    pages = Pages([tmp_path])

    def fails(parameters: Any) -> Any:
        raise ValueError("two\nlines")

    pages.endpoints["overview"] = fails
    status, value = pages.answer("overview", {})
    assert (status, "\n" in value["error"]) == (500, False)
    with Server(build_view_app(pages)) as server:
        answer = httpx.get(f"http://127.0.0.1:{server.port}/api/overview")
    assert (answer.status_code, "default-src 'none'" in answer.headers["content-security-policy"]) == (500, True)


def test_a_file_that_changed_under_the_page_is_not_shown_as_another_rollout(run: Path, tmp_path: Path) -> None:
    """As when a resumed run repeats a step: for a moment the index is that of the file before."""
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    pages = Pages([folder])
    file = folder / "rollouts" / "step-000001.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0].replace(b"step-1/0/0", b"step-1/9/9"), *lines[1:]]))
    status, value = pages.answer("rollout", {"file": "step-000001", "id": "step-1/0/0"})
    assert (status, "has changed" in value["error"]) == (404, True)
    get(pages, "runs")  # looks for changes
    assert get(pages, "rollout", file="step-000001", id="step-1/9/9")["messages"]


@pytest.mark.parametrize("damage", [b"PAR1 torn", b""])
def test_a_conversation_is_shown_without_tokens_that_cannot_be_read(run: Path, tmp_path: Path, damage: bytes) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    (folder / "rollouts" / "step-000001.tokens.parquet").write_bytes(damage)
    page = get(Pages([folder]), "rollout", file="step-000001", id="step-1/0/1")
    assert (page["tokens"], len(page["messages"])) == ([], 4)
    assert get(Pages([folder]), "anchors", file="step-000001", group="step-1/0")["states"]


def test_a_last_line_that_is_being_written_is_left_out(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    before = get(Pages([folder]), "runs")[0]["rollouts"]
    for name in ("rollouts/step-000003.jsonl", "metrics.jsonl", "rollouts/vocabulary.ndjson"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-20])
    pages = Pages([folder])
    assert get(pages, "runs")[0]["rollouts"] == before - 1
    assert get(pages, "overview")["metric_names"]
    assert get(pages, "rollout", file="step-000003", id="step-3/0/1")["tokens"]


def test_two_viewers_of_a_run_without_an_index_get_along(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "copy"))
    for index in folder.glob("rollouts/*.index.parquet"):
        index.unlink()
    with ThreadPoolExecutor() as threads:
        totals = list(threads.map(lambda _: get(Pages([folder]), "rollouts")["total"], range(4)))
    assert totals == [124] * 4
    assert not [path for path in folder.glob("rollouts/*") if "tmp" in path.name]


def test_runs_of_earlier_versions_open(tmp_path: Path) -> None:
    shutil.unpack_archive(FIXTURES / "frozen_run.tar.gz", tmp_path)
    folder = next(path.parent for path in tmp_path.rglob("metrics.jsonl"))
    pages = Pages([folder])
    rows = get(pages, "rollouts")["rows"]
    assert rows
    for row in rows[:20]:
        page = get(pages, "rollout", file=row["file"], id=row["rollout_id"])
        assert page["messages"]
        get(pages, "group", file=row["file"], group=row["group_id"])
    with_tokens = get(pages, "rollout", file=rows[0]["file"], id=rows[0]["rollout_id"])["tokens"]
    assert all(step["advantages"] is None for step in with_tokens)


def test_a_name_of_another_machine_is_refused(address: str) -> None:
    assert httpx.get(f"{address}/api/runs").status_code == 200
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
        assert httpx.get(f"{address}/api/runs", headers={"Host": host}).status_code == 403


def test_only_get_is_answered(address: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        answer = httpx.request(method, f"{address}/api/runs", headers={"Content-Type": "application/json"})
        assert answer.status_code == 405


@pytest.mark.parametrize(
    "path", ["..%2f..%2fview_server.py", "%2e%2e/view_server.py", "js/../../report.py", "js", "js/%00", "a" * 5000]
)
def test_only_files_of_the_pages_are_served(address: str, path: str) -> None:
    assert httpx.get(f"{address}/{path}").status_code == 404


@pytest.mark.parametrize(("host", "name"), [("127.0.0.2", "127.0.0.2:80"), ("0:0:0:0:0:0:0:1", "[::1]")])
def test_an_address_that_may_be_listened_on_may_be_asked(pages: Pages, host: str, name: str) -> None:
    guard = build_view_app(pages, host)
    scope = {"http_version": "1.1", "method": "GET", "path": "/", "headers": [(b"host", name.encode())]}
    assert is_loopback(host)
    guard.check(scope)
    with pytest.raises(BadRequestError, match="not allowed: open the address") as refused:
        guard.check(scope | {"headers": [(b"host", b"127.0.0.3")]})
    assert "--allow-host" not in str(refused.value)  # toolwise view has no such option


def test_a_public_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="ssh -L"):
        serve_view([], host="0.0.0.0", port=0, on_start=print)


def test_the_server_does_not_need_torch() -> None:
    code = "import sys, toolwise.view.view_server, toolwise.view.static_bundle; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_pages_ask_no_other_machine() -> None:
    texts = [path.read_text() for path in (*STATIC.glob("js/*.js"), STATIC / "index.html", STATIC / "app.css")]
    assert texts
    assert not [text for text in texts if "http://" in text or "https://" in text or "innerHTML" in text]


def test_the_server_does_not_load_pandas() -> None:
    program = (
        "import sys, toolwise.view.view_server as server; server.load_arrow()\n"
        "import pyarrow as pa, pyarrow.compute as pc\n"
        "assert pc.equal(pa.array(['x', 'y']), 'x').to_pylist() == [True, False]\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_the_reward_reported_is_a_column_of_points(pages: Pages) -> None:
    store = pages.stores[0]
    assert get(pages, "facets")["reward_metrics"] == ["reward/correct"]
    found = get(pages, "points", x="reward/correct", y="reward/nothing", file="step-000001")["points"]
    rows = store.of_file("step-000001").to_pylist()
    assert found["rollout_id"] == [row["rollout_id"] for row in rows]
    assert found["reward/correct"] == [store.record(row).metrics["correct"] for row in rows]
    assert found["reward/nothing"] == [None] * len(rows)


def test_a_level_without_a_thought_has_none(pages: Pages) -> None:
    """Not the tag that names the level."""
    rows = [row for row in pages.stores[0].of_file("step-000001").to_pylist() if row["thinking"]]
    thinking = [get(pages, "rollout", file="step-000001", id=row["rollout_id"])["thinking"] for row in rows]
    levels = [(step["level"], level) for steps in thinking for step in steps for level in step["levels"]]
    assert {level["thought"] for _, level in levels if level["level"] == 1} == {None}
    assert all(level["thought"] for used, level in levels if level["level"] not in (1, used))


def test_routes_that_were_not_tried_on_a_task_are_there(pages: Pages) -> None:
    row = next(row for row in pages.stores[0].of_file("step-000001").to_pylist() if row["route"])
    task = get(pages, "router", file="step-000001", id=row["rollout_id"])["task"]
    assert {one["route"]: one["n"] for one in task} == {"ANSWER": 2, "CALCULATE-FAMILY": 0, "SEARCH-FAMILY": 4}
    assert next(one for one in task if not one["n"])["score"] is None


def test_a_comparison_has_every_rollout_of_a_task(pages: Pages) -> None:
    found = get(pages, "compare", file="step-000001", other_file="step-000003")["tasks"][0]
    assert found["first"]["n"] == len(found["first"]["rollouts"]) == 6
    assert {"rollout_id", "score", "correct", "cost"} == found["second"]["rollouts"][0].keys()
