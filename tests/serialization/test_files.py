"""File operations that survive a power cut; training/checkpoint/test_crashes.py simulates the power cuts."""

from __future__ import annotations

import contextlib
from pathlib import Path

from toolwise.serialization.files import (
    checkpoint_folders,
    final_path,
    is_final,
    make_folder,
    newest_first,
    remove,
    sibling_path,
    step_of,
    write_atomic,
)


def make(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir()
    return [folder / name for name in names]


def test_the_newest_comes_first_and_what_was_moved_aside_after_what_is_in_its_place(tmp_path: Path) -> None:
    make(tmp_path, "step-000002", "step-000010.old-1-a", "step-000010", "step-1000000", "step-000011.tmp-1", "notes")
    found = [path.name for path in newest_first(tmp_path)]
    assert found == ["step-1000000", "step-000010", "step-000010.old-1-a", "step-000002"]
    assert newest_first(tmp_path / "absent") == []


def test_only_checkpoint_folders_are_listed(tmp_path: Path) -> None:
    mine = make(tmp_path, "step-000001", "step-000001.tmp-x")
    make(tmp_path, "step-by-step", "step-1.bak")
    (tmp_path / "step-000002").write_text("a file")
    assert sorted(checkpoint_folders(tmp_path)) == mine


def test_a_name_aside_is_new_and_of_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "step-000007.old-1-a"
    names = {sibling_path(path, "tmp") for _ in range(10)}
    assert len(names) == 10
    assert {(step_of(name), final_path(name).name, is_final(name)) for name in names} == {(7, "step-000007", False)}


def test_all_that_is_missing_above_a_folder_is_made(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_relative_folder_is_made_where_we_are(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        make_folder(Path("a/b"))
    assert (tmp_path / "a" / "b").is_dir()


def test_what_is_removed_is_gone_with_all_in_it(tmp_path: Path) -> None:
    doomed = make(tmp_path, "step-000001", "step-000002.tmp-1", "step-000003.old-1-a")
    (doomed[0] / "model").mkdir()
    make(tmp_path, "step-000004")
    remove(doomed)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_files_are_replaced_atomically(tmp_path: Path) -> None:
    write_atomic(tmp_path / "deep" / "a.txt", b"one")
    write_atomic(tmp_path / "deep" / "a.txt", b"two")
    assert (tmp_path / "deep" / "a.txt").read_bytes() == b"two"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.txt"]
