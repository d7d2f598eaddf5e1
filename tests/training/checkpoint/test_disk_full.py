"""A full disk: models, tokenizers and checkpoints that cannot be written give a one-line error and leave no files."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import toolwise
from toolwise.errors import CheckpointError, ModelError
from toolwise.models import BUILTIN, load_model
from toolwise.serialization.files import disk_fault
from toolwise.training.checkpoint import latest, save

torch.set_num_threads(1)
TALKS = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello to you"}]}]
FEW: dict[str, Any] = {"steps": 1, "batch_tokens": 64, "row_tokens": 64}


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


def save_both(folder: Path) -> None:
    loaded()[0].save_pretrained(folder)
    loaded()[1].tokenizer.save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    loaded()[1].tokenizer.save_pretrained(folder)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to let any file grow beyond `size` (EFBIG), whatever library writes it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes; only root can have one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("write", [save_tokenizer, save_both], ids=["tokenizer", "model and tokenizer"])
def test_an_earlier_checkpoint_is_untouched_where_the_next_does_not_fit(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    loaded()
    save(tmp_path, 1, {"a": {"x": 1}}, extra_files={"model": lambda folder: None})
    with (
        largest_file(20_000),
        pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}/step-000002: File too large"),
    ):
        save(tmp_path, 2, {"a": {"x": 2}}, extra_files={"model": write})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    save(tmp_path, 2, {"a": {"x": 2}}, extra_files={"model": write})
    assert (tmp_path / "step-000002" / "model" / "tokenizer.json").stat().st_size > 20_000


def test_a_disk_that_is_full(small_disk: Path) -> None:
    save(small_disk, 1, {"a": {}})
    (small_disk / "other").write_bytes(b"x" * 2_040_000)
    with pytest.raises(
        CheckpointError, match="step-000002: No space left on device; earlier checkpoints are unchanged"
    ):
        save(small_disk, 2, {"a": {}}, extra_files={"model": save_tokenizer})
    assert sorted(path.name for path in small_disk.iterdir()) == ["other", "step-000001"]
    with pytest.raises(ModelError, match=rf"cannot write {small_disk}/taught: No space left on device"):
        toolwise.sft("builtin:small", TALKS, small_disk / "taught", **FEW)
    assert not (small_disk / "taught").exists()


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty folder"])
@pytest.mark.parametrize("size", [20_000, 1_000], ids=["weights", "settings"])
def test_an_sft_model_that_does_not_fit_leaves_nothing(tmp_path: Path, size: int, there: bool) -> None:
    out = tmp_path / "taught"
    if there:
        out.mkdir()
    with (
        largest_file(size),
        pytest.raises(ModelError, match=rf"cannot write {out}: File too large; partial files were removed"),
    ):
        toolwise.sft("builtin:small", TALKS, out, **FEW)
    assert out.exists() == there
    assert list(tmp_path.rglob("*")) == ([out] if there else [])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_each_disk_error_is_named_for_any_exception_type(tmp_path: Path, number: int) -> None:
    words = os.strerror(number)
    rust = f"{words} (os error {number})"
    for fault in (
        OSError(number, words),
        Exception(rust),
        SafetensorError(f"Error while serializing: I/O error: {rust}"),
    ):
        assert disk_fault(fault) == words

        def refuse(folder: Path, fault: Exception = fault) -> None:
            (folder / "part").write_text("half")
            raise fault

        with pytest.raises(CheckpointError, match=f"step-000001: {words}; earlier checkpoints are unchanged"):
            save(tmp_path, 1, {"a": {}}, extra_files={"model": refuse})
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", [KeyError("x"), Exception("no such thing"), FileNotFoundError(2, "gone")])
def test_other_faults_are_not_the_disks(fault: Exception) -> None:
    assert disk_fault(fault) is None


def test_the_model_that_ships_is_larger_than_the_limits_above() -> None:
    assert (BUILTIN / "small" / "tokenizer.json").stat().st_size > 20_000


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, {"a": {}})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000_000))
    weights = {"a": {"w": torch.zeros(5_000_000, dtype=torch.float64)}}
    with pytest.raises(
        CheckpointError,
        match=r"step-000002: it needs 1\.04 GB and the disk has 1\.00 GB free; make room or lower "
        r"trainer\.keep_checkpoints; earlier checkpoints are unchanged",
    ):
        save(tmp_path, 2, weights, extra_files={"model": save_both}, extra_bytes=1_000_000_000)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    save(tmp_path, 2, weights, extra_bytes=900_000_000)
