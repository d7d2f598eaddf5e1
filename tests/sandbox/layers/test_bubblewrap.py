"""What is mounted for a process in namespaces, and how its exit is reported."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest
from namespaces import needs_namespaces

from toolwise.sandbox.layers import bubblewrap
from toolwise.sandbox.layers.bubblewrap import (
    MountView,
    _follow,
    _mounts,
    bwrap_command,
    host_namespaces,
    unavailable_reason,
    worker_view,
)
from toolwise.sandbox.process_tree import NamespacedTree, _read_child
from toolwise.sandbox.processes import launch

SYSTEM = tuple(bubblewrap.readable_paths(bubblewrap.readable_folders(), ("subprocess",)))


def test_links_on_the_way_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("x")
    (tmp_path / "one").symlink_to("real")
    (tmp_path / "two").symlink_to(tmp_path / "one" / "file")
    links: dict[str, str] = {}
    root = str(tmp_path.resolve())
    assert _follow(f"{root}/two", links) == f"{root}/real/file"
    assert links == {f"{root}/two": f"{tmp_path}/one/file", f"{root}/one": "real"}


def test_a_processs_number_is_read_by_a_trainer_with_many_open_files() -> None:
    low, theirs = os.pipe()
    info = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1100)
    os.write(theirs, b'{"child-pid": 17}')
    assert _read_child(info) == 17
    for descriptor in (low, theirs, info):
        os.close(descriptor)


def test_links_without_an_end_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert _follow(str(tmp_path / "a"), {}) is None
    assert _follow(str(tmp_path / "nothing"), {}) is None


def test_nested_mounts_come_after_their_parents(tmp_path: Path) -> None:
    root = str(tmp_path.resolve())
    (tmp_path / "a" / "b").mkdir(parents=True)
    words = _mounts([f"{root}/a/b", root], [(f"{root}/a", ("--bind", f"{root}/a"))])
    assert words == ["--ro-bind", root, root, "--bind", f"{root}/a", f"{root}/a"]
    words = _mounts([f"{root}/a"], [("/tmp", ("--bind", root))])
    assert words.index("--bind") < words.index("--ro-bind") or not root.startswith("/tmp")


def test_devices_are_not_bound() -> None:
    assert _mounts(["/dev/null", "/proc/self"], []) == []


def test_no_view_without_the_layer() -> None:
    assert worker_view(("limits",), (), "/tmp", ()) is None
    assert host_namespaces(None) == ()


def test_a_missing_bwrap_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    unavailable_reason.cache_clear()
    try:
        assert unavailable_reason() in ("bwrap is not installed", f"this is {sys.platform}")
    finally:
        unavailable_reason.cache_clear()


@needs_namespaces
def test_the_error_of_bwrap_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    unavailable_reason.cache_clear()
    try:
        assert unavailable_reason() == "bwrap: No permissions"
    finally:
        unavailable_reason.cache_clear()
        bubblewrap._bwrap_help.cache_clear()


def _run(tmp_path: Path, text: str) -> NamespacedTree:
    view = MountView(SYSTEM, ((str(tmp_path), "/sandbox"),), "/sandbox")
    started = launch(["/bin/sh", "-c", text], {"PATH": "/bin:/usr/bin"}, tmp_path, view=view)
    assert isinstance(started, NamespacedTree)
    return started


@needs_namespaces
def test_returncode_is_like_popen(tmp_path: Path) -> None:
    assert _run(tmp_path, "exit 3").wait() == 3
    assert _run(tmp_path, "kill -9 $$").wait() == -9
    assert _run(tmp_path, "exit 200").wait() == 200


@needs_namespaces
def test_the_first_process_is_known_and_all_end_with_it(tmp_path: Path) -> None:
    monitor = _run(tmp_path, "(setsid sleep 300 &); touch up; sleep 300")
    while not (tmp_path / "up").exists():
        assert monitor.poll() is None
    first = monitor.first()
    assert first
    assert b"sleep" in Path(f"/proc/{first}/cmdline").read_bytes()
    init = monitor.init
    monitor.kill()
    monitor.wait()
    assert not Path(f"/proc/{init}").exists()
    assert not Path(f"/proc/{first}").exists()


@needs_namespaces
def test_nothing_but_its_folder_can_be_written(tmp_path: Path) -> None:
    places = "/ /usr /dev /dev/shm /proc/sys/kernel"
    text = f"for place in {places}; do touch $place/x && echo $place >> bad; done 2>/dev/null; touch ok"
    assert _run(tmp_path, text).wait() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ok"]


@needs_namespaces
def test_the_host_network_stays_with_the_permission_only() -> None:
    private, shared = MountView(SYSTEM, (), "/"), MountView(SYSTEM, (), "/", network=True)
    assert "--unshare-net" in bwrap_command(private)
    assert "--unshare-net" not in bwrap_command(shared)
    assert len(host_namespaces(private)) == len(host_namespaces(shared)) + 1
