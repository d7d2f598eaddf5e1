"""What the manifest verifies."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import save, settings_digest
from toolwise.training.checkpoint.loader import read_if_complete, verify


def test_a_glance_sees_sizes_and_a_look_sees_bytes(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": {"n": 1}}).path
    (path / "a.json").write_text('{"n": 2}', encoding="ascii")
    assert read_if_complete(path) is not None
    with pytest.raises(CheckpointError, match="is not what was saved"):
        verify(path, hashes=True)
    (path / "a.json").write_text('{"n": 22}', encoding="ascii")
    assert read_if_complete(path) is None


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": {}}).path
    (path / "a.json").unlink()
    (path / "a.json").mkdir()
    with pytest.raises(CheckpointError, match=r"a\.json is missing"):
        verify(path, hashes=True)


def test_a_digest_does_not_depend_on_the_order() -> None:
    assert settings_digest({"a": 1, "b": {"c": [1, 2], "d": None}}) == settings_digest(
        {"b": {"d": None, "c": [1, 2]}, "a": 1}
    )
    assert len({settings_digest({"a": value}) for value in (1, 2, "1", None, [1], True)}) == 6
