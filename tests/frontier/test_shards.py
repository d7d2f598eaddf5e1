"""Shards of a pool: merged completely, once, and never with those of another pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from toolwise.errors import DataError, ToolwiseError
from toolwise.frontier.rollout_pool import PoolPlan, append_cells, read_cells
from toolwise.frontier.shards import count_cells, merge_shards, run_in_processes, shard_path, shard_paths

PLAN = PoolPlan([], {}, draws=1)


def cell(name: str, said: str = "") -> dict[str, object]:
    return {"task_id": name, "route": "ANSWER", "draws": [{"score": 1.0, "cost": 0.0, "said": said}]}


def test_shards_are_merged_once_and_deleted(tmp_path: Path) -> None:
    pool = tmp_path / "pool.jsonl"
    append_cells(pool, PLAN, [cell("a", "first")])
    append_cells(shard_path(pool, 0, 2), PLAN, [cell("a", "again"), cell("b")])
    append_cells(shard_path(pool, 1, 2), PLAN, [cell("c")])
    assert count_cells([pool, *shard_paths(pool)]) == 4
    merge_shards(pool, PLAN)
    found = read_cells(pool, PLAN)
    assert sorted(name for name, _ in found) == ["a", "b", "c"]
    assert found["a", "ANSWER"]["draws"][0]["said"] == "first"
    assert shard_paths(pool) == []
    assert pool.read_text().count("\n") == 4


def test_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    pool = tmp_path / "pool.jsonl"
    append_cells(shard_path(pool, 0, 2), PLAN, [cell("a"), cell("b")])
    share = shard_path(pool, 0, 2)
    share.write_text(share.read_text()[:-20])
    merge_shards(pool, PLAN)
    assert list(read_cells(pool, PLAN)) == [("a", "ANSWER")]


def test_shards_of_another_pool_are_refused_and_kept(tmp_path: Path) -> None:
    pool = tmp_path / "pool.jsonl"
    append_cells(shard_path(pool, 0, 2), PoolPlan([], {}, draws=1, seed=5), [cell("a")])
    with pytest.raises(DataError, match="seed differs"):
        merge_shards(pool, PLAN)
    assert len(shard_paths(pool)) == 1


def test_a_single_shard_is_the_pool_itself(tmp_path: Path) -> None:
    assert shard_path(tmp_path / "pool.jsonl", 0, 1) == tmp_path / "pool.jsonl"


WORK = """
from pathlib import Path
from toolwise.errors import ToolwiseError

def leave(payload, number, of):
    folder = Path(payload["folder"])
    (folder / f"{number}-of-{of}").touch()
    if number == 1 and (folder / "fail").exists():
        raise ToolwiseError("there is nothing to be had here")
"""


@pytest.mark.long
def test_every_process_has_its_number_and_failures_are_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "some_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path / "code")
    folder = tmp_path / "made"
    folder.mkdir()
    told = {"folder": str(folder)}
    asyncio.run(run_in_processes("some_work:leave", told, 2))
    assert {path.name for path in folder.iterdir()} == {"0-of-2", "1-of-2"}
    (folder / "fail").touch()
    with pytest.raises(ToolwiseError, match="1 of 2 rollout processes"):
        asyncio.run(run_in_processes("some_work:leave", told, 2))
    assert "toolwise: there is nothing to be had here" in capfd.readouterr().err
