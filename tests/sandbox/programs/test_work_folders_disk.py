"""The disk of one run: a program sees its rollout's files, and the rollout sees its changes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from toolwise.sandbox import scratch
from toolwise.sandbox.programs.program_sandbox import ProgramSandbox
from toolwise.sandbox.report import probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tiers for programs are Linux's")


@pytest.fixture(params=["own", "measured"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[ProgramSandbox]:
    if not probe("standard").complete:
        pytest.skip(str(probe("standard")))
    sandbox = ProgramSandbox("python", "standard", timeout_s=30.0, file_mb=1)
    if request.param == "measured":
        sandbox._plan = replace(sandbox._plan, own_disk=False)
    elif not sandbox.report().own_disk:
        pytest.skip("no file system can be mounted here")
    yield sandbox
    sandbox.close()


def _run(sandbox: ProgramSandbox, folder: Any, text: str) -> Any:
    return asyncio.run(sandbox.run(text, folder))


def test_files_are_copied_in_and_back(sandbox: ProgramSandbox) -> None:
    folder = sandbox.open_folder({"a/b.txt": "1", "gone": "2", "same": "3"})
    text = (
        "import os\nprint(open('a/b.txt').read()); open('a/b.txt', 'w').write('4'); os.remove('gone'); os.mkdir('new')"
    )
    assert _run(sandbox, folder, text).stdout == "1\n"
    assert sorted(str(p.relative_to(folder.work_path)) for p in folder.work_path.rglob("*")) == [
        "a",
        "a/b.txt",
        "new",
        "same",
    ]
    assert (folder.work_path / "a" / "b.txt").read_text() == "4"


def test_files_stay_after_a_program_that_fails(sandbox: ProgramSandbox) -> None:
    folder = sandbox.open_folder()
    assert _run(sandbox, folder, "open('a', 'w').write('1'); raise SystemExit(3)").kind == "exit"
    assert (folder.work_path / "a").read_text() == "1"


def test_concurrent_calls_keep_each_others_files(sandbox: ProgramSandbox) -> None:
    folder = sandbox.open_folder({"first": "1"})

    async def go() -> None:
        await asyncio.gather(*(sandbox.run(f"open('f{n}', 'w').write('{n}')", folder) for n in range(4)))

    asyncio.run(go())
    texts = {path.name: path.read_text() for path in folder.work_path.iterdir()}
    assert texts == {"first": "1", **{f"f{n}": f"{n}" for n in range(4)}}


def test_files_that_do_not_fit_are_too_big_and_the_next_call_works(sandbox: ProgramSandbox) -> None:
    folder = sandbox.open_folder({"large": "x" * 2_000_000})
    assert _run(sandbox, folder, "import time; time.sleep(1)").kind == "too_big"
    assert _run(sandbox, folder, "import os; print(os.listdir())").stdout == "[]\n"


def test_a_folder_that_is_slow_to_empty_is_emptied_all_the_same(
    sandbox: ProgramSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = scratch._unlink

    def slow_unlink(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.05)
        unlink(*args, **kwargs)

    folder = sandbox.open_folder({f"file{i}": "x" * 100_000 for i in range(24)})
    monkeypatch.setattr(scratch, "_unlink", slow_unlink)
    assert _run(sandbox, folder, "import time; time.sleep(1)").kind == "too_big"
    assert list(folder.work_path.iterdir()) == []


def test_nothing_of_a_call_outlives_it(sandbox: ProgramSandbox) -> None:
    folder = sandbox.open_folder()
    text = "import os, tempfile\nx = open('x', 'wb'); x.write(bytes(500_000)); os.unlink('x'); tempfile.mkstemp()"
    assert _run(sandbox, folder, text).kind == "ok"
    assert list(folder.path.rglob("*")) == [folder.work_path]
