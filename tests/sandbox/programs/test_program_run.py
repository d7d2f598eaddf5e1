"""One program run: how an exit becomes a kind, and that a run can be stopped."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from toolwise.sandbox import SandboxError, process_limits
from toolwise.sandbox.layers.hardening import Plan
from toolwise.sandbox.layers.seccomp import allow_fork
from toolwise.sandbox.process_limits import MAX_PROCESSES
from toolwise.sandbox.programs import fork_gate
from toolwise.sandbox.programs.run import ProgramSpec, StopSignal, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")


def _order(folder: Path, text: str, *, timeout_s: float = 20.0, layers: tuple[str, ...] = ("limits",)) -> ProgramSpec:
    (folder / "work").mkdir(exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    plan = Plan(layers, str(folder / "work"), file_mb=4, write=(str(folder / "tmp"),))
    return ProgramSpec("python", text, plan, None, (folder / "work", folder / "tmp"), timeout_s, 1000)


@pytest.mark.parametrize(
    ("text", "kind", "status"),
    [
        ("print(1)", "ok", 0),
        ("raise SystemExit(9)", "exit", 9),
        ("raise SystemExit('words')", "exit", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "died", 139),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "timeout", 152),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXFSZ)", "ok", 0),  # which Python ignores
        ("import os; os._exit(200)", "exit", 200),
    ],
)
def test_exit_status_becomes_a_kind(tmp_path: Path, text: str, kind: str, status: int) -> None:
    result = run_program(_order(tmp_path, text), StopSignal())
    assert result is not None
    assert (result.kind, result.exit_status) == (kind, status)
    assert bool(result.message) == (kind != "ok")


def test_deeply_nested_json_on_the_status_pipe_is_ignored(tmp_path: Path) -> None:
    text = """
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, b"\\n" + b"[" * 30_000 + b"\\n")
    except OSError: pass
raise SystemExit(3)
"""
    result = run_program(_order(tmp_path, text), StopSignal())
    assert result is not None
    assert (result.kind, result.exit_status) == ("exit", 3)


def test_stdout_and_stderr_stay_apart(tmp_path: Path) -> None:
    result = run_program(_order(tmp_path, "import sys; print('a'); print('b', file=sys.stderr)"), StopSignal())
    assert result is not None
    assert (result.stdout, result.stderr) == ("a\n", "b\n")


def test_output_before_the_deadline_is_kept(tmp_path: Path) -> None:
    result = run_program(_order(tmp_path, "print('begun')\nwhile True: pass", timeout_s=0.5), StopSignal())
    assert result is not None
    assert (result.kind, result.stdout, result.exit_status) == ("timeout", "begun\n", None)
    assert 0.5 <= result.seconds < 5


def test_a_child_that_holds_the_pipes_does_not_block_the_run(tmp_path: Path) -> None:
    text = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(300)\nprint('gone')"
    result = run_program(_order(tmp_path, text), StopSignal())
    assert result is not None
    assert (result.kind, result.stdout) == ("ok", "gone\n")


def test_a_run_can_be_stopped(tmp_path: Path) -> None:
    stop = StopSignal()
    timer = threading.Timer(0.5, stop.request_stop)
    timer.start()
    assert run_program(_order(tmp_path, "while True: pass", timeout_s=60), stop) is None
    timer.join()
    stop.request_stop()  # a second, late request does no harm


def test_a_missing_layer_prevents_the_run(tmp_path: Path) -> None:
    order = _order(tmp_path, "open('ran', 'w')", layers=("namespaces", "limits"))
    with pytest.raises(SandboxError, match="namespaces"):
        run_program(order, StopSignal())
    assert not (tmp_path / "work" / "ran").exists()


def test_a_missing_folder_is_a_sandbox_error(tmp_path: Path) -> None:
    order = _order(tmp_path, "print(1)")
    with pytest.raises(SandboxError, match="cannot start a process"):
        run_program(replace(order, folders=(tmp_path / "nowhere",)), StopSignal())


CHILDREN = "for i in $(seq 1000); do sleep 100 & done; wait"
FILTERED = ("limits", "no_new_privs", "seccomp")


def _shell_order(folder: Path, text: str) -> ProgramSpec:
    order = _order(folder, text, layers=FILTERED)
    return replace(order, language="shell", plan=replace(order.plan, permissions=("subprocess",), memory_mb=256))


@pytest.mark.parametrize("asked", [True, False])
def test_a_fork_bomb_is_detected(tmp_path: Path, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    births: list[int] = []

    def count(listener: int) -> None:
        births.append(listener)
        allow_fork(listener)

    monkeypatch.setattr(fork_gate, "allow_fork", count)
    # A fast bomb passes both limits at one check. A slow one has a process more when its threads are counted.
    monkeypatch.setattr(process_limits, "MAX_THREADS", 2 * MAX_PROCESSES)
    if not asked:  # as on a kernel without listeners
        monkeypatch.setattr(ProgramSpec, "needs_fork_approval", False)
    result = run_program(_shell_order(tmp_path, CHILDREN), StopSignal())
    assert result is not None
    assert result.kind == "too_big"
    assert "processes" in result.message
    assert (0 < len(births) <= 2 * MAX_PROCESSES) if asked else not births


def test_many_short_lived_children_are_not_a_fork_bomb(tmp_path: Path) -> None:
    result = run_program(_shell_order(tmp_path, "for i in $(seq 200); do /bin/true; done; echo all"), StopSignal())
    assert result is not None
    assert (result.kind, result.stdout) == ("ok", "all\n")


def test_the_listener_is_not_inherited_and_gets_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inheritable = []

    def look(listener: int) -> None:
        inheritable.append(os.get_inheritable(listener))
        allow_fork(listener)

    monkeypatch.setattr(fork_gate, "allow_fork", look)
    before = set(os.listdir("/proc/self/fd"))
    result = run_program(_shell_order(tmp_path, "/bin/true; echo $(ls /proc/self/fd)"), StopSignal())
    assert result is not None
    assert result.stdout.split() == ["0", "1", "2", "3"], "the program has what `ls` opened and nothing of ours"
    assert inheritable
    assert not any(inheritable)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_lost_listener_is_a_sandbox_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_gate.socket.socket, "recvmsg", lambda *_: (b"x", [], 0, None))
    with pytest.raises(SandboxError, match="too many open files"):
        run_program(_shell_order(tmp_path, "/bin/true"), StopSignal())


def test_forks_that_cannot_be_answered_are_a_sandbox_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(listener: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fork_gate, "allow_fork", fail)
    with pytest.raises(SandboxError, match="Invalid argument"):
        run_program(_shell_order(tmp_path, "/bin/true; /bin/true"), StopSignal())
