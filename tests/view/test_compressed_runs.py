"""The pages of a run whose older files are compressed are those of the plain files."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from view_runs import sample_run

from toolwise.serialization import gzip_blocks
from toolwise.training import rollout_index
from toolwise.training.rollout_files import compress_old_files
from toolwise.view.rollout_store import RunStore
from toolwise.view.static_bundle import write_bundle
from toolwise.view.view_server import Pages

QUERIES: list[tuple[str, dict[str, str]]] = [
    ("rollouts", {"sort": "score", "limit": "500"}),
    ("rollouts", {"q": "osprey", "limit": "500"}),
    ("rollouts", {"q": "score", "limit": "500"}),
    ("rollouts", {"q": "no such text"}),
    ("facets", {}),
]


def answers(pages: Pages) -> list[Any]:
    found = [pages.answer(name, query) for name, query in QUERIES]
    for row in found[0][1]["rows"]:
        found.append(pages.answer("rollout", {"file": row["file"], "id": row["rollout_id"]}))
        found.append(pages.answer("group", {"file": row["file"], "group": row["group_id"]}))
    return found


def test_compressing_a_run_changes_nothing_on_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip_blocks, "BLOCK_BYTES", 10_000)
    run = sample_run(tmp_path / "run")
    pages = Pages([run])
    before = answers(pages)
    assert {status for status, _ in before} == {200}
    assert before[1][1]["total"] > 0
    for kind in ("step", "eval"):
        compress_old_files(run / "rollouts", kind, 1)
    assert len(list((run / "rollouts").glob("*.jsonl.gz"))) >= 3
    monkeypatch.setattr(rollout_index, "build_index", lambda _: pytest.fail("the index was built again"))
    assert answers(pages) == before  # by a page that has not noticed yet
    pages.runs({})  # as it does every two seconds
    assert answers(pages) == before
    assert answers(Pages([run])) == before


def test_a_file_that_is_being_compressed_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = sample_run(tmp_path / "run")
    store = RunStore(run)
    before, glob = store.table.num_rows, Path.glob

    def compress_between(folder: Path, pattern: str) -> list[Path]:
        found = list(glob(folder, pattern))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "glob", glob)
            compress_old_files(folder, "step", len(list(glob(folder, "step-*.jsonl"))) - 1)
        return found

    monkeypatch.setattr(Path, "glob", compress_between)
    for _ in range(3):
        store.refresh()
        assert store.table.num_rows == before
    assert len(list(glob(run / "rollouts", "step-*.jsonl.gz"))) >= 2


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A run of compressed files, and the one in which a block in the middle is damaged."""
    monkeypatch.setattr(gzip_blocks, "BLOCK_BYTES", 10_000)
    run = sample_run(tmp_path / "run")
    compress_old_files(run / "rollouts", "step", 1)
    path = sorted((run / "rollouts").glob("step-*.jsonl.gz"))[0]
    state = rollout_index.read_index(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    path.write_bytes(data)
    rollout_index.save_index(path, state)  # else the file would be read from its beginning as far as it goes
    return run, path.name.partition(".")[0]


def test_pages_about_a_damaged_file_say_so_and_the_others_are_shown(damaged: tuple[Path, str]) -> None:
    run, file = damaged
    pages = Pages([run])
    rows = pages.answer("rollouts", {"limit": "500"})[1]["rows"]
    found = {
        row["rollout_id"]: pages.answer("rollout", {"file": file, "id": row["rollout_id"]})
        for row in rows
        if row["file"] == file
    }
    assert {status for status, _ in found.values()} == {200, 404}
    for status, value in found.values():
        assert status == 200 or (f"{file} of run is damaged: " in value["error"] and "\n" not in value["error"])
    bad = next(row for row in rows if row["file"] == file and found[row["rollout_id"]][0] == 404)
    for name in ("group", "anchors"):
        status, value = pages.answer(name, {"file": file, "group": bad["group_id"]})
        assert (status, "is damaged" in value["error"]) == (404, True)
    status, value = pages.answer("router", {"file": file, "id": bad["rollout_id"]})
    assert (status, "is damaged" in value["error"]) == (404, True)
    for row in rows:
        if row["file"] != file:
            assert pages.answer("rollout", {"file": row["file"], "id": row["rollout_id"]})[0] == 200
    points = pages.answer("points", {"x": "reward/correct", "y": "score"})[1]["points"]
    assert {name for name, value in zip(points["file"], points["reward/correct"], strict=True) if value is None} == {
        file
    }
    assert pages.answer("overview", {})[0] == pages.answer("facets", {})[0] == 200


def test_a_search_finds_what_is_in_other_files_and_before_the_damage(
    damaged: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    run, file = damaged
    pages = Pages([run])
    rows = pages.answer("rollouts", {"limit": "500"})[1]["rows"]
    found = pages.answer("rollouts", {"q": " ", "limit": "500"})[1]["rows"]
    others = [row["rollout_id"] for row in rows if row["file"] != file]
    assert [row["rollout_id"] for row in found if row["file"] != file] == others
    inside = [row for row in found if row["file"] == file]
    assert 0 < len(inside) < len([row for row in rows if row["file"] == file])
    assert f"{file} of run is damaged: " in caplog.text


def test_a_damaged_file_without_an_index_is_shown_as_far_as_it_goes(damaged: tuple[Path, str]) -> None:
    run, file = damaged
    whole = Pages([run]).answer("rollouts", {"file": file})[1]["total"]
    (run / "rollouts" / f"{file}.index.parquet").unlink()
    pages = Pages([run])
    rows = pages.answer("rollouts", {"file": file, "limit": "500"})[1]["rows"]
    assert 0 < len(rows) < whole
    assert {pages.answer("rollout", {"file": file, "id": row["rollout_id"]})[0] for row in rows} == {200}
    assert pages.answer("runs", {})[1][0]["rollouts"] > whole


def test_a_bundle_leaves_out_the_groups_that_are_damaged(
    damaged: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, file = damaged
    write_bundle([run], tmp_path / "bundle")
    text = (tmp_path / "bundle" / "data" / "0" / "rows.js").read_text()
    data = json.loads(text[text.index(",") + 1 : text.rindex(")")])
    kept = {row["group_id"] for row in data["rows"] if row["file"] == file}
    assert kept == set(data["groups"].get(file, {}))
    whole = {row["group_id"] for row in RunStore(run).of_file(file).to_pylist()}
    assert kept < whole
    for group in whole - kept:
        assert f"left out of the bundle: group {group}: {file} of run is damaged: " in caplog.text
    assert len(data["rows"]) > len(RunStore(run).of_file(file))


def test_a_scatter_plot_decompresses_each_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip_blocks, "BLOCK_BYTES", 10_000)
    run = sample_run(tmp_path / "run")
    compress_old_files(run / "rollouts", "step", 1)
    store, unpack, unpacked = RunStore(run), zlib.decompressobj, []

    def counted(*arguments: Any, **options: Any) -> Any:
        unpacked.append(1)
        return unpack(*arguments, **options)

    monkeypatch.setattr(gzip_blocks.zlib, "decompressobj", counted)
    files = [path.open("rb") for path in (run / "rollouts").glob("*.gz")]
    blocks = sum(len(gzip_blocks._find_blocks(file) or ()) for file in files)
    found = Pages([store]).answer("points", {"x": "reward/correct", "y": "score"})[1]["points"]
    for file in files:
        file.close()
    assert None not in found["reward/correct"]
    assert 0 < len(unpacked) <= blocks < len(found["rollout_id"])
