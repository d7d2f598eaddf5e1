"""The bundle: what it holds, and the one script that its modules become."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from view_runs import sample_run

from toolwise.errors import ConfigError
from toolwise.view.static_bundle import joined_modules, write_bundle
from toolwise.view.view_server import STATIC


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


def read_data(path: Path) -> object:
    return json.loads(path.read_text("utf-8").partition(", ")[2].rstrip(");\n"))


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


def test_other_folders_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigError, match="not empty"):
        write_bundle([], tmp_path)
