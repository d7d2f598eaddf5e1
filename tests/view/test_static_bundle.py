"""The bundle: what it holds, and the one script that its modules become."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from view_runs import sample_run

from toolwise.errors import ConfigError
from toolwise.serialization.json_text import json_text
from toolwise.view import static_bundle
from toolwise.view.rollout_store import RunStore
from toolwise.view.static_bundle import joined_modules, write_bundle
from toolwise.view.view_server import STATIC, Pages


def test_names_of_modules_differ() -> None:
    names = [
        name
        for path in STATIC.glob("js/*.js")
        for name in re.findall(
            r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", path.read_text(), re.MULTILINE
        )
    ]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))


def test_all_modules_are_in_the_script_once() -> None:
    text = joined_modules()
    assert not re.findall(r"^(?:import|export)\b.*", text, re.MULTILINE)
    for path in STATIC.glob("js/*.js"):
        first = path.read_text().splitlines()[0]
        assert text.count(first) == 1, path.name


def read_data(path: Path) -> Any:
    return json.loads(path.read_text("utf-8").partition(", ")[2].rstrip().removesuffix(");"))


def test_a_bundle_has_the_latest_rollouts_and_all_validations(tmp_path: Path) -> None:
    run = sample_run(tmp_path / "run")
    page = write_bundle([run], tmp_path / "out", max_rollouts=16 + 36)
    assert page.read_text().count("<script src=") == 4
    rows = read_data(tmp_path / "out" / "data" / "0" / "rows.js")
    assert isinstance(rows, dict)
    assert {row["file"] for row in rows["rows"]} == {"eval-000000", "eval-000003", "step-000003"}
    write_bundle([run], tmp_path / "out")  # again: it is a bundle
    rows = read_data(tmp_path / "out" / "data" / "0" / "rows.js")
    assert isinstance(rows, dict)
    assert len(rows["rows"]) == 3 * 36 + 16


def test_pages_of_a_bundle_are_those_of_the_server(tmp_path: Path) -> None:
    """The script joins what is stored once for the run and for the task with what is stored for the rollout."""
    run = sample_run(tmp_path / "run", steps=1)
    write_bundle([run], tmp_path / "out")
    pages, data = Pages([run]), tmp_path / "out" / "data" / "0"
    shared, chunks = read_data(data / "overview.js")["router"], read_data(data / "rows.js")["groups"]
    seen = 0
    for file, groups in chunks.items():
        for group_id, chunk in groups.items():
            group = read_data(data / f"groups-{chunk}.js")[group_id]
            for rollout_id, rollout in group["rollouts"].items():
                parameters = {"file": file, "id": rollout_id}
                task = group["routes"][rollout["rollout"]["row"]["task_id"]]
                answers = {"rollout": rollout["rollout"], "router": {**shared, **rollout["router"], "task": task}}
                for name, found in answers.items():
                    assert found == json.loads(json_text(pages.answer(name, parameters)[1])), name
                for index, message in rollout["full"].items():
                    assert message == pages.answer("message", {**parameters, "index": index})[1]
                seen += 1
    assert seen == pages.stores[0].table.num_rows


def test_each_rollout_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sample_run(tmp_path / "run", steps=1)
    count, reads, totals = RunStore(run).table.num_rows, [], []
    read, routes = RunStore._read_line, static_bundle.run_routes

    def counted(store: RunStore, file: Any, row: dict[str, Any]) -> Any:
        reads.append(row["offset"])
        return read(store, file, row)

    monkeypatch.setattr(RunStore, "_read_line", counted)
    monkeypatch.setattr(static_bundle, "run_routes", lambda store: totals.append(store) or routes(store))
    write_bundle([run], tmp_path / "out")
    assert len(totals) == 1
    assert len(reads) <= 2 * count  # twice those of validations, which are compared


def test_other_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        write_bundle([], tmp_path)


def test_a_bundle_that_fails_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_run(tmp_path / "run", steps=1)
    out = tmp_path / "pages"

    def fails(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(static_bundle, "_comparisons", fails)
        with pytest.raises(OSError, match="no space"):
            write_bundle([tmp_path / "run"], out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    out.mkdir()
    write_bundle([tmp_path / "run"], out)
    assert (out / "index.html").is_file()
    assert (out / "data" / "0" / "overview.js").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pages", "run"]
