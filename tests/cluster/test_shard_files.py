"""Optimiser state in parts, read by another number of learners."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_runs import largest_gap, run_ranks

from toolwise.cluster.shard_files import MANIFEST, Part, PartReader, file_name, own_range, write_manifest, write_parts
from toolwise.errors import CheckpointError

VALUES = {"a": torch.arange(103, dtype=torch.float32), "b": torch.arange(3, dtype=torch.bfloat16)}


def write(folder: Path, ranks: int) -> None:
    for rank in range(ranks):
        ranges = {name: own_range(len(values), rank, ranks) for name, values in VALUES.items()}
        parts = {n: Part(values[slice(*ranges[n])], ranges[n][0], len(values)) for n, values in VALUES.items()}
        write_parts(folder, rank, ranks, parts)
    write_manifest(folder, ranks, {"version": 7})


@pytest.mark.parametrize("ranks", [1, 4, 5])
@pytest.mark.parametrize("readers", [1, 2, 8])
def test_any_number_of_learners_reads_its_ranges(ranks: int, readers: int, tmp_path: Path) -> None:
    write(tmp_path, ranks)
    reader = PartReader(tmp_path)
    assert reader.facts["version"] == 7
    for name, values in VALUES.items():
        parts = [reader.read(name, *own_range(len(values), rank, readers)) for rank in range(readers)]
        assert torch.equal(torch.cat([part.to(values.dtype) for part in parts]), values)


def test_a_missing_part_is_noticed_before_the_manifest_is_written(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / file_name(1, 3)).unlink()
    with pytest.raises(CheckpointError, match="a disk that all learners share"):
        write_manifest(tmp_path, 3, {})


def test_without_a_manifest_nothing_is_read(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        PartReader(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("job", "tolerance"), [("save", 1e-8), ("save-shard", 1e-8), ("save-shard-cpu", 1e-6)])
def test_a_run_saved_on_four_ranks_goes_on_with_one_two_or_eight(job: str, tolerance: float, tmp_path: Path) -> None:
    (tmp_path / "4").mkdir()
    [expected, *_] = run_ranks(4, tmp_path / "4", job)
    for ranks in (1, 2, 8):
        (tmp_path / str(ranks)).mkdir()
        found = run_ranks(ranks, tmp_path / str(ranks), job.replace("-shard", "") if ranks == 1 else job)
        assert largest_gap(found[0], expected) < tolerance
