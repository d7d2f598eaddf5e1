"""Resolving references without importing them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolwise.demo.reward import small_world_reward
from toolwise.errors import RewardError
from toolwise.sandbox.faults import WorkerFault
from toolwise.sandbox.targets import library_folders, package_folder, reference_of, resolve, within


def test_a_file_may_be_read_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text("raise RuntimeError('it must not be loaded here')")
    target = resolve(f"{path}:f")
    assert target.read == (str(path.resolve()),)
    assert target.reference == f"{path.resolve()}:f"
    assert resolve(str(path)).reference == str(path.resolve())


def test_a_link_is_followed_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text("")
    (tmp_path / "link.py").symlink_to(tmp_path / "real.py")
    assert resolve(f"{tmp_path / 'link.py'}:f").read == (str((tmp_path / "real.py").resolve()),)


def test_a_dotted_reference_reads_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "targets_test_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it must not be loaded here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = resolve("targets_test_package.inner:f")
    assert target.read == (str(package.resolve()),)
    assert target.top == {"name": package.name, "origin": str(package / "__init__.py"), "places": [str(package)]}
    assert package.name not in sys.modules


@pytest.mark.parametrize("reference", ["not/there.py:f", "no_such_module_here.x:f", ":f", ""])
def test_a_missing_target_is_an_import_fault(reference: str) -> None:
    with pytest.raises(WorkerFault) as caught:
        resolve(reference)
    assert caught.value.kind == "import"


def test_functions_have_references() -> None:
    assert reference_of(small_world_reward) == "toolwise.demo.reward:small_world_reward"
    for function in (lambda m, t: 1.0, len):
        with pytest.raises(RewardError, match="from its file"):
            reference_of(function)


def test_libraries_hold_the_standard_library_and_not_the_working_folder() -> None:
    folders = [Path(p).resolve() for p in library_folders()]
    assert any((folder / "json" / "__init__.py").exists() for folder in folders)
    assert any((folder / "pydantic" / "__init__.py").exists() for folder in folders)
    assert Path.cwd() not in folders
    assert (package_folder() / "messages.py").exists()


def test_within_follows_the_tree(tmp_path: Path) -> None:
    assert within(str(tmp_path / "a" / "b"), [str(tmp_path)])
    assert not within(str(tmp_path), [str(tmp_path / "a")])
