"""The tier `namespaced`: what a worker can see, as root and as another user; and machines without bubblewrap."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import abuse_cases as abuse
import pytest
from namespaces import needs_namespaces
from unprivileged import NOBODY, python_for_anybody, readable_copy

from toolwise.sandbox import Sandbox, SandboxError, report
from toolwise.sandbox.layers import bubblewrap
from toolwise.sandbox.layers.hardening import LAYERS
from toolwise.sandbox.layers.kernel import read_proc_stat
from toolwise.sandbox.report import probe

MESSAGES = [{"role": "user", "content": "hello"}]


class Ground(abuse.Ground):
    """The sandbox of the abuse suite, with namespaces."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sandbox.close()
        self.sandbox = Sandbox(
            "namespaced", timeout_s=abuse.TIMEOUT_S, memory_mb=128, file_mb=32, workers=2, require=True
        )

    def left_behind(self) -> list[str]:
        """Ignores running workers, which have three processes each."""
        known = set(self.sandbox.pids())
        left = [word for word in super().left_behind() if word.startswith("process ")]
        return [word for word in left if not _descends(int(word.split()[1]), known)]


def _descends(pid: int | None, known: set[int]) -> bool:
    while pid and pid not in known:
        pid = read_proc_stat(pid).parent
    return bool(pid)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        yield ground
        ground.close()


def _check(case: Any, ground: Ground) -> None:
    outcome = ground.run(case)
    # A hidden file does not exist: where Landlock denies access in `standard`, here it is not found.
    kinds = [*case.kind.split(), *(["exception", "import"] if "denied" in case.kind else [])]
    assert outcome.kind in kinds, outcome
    assert outcome.left_behind == [], outcome
    assert outcome.next_score == 0.25, outcome
    assert outcome.disk_mb <= outcome.disk_limit_mb, outcome
    assert case.score is None or outcome.score == case.score, outcome


@needs_namespaces
@pytest.mark.parametrize("case", abuse.CASES[::12], ids=lambda case: case.name)
def test_the_parent_survives_in_namespaces(case: Any, ground: Ground) -> None:
    _check(case, ground)


@needs_namespaces
@pytest.mark.long
@pytest.mark.parametrize("case", abuse.CASES, ids=lambda case: case.name)
def test_the_parent_survives_everything_in_namespaces(case: Any, ground: Ground) -> None:
    _check(case, ground)


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with Sandbox("namespaced", timeout_s=10.0, workers=1) as sandbox:
        yield sandbox


def _reward(folder: Path, body: str, name: str = "r") -> str:
    (folder / f"{name}.py").write_text(f"import os, sys\ndef f(messages, truth):\n    {body}\n")
    return f"{folder / f'{name}.py'}:f"


@needs_namespaces
def test_all_layers_are_active() -> None:
    found = probe("namespaced")
    assert tuple(found.layers) == LAYERS["namespaced"]
    assert found.got == "namespaced"
    assert "bubblewrap: user, pid, mnt, ipc, net" in str(found)


@needs_namespaces
def test_only_its_own_files_are_there(tmp_path: Path, sandbox: Sandbox) -> None:
    (tmp_path / "secret").write_text("x")
    reference = _reward(tmp_path, f"return float(os.path.lexists({str(tmp_path / 'secret')!r}))")
    assert sandbox.evaluate(reference, MESSAGES, None).score == 0.0
    reference = _reward(tmp_path, "return float(os.path.lexists('/etc/passwd') or os.path.lexists('/home'))", "s")
    assert sandbox.evaluate(reference, MESSAGES, None).score == 0.0


