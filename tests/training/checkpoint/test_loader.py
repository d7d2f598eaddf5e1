"""Loading the latest valid checkpoint, the best one, and errors about damaged ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise.errors import CheckpointError
from toolwise.training import checkpoint
from toolwise.training.checkpoint import best, latest, load, save
from toolwise.training.checkpoint.loader import Manifest


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "shards").mkdir()
    (folder / "shards" / "one.safetensors").write_bytes(b"weights")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["a.json", "a.safetensors", "model/config.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"a": {"w": torch.ones(3)}}, extra_files={"model": write_model})
    damage(tmp_path / "step-000002" / name)
    warnings: list[str] = []
    found = latest(tmp_path, warnings_out=warnings)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    assert str(tmp_path / "step-000002" / name) in warnings[0]
    latest(tmp_path)
    assert "step-000002" in caplog.text
    with pytest.raises(CheckpointError, match=Path(name).name):
        load(tmp_path / "step-000002")


def test_there_is_none_in_an_empty_or_absent_folder(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_the_order_is_by_number_not_by_letter(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        save(tmp_path, step, {"a": {}})
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


def rewrite(path: Path, *, reseal: bool, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    changed = {**manifest, **changes}
    if reseal:
        changed["seal"] = Manifest.model_validate(changed).digest()
    (path / "manifest.json").write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99, "reseal": True}, "has format 99, this version of toolwise reads 2"),
        ({"step": 8, "reseal": True}, "is for step 8, but its folder is named step-000007"),
        ({"files": {"x.json": {"size": 1, "sha256": ""}}, "reseal": True}, r"x\.json is missing"),
        ({"parts": [], "reseal": False}, r"manifest\.json was changed after it was written"),
        ({"files": 3, "reseal": False}, r"manifest\.json cannot be read or is incomplete"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = save(tmp_path, 7, {"a": {}}).path
    rewrite(path, **changes)
    with pytest.raises(CheckpointError, match=said):
        load(path)


def test_loading_the_wrong_folder_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": {}})
    with pytest.raises(CheckpointError, match="is a folder of checkpoints"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: .*manifest\.json is missing"):
        load(tmp_path / "nowhere")


def test_a_part_that_cannot_be_read_back_is_named(tmp_path: Path) -> None:
    found = save(tmp_path, 1, {"a": {"w": torch.ones(1)}})
    (found.path / "a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.json cannot be restored") as caught:
        found.state()
    assert "\n" not in str(caught.value)


def test_importing_the_module_does_not_import_torch() -> None:
    code = "import sys, toolwise.training.checkpoint; sys.exit('torch' in sys.modules)"
    source = str(Path(checkpoint.__file__).parents[3])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}).returncode == 0


@pytest.mark.parametrize("name", ["a.safetensors", "model/adapter_config.json", "b.json"])
def test_a_file_that_was_added_is_tampering_too(tmp_path: Path, name: str) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"a": {"n": step}}, extra_files={"model": write_model})
    (tmp_path / "step-000002" / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{Path(name).name} was added after the checkpoint was written"):
        load(tmp_path / "step-000002")
    found = latest(tmp_path, warnings_out=[])
    assert found is not None
    assert found.step == 1


def test_what_a_desktop_leaves_behind_is_not(tmp_path: Path) -> None:
    path = save(tmp_path, 1, {"a": {}}, extra_files={"model": write_model}).path
    (path / "model" / ".DS_Store").write_bytes(b"x")
    assert load(path).step == 1


def test_one_part_is_read_without_the_others(tmp_path: Path) -> None:
    found = save(tmp_path, 1, {"a": {"n": 1}, "b": {"w": torch.ones(2)}})
    (found.path / "b.safetensors").unlink()
    assert found.part("a") == {"n": 1}


def test_the_best_that_is_damaged_is_passed_over_and_named(tmp_path: Path) -> None:
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
        save(tmp_path, step, {"a": {}}, figures={"score": score})
    flip(tmp_path / "step-000002" / "a.json")
    warnings: list[str] = []
    found = best(tmp_path, "score", warnings_out=warnings)
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert "step-000002" in warnings[0]


def test_there_is_no_best_where_nothing_was_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, {"a": {}})
    assert best(tmp_path, "score") is None
    assert best(tmp_path / "absent", "score") is None
    (tmp_path / "step-000001" / "manifest.json").write_text("{")
    assert best(tmp_path, "score") is None
    assert "cannot be read or is incomplete" in caplog.text
