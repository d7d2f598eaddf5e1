"""Working folders: one per rollout, none left behind, and not removed by a forked child."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from toolwise.errors import DataError
from toolwise.sandbox.programs.work_folders import WorkFolders


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_root_goes_with_the_last_folder(temporary: Path) -> None:
    folders = WorkFolders()
    one, two = folders.open({"a/b": "text"}), folders.open({})
    assert (one.work_path / "a" / "b").read_text() == "text"
    folders.remove(one)
    assert two.work_path.is_dir()
    folders.remove(two)
    assert list(temporary.iterdir()) == []
    assert folders.open({}).work_path.is_dir()
    folders.close()
    assert list(temporary.iterdir()) == []


def test_a_file_that_cannot_be_put_there_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(DataError, match="must be a string"):
        WorkFolders().open({"a": 3})  # type: ignore[dict-item]
    assert list(temporary.iterdir()) == []


def test_each_call_has_its_own_temporary_folder() -> None:
    folders = WorkFolders()
    folder = folders.open({"a": "x"})
    assert folders.temporary(folder) != folders.temporary(folder)
    folders.close()


def test_a_fork_removes_nothing_of_its_parents() -> None:
    folders = WorkFolders()
    folder = folders.open({})
    child = os.fork()
    if child == 0:
        folders.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.work_path.is_dir()
    folders.close()
