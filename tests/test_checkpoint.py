"""Checkpoints: bit-exact round trips, every place to die, and what is said of a damaged one."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from toolwise import checkpoint
from toolwise.checkpoint import Registry, latest, load, save
from toolwise.errors import CheckpointError


class Part:
    """The least that can be registered."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_the_registry_saves_and_restores_every_part(tmp_path: Path) -> None:
    registry, other = Registry(), Registry()
    parts = {"a": Part([1]), "b": Part((2,))}
    fresh = {"a": Part(None), "b": Part(None)}
    for name in parts:
        registry.register(name, parts[name])
        other.register(name, fresh[name])
    other.load_state_dict(save(tmp_path, 1, registry.state_dict()).state())
    assert (fresh["a"].value, fresh["b"].value) == ([1], (2,))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "manifest", "a b"])
def test_a_part_has_a_name_that_can_be_a_file(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a part"):
        Registry().register(name, Part(1))


def test_a_name_is_registered_once() -> None:
    registry = Registry()
    registry.register("router", Part(1))
    with pytest.raises(ValueError, match="'router' is registered already"):
        registry.register("router", Part(2))


def test_a_checkpoint_of_other_parts_is_refused_and_nothing_is_touched() -> None:
    registry = Registry()
    part = Part(1)
    registry.register("learner", part)
    registry.register("router", Part(2))
    with pytest.raises(CheckpointError, match="lacks router; it has critic, unknown to this run"):
        registry.load_state_dict({"learner": {"value": 9}, "critic": {}})
    assert part.value == 1


def write_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "shards").mkdir()
    (folder / "shards" / "one.safetensors").write_bytes(b"weights")


def test_a_model_folder_travels_with_the_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 4, {"a": {}}, extra_files={"model": write_model}).path
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["a.json", "model/config.json", "model/shards/one.safetensors"]
    (path / "model" / "shards" / "one.safetensors").write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match=r"one\.safetensors is not what was saved"):
        load(path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, {"a": {"step": step}}, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000007"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    for step in (1, 2):
        save(tmp_path, step, {"a": {}}, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000002", "step-by-step"]


def test_what_was_just_written_is_kept_even_beside_a_later_step(tmp_path: Path) -> None:
    save(tmp_path, 20, {"a": {}})
    save(tmp_path, 11, {"a": {}}, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000011", "step-000020"]


def test_a_damaged_one_does_not_take_the_place_of_a_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"a": {}}, keep_last=3)
    (tmp_path / "step-000003" / "a.json").write_text("")
    save(tmp_path, 4, {"a": {}}, keep_last=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000004"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, {"a": {"n": 1}, "b": {}})
    save(tmp_path, 5, {"a": {"n": 2}})
    assert load(tmp_path / "step-000005").state() == {"a": {"n": 2}}
    assert [p.name for p in tmp_path.iterdir()] == ["step-000005"]


def test_leftovers_of_a_crash_are_swept_up(tmp_path: Path) -> None:
    for name in ("step-000001.tmp-77", "step-000002.old-77-abc"):
        (tmp_path / name / "model").mkdir(parents=True)
    save(tmp_path, 3, {"a": {}})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def test_a_full_disk_is_one_line_and_leaves_the_last_one_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": {}})

    def fill(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"cannot write .*step-000002: No space left on device"):
        save(tmp_path, 2, {"a": {}}, extra_files={"model": fill})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_state_outlives_its_files(tmp_path: Path) -> None:
    state = save(tmp_path, 1, {"a": {"w": torch.ones(4)}}).state()
    save(tmp_path, 2, {"a": {}}, keep_last=1)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "a.safetensors" not in maps.read_text()
    assert state["a"]["w"].tolist() == [1.0] * 4


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
        changed["seal"] = checkpoint._Manifest.model_validate(changed).digest()
    (path / "manifest.json").write_text(json.dumps(changed))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 99, "reseal": True}, "has format 99, this version of toolwise reads 1"),
        ({"step": 8, "reseal": True}, "is of step 8, but its folder is called step-000007"),
        ({"files": {"x.json": {"size": 1, "sha256": ""}}, "reseal": True}, r"x\.json is missing"),
        ({"parts": [], "reseal": False}, r"manifest\.json was changed after it was written"),
        ({"files": 3, "reseal": False}, r"manifest\.json cannot be read or is torn"),
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
    with pytest.raises(CheckpointError, match=r"no whole checkpoint: .*manifest\.json is missing"):
        load(tmp_path / "nowhere")


def test_a_part_that_cannot_be_read_back_is_named(tmp_path: Path) -> None:
    found = save(tmp_path, 1, {"a": {"w": torch.ones(1)}})
    (found.path / "a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.json cannot be restored") as caught:
        found.state()
    assert "\n" not in str(caught.value)


class Died(BaseException):
    """The process is gone: no handler of ours may help it any more."""