@needs_namespaces
def test_what_it_may_read_is_there(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("7")
    with Sandbox("namespaced", read=[tmp_path / "words"]) as sandbox:
        reference = _reward(tmp_path, f"return float(open({str(tmp_path / 'words')!r}).read())")
        assert sandbox.evaluate(reference, MESSAGES, None).score == 7.0


@needs_namespaces
def test_it_has_its_own_pid_namespace(tmp_path: Path, sandbox: Sandbox) -> None:
    assert sandbox.evaluate(_reward(tmp_path, "return float(os.getpid())"), MESSAGES, None).score in (2.0, 3.0)


@needs_namespaces
def test_it_writes_to_its_folder(tmp_path: Path, sandbox: Sandbox) -> None:
    body = "open('a', 'w').write('12'); return float(open('a').read())"
    assert sandbox.evaluate(_reward(tmp_path, body), MESSAGES, None).score == 12.0


@needs_namespaces
def test_a_worker_stays_warm_and_a_spare_sees_its_files_only(tmp_path: Path, sandbox: Sandbox) -> None:
    one = _reward(tmp_path, "return 1.0", "one")
    two = _reward(tmp_path, "return 2.0", "two")
    assert sandbox.evaluate(one, MESSAGES, None).score == 1.0
    before = sandbox.pids()[0]
    assert sandbox.evaluate(one, MESSAGES, None).score == 1.0
    assert before in sandbox.pids()
    assert sandbox.evaluate(two, MESSAGES, None).score == 2.0  # the spare was started for `one`
    failing = _reward(tmp_path, "1/0", "three")
    assert [sandbox.evaluate(failing, MESSAGES, None).score for _ in range(2)] == [None, None]


@needs_namespaces
def test_threads_left_behind_are_counted_from_outside(tmp_path: Path, sandbox: Sandbox) -> None:
    body = "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start(); return 1.0"
    reference = _reward(tmp_path, body)
    assert sandbox.evaluate(reference, MESSAGES, None).score == 1.0
    assert not sandbox._pool._idle.get(reference)


@needs_namespaces
def test_the_cause_of_death_is_reported(tmp_path: Path, sandbox: Sandbox) -> None:
    error = sandbox.evaluate(_reward(tmp_path, "os.abort()"), MESSAGES, None).error
    assert error is not None
    assert error.kind == "died"
    assert "SIGABRT" in error.message
    error = sandbox.evaluate(_reward(tmp_path, "os._exit(7)", "s"), MESSAGES, None).error
    assert error is not None
    assert "status 7" in error.message


@needs_namespaces
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user; all above ran as an unprivileged one")
def test_it_works_without_privileges() -> None:
    python = python_for_anybody()
    if python is None:
        pytest.skip("there is no Python that another user may run")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = readable_copy(folder)
        start = (folder / "run.py").read_text().partition("import abuse_cases")[0]
        (folder / "r.py").write_text("import os\ndef f(messages, truth): return float(os.path.lexists(truth))\n")
        (folder / "run.py").write_text(
            f"{start}from toolwise.sandbox import Sandbox\n"
            "with Sandbox('namespaced') as sandbox:\n"
            f"    result = sandbox.evaluate({str(folder / 'r.py')!r} + ':f', [], '/etc/passwd')\n"
            "    print(sandbox.describe(), result.score, result.error)\n"
        )
        who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        command = [python, str(folder / "run.py")]
        done = subprocess.run(command, **who, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "namespaces (" in done.stdout.partition("missing:")[0] or "it needs bubblewrap" in done.stdout
    if "missing: nothing" in done.stdout:
        assert done.stdout.endswith("missing: nothing 0.0 None\n")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where bwrap is installed but does not work."""
    monkeypatch.setattr(
        bubblewrap, "unavailable_reason", lambda network=False: "bwrap: No permissions to create new namespace"
    )
    monkeypatch.setattr(report, "unavailable_reason", bubblewrap.unavailable_reason)
    monkeypatch.setattr(report, "_cache", {})


@pytest.mark.skipif(sys.platform != "linux", reason="the standard tier is Linux's")
@pytest.mark.usefixtures("without")
def test_without_bubblewrap_the_other_layers_hold_and_a_warning_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Sandbox("namespaced") as sandbox:
        said = sandbox.describe()
        assert "missing: namespaces (bwrap: No permissions to create new namespace; it needs bubblewrap" in said
        assert "\n" not in said
        assert sandbox.report().got == probe("standard").got
        assert said in caplog.text
        assert sandbox.evaluate(_reward(tmp_path, "return 3.0"), MESSAGES, None).score == 3.0
        error = sandbox.evaluate(_reward(tmp_path, "open('/etc/passwd')", "s"), MESSAGES, None).error
        assert error is not None
        assert error.kind == "denied" or not probe("standard").complete


@pytest.mark.usefixtures("without")
def test_require_fails_without_bubblewrap() -> None:
    with pytest.raises(SandboxError, match=r"namespaces.*require=True"):
        Sandbox("namespaced", require=True)
