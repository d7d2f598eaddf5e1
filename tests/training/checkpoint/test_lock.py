"""One process per folder: the second learns who holds the lock, and dead processes hold none."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolwise
from toolwise.errors import CheckpointError
from toolwise.training.checkpoint import FolderLock

HOLD = """
import sys
from toolwise.training.checkpoint import FolderLock
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of `tmp_path` until its input ends."""
    environment = {**os.environ, "PYTHONPATH": str(Path(toolwise.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_second_process_learns_who_holds_the_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} is in use by process {holder.pid}: wait") as caught:
        FolderLock(tmp_path).acquire()
    assert "\n" not in str(caught.value)


def test_a_killed_process_holds_nothing(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / ".lock").exists()
    with FolderLock(tmp_path):
        assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())


def test_a_process_that_ends_leaves_no_file(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.communicate()
    assert holder.returncode == 0
    assert list(tmp_path.iterdir()) == []
    with FolderLock(tmp_path):
        pass


def test_the_same_process_cannot_be_there_twice(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}:"):
            FolderLock(tmp_path).acquire()
        with FolderLock(tmp_path.parent):  # another folder is another lock
            pass
    with FolderLock(tmp_path):
        pass


def test_it_is_let_go_when_the_work_fails(tmp_path: Path) -> None:
    def work() -> None:
        with FolderLock(tmp_path):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        work()
    assert list(tmp_path.iterdir()) == []


def test_to_let_go_twice_does_no_harm(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path).acquire()
    assert lock.acquire() is lock
    lock.release()
    other = FolderLock(tmp_path).acquire()
    lock.release()
    assert (tmp_path / ".lock").exists()
    other.release()


def test_a_fork_that_outlives_its_parent_does_not_hold_on(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path).acquire()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(CheckpointError, match="in use"):  # the fork's exit does not unlock it for the parent
            FolderLock(tmp_path).acquire()
        lock.release()
        with FolderLock(tmp_path):
            pass
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


def test_a_deleted_lock_file_is_not_the_lock(tmp_path: Path) -> None:
    """Whoever comes between another's opening and locking must not hold a file that nobody else can find."""
    lock = FolderLock(tmp_path).acquire()
    (tmp_path / ".lock").unlink()
    other = FolderLock(tmp_path).acquire()
    lock.release()
    with pytest.raises(CheckpointError, match="in use"):
        FolderLock(tmp_path).acquire()
    other.release()


def test_without_lock_support_the_run_continues_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock(tmp_path):
        assert "cannot be locked (No locks available): do not start a second run in this folder" in caplog.text


def test_a_holder_without_a_name_is_another_process(tmp_path: Path) -> None:
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(CheckpointError, match="in use by another process:"):
            FolderLock(tmp_path).acquire()
        os.write(handle, b"123 elsewhere\n")
        with pytest.raises(CheckpointError, match="in use by process 123 on elsewhere:"):
            FolderLock(tmp_path).acquire()
    finally:
        os.close(handle)
