"""The pages of a run whose older files are compressed are those of the plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from view_runs import sample_run

from toolwise.serialization import gzip_blocks
from toolwise.training import rollout_index
from toolwise.training.rollout_files import compress_old_files
from toolwise.view.rollout_store import RunStore
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