class Disk:
    """Counts what is done to the disk and fails at the nth thing and ever after, as a dead process would."""

    def __init__(self, die_at: int | None) -> None:
        self.die_at = die_at
        self.count = 0
        self.unsynced: list[Path] = []
        self.renames: list[tuple[Path, Path]] = []

    def act(self) -> None:
        self.count += 1
        if self.die_at is not None and self.count >= self.die_at:
            raise Died

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.act()
            return real(*args, **kwargs)

        return wrapped

    def fsync(self, handle: int) -> None:
        self.act()
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        self.unsynced = [p for p in self.unsynced if p != path]
        self.renames = [pair for pair in self.renames if pair[0].parent != path]

    def rename(self, source: Path, target: Path) -> None:
        self.act()
        REAL_RENAME(source, target)
        self.renames.append((Path(source), Path(target)))
        self.unsynced = [Path(target) / p.relative_to(source) if p.is_relative_to(source) else p for p in self.unsynced]

    def open(self, path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode:
            return REAL_OPEN(path, mode, *args, **kwargs)
        self.act()
        file = REAL_OPEN(path, mode, *args, **kwargs)
        self.unsynced.append(Path(path))
        if self.die_at == self.count + 1:  # dies in the write itself: the file is there and empty
            file.close()
        self.act()
        return file

    def save_file(self, tensors: Any, path: Path) -> None:
        self.act()
        REAL_SAVE_FILE(tensors, path)
        self.unsynced.append(path)
        self.act()


REAL_RENAME, REAL_OPEN, REAL_SAVE_FILE = os.rename, io.open, safetensors.torch.save_file


@contextmanager
def dying(die_at: int | None) -> Iterator[Disk]:
    disk = Disk(die_at)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, disk.wrap(getattr(os, name)))
        patch.setattr(os, "fsync", disk.fsync)
        patch.setattr(os, "rename", disk.rename)
        patch.setattr(io, "open", disk.open)
        patch.setattr(safetensors.torch, "save_file", disk.save_file)
        yield disk


def state_of(step: int, version: int) -> dict[str, Any]:
    return {"a": {"w": torch.full((5,), float(step)), "version": version}, "b": {"at": step}}


def write(folder: Path, step: int, version: int, keep_last: int) -> None:
    save(folder, step, state_of(step, version), extra_files={"model": write_model}, keep_last=keep_last)


def aftermath(disk: Disk, how: str) -> None:
    """What a power cut does on top of the death: data and names that were never synced may be lost."""
    if how == "torn":
        for path in disk.unsynced:
            if path.exists():
                data = path.read_bytes()
                path.write_bytes(data[: len(data) // 2])
    if how == "names lost":
        for source, target in reversed(disk.renames):
            if target.exists():
                REAL_RENAME(target, source)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell which file is synced")
@pytest.mark.parametrize("how", ["clean", "torn", "names lost"])
@pytest.mark.parametrize(
    ("before", "step", "keep_last"),
    [((1, 2), 3, 2), ((1, 2, 3), 3, 3), ((3,), 3, 1), ((2,), 3, 1)],
    ids=["next", "again", "the only one again", "keep one"],
)
def test_wherever_it_dies_there_is_a_whole_checkpoint(
    tmp_path: Path, before: tuple[int, ...], step: int, keep_last: int, how: str
) -> None:
    def prepare(folder: Path) -> None:
        for earlier in before:
            write(folder, earlier, version=1, keep_last=keep_last)
        (folder / "step-000002.tmp-99").mkdir()
        (folder / "step-000002.tmp-99" / "half.json").write_text("{")

    prepare(tmp_path / "whole")
    with dying(None) as disk:
        write(tmp_path / "whole", step, version=2, keep_last=keep_last)
    assert disk.count > 30
    expected = {1: {max(before)}, 2: {step}}
    for die_at in range(1, disk.count + 1):
        folder = tmp_path / f"at-{die_at}"
        prepare(folder)
        with dying(die_at) as disk, pytest.raises(Died):
            write(folder, step, version=2, keep_last=keep_last)
        aftermath(disk, how)
        if how == "clean":
            assert all(load(path) for path in folder.iterdir() if "." not in path.name)
        found = latest(folder, warnings_out=[])
        assert found is not None, die_at
        state = found.state()
        assert found.step in expected[state["a"]["version"]], die_at
        expected_state = state_of(found.step, state["a"]["version"])
        assert torch.equal(state["a"].pop("w"), expected_state["a"].pop("w")), die_at
        assert state == expected_state, die_at
        write(folder, step + 1, version=3, keep_last=keep_last)
        newest = latest(folder)
        assert newest is not None
        assert newest.step == step + 1
        names = [p.name for p in folder.iterdir()]
        assert not [name for name in names if "." in name], die_at
        assert len(names) <= keep_last


def test_importing_the_module_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import sys, toolwise.checkpoint; sys.exit('torch' in sys.modules)"
    source = str(Path(checkpoint.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}).returncode == 0
