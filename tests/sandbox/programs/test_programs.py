"""Programs written by a model: each outcome gets its kind, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import program_cases as cases
import pytest
from namespaces import NAMESPACED
from unprivileged import NOBODY, python_for_anybody, readable_copy

from toolwise.errors import DataError
from toolwise.sandbox import SandboxError, report
from toolwise.sandbox.programs.program_sandbox import MAX_PROGRAM_BYTES, ProgramSandbox
from toolwise.sandbox.report import Report, probe
from toolwise.tools import isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tiers for programs are Linux's")


def _need(tier: Any) -> None:
    found = probe(tier, ("subprocess",))
    if not found.complete:
        pytest.skip(str(found))


@pytest.fixture(scope="module", params=[NAMESPACED, "standard"])
def ground(request: pytest.FixtureRequest) -> Iterator[Any]:
    _need(request.param)
    with tempfile.TemporaryDirectory() as folder, cases.ground_in(Path(folder), request.param) as ground:
        yield request.param, ground


def _check(case: Any, outcome: dict[str, Any]) -> None:
    assert outcome["kind"] in case.kind.split(), outcome
    assert case.says in outcome["said"], outcome
    assert cases.SECRET not in outcome["said"], outcome
    assert outcome["left"] == [], outcome
    assert outcome["disk_mb"] <= outcome["disk_limit_mb"], outcome
    assert not outcome["late"], outcome


def _sample(every: int, first: int = 0) -> list[Any]:
    """The cases about files; most are `long` tests."""
    chosen = cases.FILES[first::every]
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.long, id=case.name) for case in cases.FILES]


OTHERS = [pytest.param(case, id=case.name) for case in cases.CASES if case not in cases.FILES]


@pytest.fixture(scope="module")
def measured() -> Iterator[Any]:
    """Simulates a machine where a program cannot have its own file system."""
    _need("standard")
    with (
        tempfile.TemporaryDirectory() as folder,
        cases.ground_in(Path(folder), "standard", own_disk=False) as ground,
    ):
        yield ground


@pytest.mark.parametrize("case", _sample(5, 1))
def test_a_program_can_do_no_harm_where_disks_are_measured(case: Any, measured: Any) -> None:
    _check(case, cases.asdict(measured.run(case)))


@pytest.mark.parametrize("case", [*OTHERS, *_sample(3)])
def test_a_program_can_do_no_harm(case: Any, ground: Any) -> None:
    tier, place = ground
    if tier not in case.tiers:
        pytest.skip(f"{case.name} is about {case.tiers[0]}")
    _check(case, cases.asdict(place.run(case)))


@pytest.fixture(scope="module", params=[NAMESPACED, "standard"])
def unprivileged(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The outcomes of the cases run by an unprivileged user."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user; the cases above ran as an unprivileged one")
    python = python_for_anybody()
    if python is None:
        pytest.skip("there is no Python that another user may run")
    with tempfile.TemporaryDirectory(prefix="toolwise-nobody-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = readable_copy(folder, "program_cases")
        (folder / "ground").mkdir()
        os.chown(folder / "ground", NOBODY, NOBODY)
        done = subprocess.run(
            [python, str(folder / "run.py"), str(folder / "ground"), request.param],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            env=environment,
            cwd=folder / "ground",
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        if done.returncode != 0 and "namespaces (" in done.stderr.splitlines()[-1]:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["uid"] for line in lines} == {NOBODY}
    return request.param, {line["name"]: line["outcome"] for line in lines}


@pytest.mark.parametrize("case", cases.WHERE_PRIVILEGES_MATTER, ids=lambda case: case.name)
def test_a_program_can_do_no_harm_without_privileges(case: Any, unprivileged: tuple[str, dict[str, Any]]) -> None:
    tier, outcomes = unprivileged
    if tier not in case.tiers:
        pytest.skip(f"{case.name} is about {case.tiers[0]}")
    _check(case, outcomes[case.name])


@pytest.fixture
def python() -> Iterator[ProgramSandbox]:
    sandbox = ProgramSandbox("python", timeout_s=30.0, file_mb=1)
    yield sandbox
    sandbox.close()


async def _wait_for_file(path: Path, name: str, trainer: int | None = None) -> None:
    """Wait until a program has created a file, which may be visible only to itself."""
    end = time.monotonic() + 20
    while not any(
        Path(f"/proc/{pid}/root{folder}/{name}").exists()
        for pid in cases.descendants_of(trainer or os.getpid())
        for folder in (path, "/sandbox")
    ):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.namespaced
@pytest.mark.parametrize("language", ["python", "shell"])
def test_cancelling_twice_leaves_nothing(language: Any) -> None:
    _need("namespaced")
    sandbox = ProgramSandbox(language, timeout_s=60.0)
    text = {
        "python": "open('begun', 'w').close()\nsum(range(10**12))",
        "shell": "(setsid sleep 500 &); touch begun; sleep 500",
    }[language]

    async def go() -> None:
        folder = sandbox.open_folder()
        root = folder.path.parent
        task = asyncio.create_task(sandbox.run(text, folder))
        await _wait_for_file(folder.work_path, "begun")
        assert cases.processes_of(root)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cases.processes_of(root) == []
        assert list(folder.path.iterdir()) == [folder.work_path]
        await sandbox.close_folder(folder)
        assert not root.exists()

    asyncio.run(go())
    sandbox.close()


def test_a_cancelled_release_still_removes_the_folder(python: ProgramSandbox) -> None:
    async def go() -> None:
        folder = python.open_folder({"a/b.txt": "x"})
        task = asyncio.create_task(python.close_folder(folder))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not folder.path.exists()

    asyncio.run(go())


def test_queued_programs_can_be_cancelled() -> None:
    sandbox = ProgramSandbox("python", timeout_s=60.0, at_once=1)

    async def go() -> None:
        folder = sandbox.open_folder()
        first = asyncio.create_task(sandbox.run("open('begun', 'w').close()\nwhile True: pass", folder))
        await _wait_for_file(folder.work_path, "begun")
        second = asyncio.create_task(sandbox.run("open('never', 'w').close()", folder))
        await asyncio.sleep(0.05)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not (folder.work_path / "never").exists()
        await sandbox.close_folder(folder)

    asyncio.run(go())
    sandbox.close()


def test_files_stay_and_variables_do_not(python: ProgramSandbox) -> None:
    async def go() -> None:
        folder = python.open_folder({"data/rows.csv": "1,2\n"})
        assert (await python.run("x = open('data/rows.csv').read(); open('kept', 'w').write(x)", folder)).kind == "ok"
        assert (await python.run("open('kept').read()", folder)).stdout == "'1,2\\n'\n"
        assert "NameError" in (await python.run("x", folder)).stderr
        other = python.open_folder()
        assert (await python.run("import os; os.listdir('.')", other)).stdout == "[]\n"
        await python.close_folder(folder)
        await python.close_folder(other)

    asyncio.run(go())


def test_a_rollout_does_not_see_another(python: ProgramSandbox) -> None:
    async def go() -> Any:
        mine, other = python.open_folder(), python.open_folder({"secret": "abc"})
        return await python.run(f"open({str(other.work_path / 'secret')!r}).read()", mine)

    assert "abc" not in asyncio.run(go()).stdout


def test_an_overfilled_folder_is_emptied(python: ProgramSandbox) -> None:
    async def go() -> None:
        folder = python.open_folder()
        text = "for i in range(3): open(f'f{i}', 'wb').write(b'x' * 900_000)"
        assert (await python.run(text, folder)).kind == "too_big"
        assert (await python.run("import os; os.listdir('.')", folder)).stdout == "[]\n"

    asyncio.run(go())


def test_programs_run_side_by_side(python: ProgramSandbox) -> None:
    async def go() -> list[Any]:
        folder = python.open_folder()
        return await asyncio.gather(*(python.run(f"{n} * {n}", folder) for n in range(6)))

    assert [result.stdout for result in asyncio.run(go())] == [f"{n * n}\n" for n in range(6)]


def test_the_same_program_prints_the_same(python: ProgramSandbox) -> None:
    async def go() -> set[str]:
        folder = python.open_folder()
        return {(await python.run("list({'a', 'b', 'c', 'd', 'e'})", folder)).stdout for _ in range(3)}

    assert len(asyncio.run(go())) == 1


def test_a_program_that_is_too_long_is_not_run(python: ProgramSandbox) -> None:
    result = asyncio.run(python.run("#" * (MAX_PROGRAM_BYTES + 1), python.open_folder()))
    assert (result.kind, result.exit_status) == ("too_big", None)


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b"])
def test_task_files_cannot_lie_outside_the_folder(python: ProgramSandbox, name: str) -> None:
    with pytest.raises(DataError, match="files"):
        python.open_folder({name: "x"})


def test_the_network_is_a_permission() -> None:
    import socket

    sandbox = ProgramSandbox("python", permissions=["network"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]})).close()"
        assert asyncio.run(sandbox.run(text, sandbox.open_folder())).kind == "ok"
    if "namespaces" in sandbox.report().layers:
        assert "the network is the host's" in str(sandbox.report())
    sandbox.close()


def test_closing_ends_what_runs_and_removes_everything() -> None:
    sandbox = ProgramSandbox("python", timeout_s=60.0)
    folder = sandbox.open_folder()

    async def go() -> None:
        task = asyncio.create_task(sandbox.run("open('begun', 'w').close()\nwhile True: pass", folder))
        await _wait_for_file(folder.work_path, "begun")
        await asyncio.to_thread(sandbox.close)
        with pytest.raises(SandboxError, match="closed"):
            await task

    asyncio.run(go())
    assert not folder.path.parent.exists()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.open_folder()


@pytest.mark.namespaced
def test_a_trainer_that_is_killed_leaves_no_program(tmp_path: Path) -> None:
    _need("namespaced")
    source = (
        "import asyncio, sys\nfrom toolwise.sandbox.programs.program_sandbox import ProgramSandbox\n"
        "sandbox = ProgramSandbox('shell', timeout_s=100)\nfolder = sandbox.open_folder()\n"
        "print(folder.path.parent, flush=True)\n"
        "asyncio.run(sandbox.run('(setsid sleep 500 &); touch begun; sleep 500', folder))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(tmp_path)}
    trainer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment)
    assert trainer.stdout is not None
    root = Path(trainer.stdout.readline().strip())
    asyncio.run(_wait_for_file(root / "1" / "work", "begun", trainer.pid))
    left = [Path(f"/proc/{pid}") for pid in cases.descendants_of(trainer.pid)]
    assert len(left) > 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    end = time.monotonic() + 5
    while any(map(_is_alive, left)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(_is_alive, left))


def _is_alive(place: Path) -> bool:
    try:
        return (place / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


WITHOUT = Report(
    "namespaced",
    "standard",
    dict.fromkeys(("limits", "capabilities", "no_new_privs", "landlock", "seccomp"), "got"),
    {"namespaces": "bwrap is not installed"},
)


def test_python_without_namespaces_runs_hardened_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(report._cache, ("namespaced", ()), WITHOUT)
    with caplog.at_level(logging.WARNING):
        sandbox = ProgramSandbox("python")
    assert "missing: namespaces (bwrap is not installed; it needs bubblewrap" in caplog.text
    result = asyncio.run(sandbox.run("import os; os.getppid() == 1, open('/etc/passwd')", sandbox.open_folder()))
    assert result.kind == "denied"
    sandbox.close()
    with pytest.raises(SandboxError, match="require=True"):
        ProgramSandbox("python", require=True)


def test_a_shell_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report._cache, ("namespaced", ("subprocess",)), WITHOUT)
    with pytest.raises(SandboxError, match=r"bubblewrap.*tier='standard' with permissions=\['subprocess'\]"):
        ProgramSandbox("shell")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"language": "perl"}, "perl"),
        ({"tier": "off"}, "off"),
        ({"tier": "strict"}, "strict"),
        ({"language": "shell", "tier": "standard"}, "subprocess"),
        ({"language": "shell", "tier": "basic", "permissions": ["subprocess"]}, "basic"),
        ({"permissions": ["everything"]}, "everything"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"at_once": 0}, "at_once"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(SandboxError, match=word) as error:
        ProgramSandbox(**{"language": "python", **settings})
    assert "\n" not in str(error.value)


def test_no_threads_or_descriptors_grow() -> None:
    async def go(times: int) -> None:
        folder = sandbox.open_folder()
        await asyncio.gather(*(sandbox.run("1", folder) for _ in range(times)))
        await sandbox.close_folder(folder)

    isolation.close()  # tool workers of other tests may start and end at any time
    with closing(ProgramSandbox("python", timeout_s=30.0, at_once=2)) as sandbox:
        asyncio.run(go(4))
        before, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
        asyncio.run(go(8))
        assert len(os.listdir("/proc/self/fd")) <= before
        # The pool starts up to two threads on demand, at unpredictable times.
        assert set(threading.enumerate()) <= threads | sandbox._threads._threads
