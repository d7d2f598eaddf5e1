"""A tool's worker process at the operating system level."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from toolwise.sandbox.processes import describe_exit
from toolwise.tools.isolation.code_location import ModuleRef
from toolwise.tools.isolation.tool_process import ToolProcess, start_tool_process


@pytest.fixture
def process(tmp_path: Path) -> Iterator[ToolProcess]:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(1000)")
    made = start_tool_process(ModuleRef(None, str(tmp_path / "sleeps.py")))
    yield made
    made.kill()
    made.popen.wait(20)
    made.channel.close()
    made.close_pipes()


def test_it_has_a_session_of_its_own(process: ToolProcess) -> None:
    assert os.getsid(process.pid) == process.pid
    assert os.getpgid(process.pid) == process.pid


def test_its_death_is_seen_without_waiting_for_it(process: ToolProcess) -> None:
    process.watch_exit()
    assert not process.has_exited()
    process.kill()
    assert process.has_exited(20)
    if process.exit_fd is not None:
        assert process.popen.returncode is None
        os.close(process.exit_fd)
    assert process.popen.wait(20) in (-signal.SIGKILL, -signal.SIGTERM)  # SIGTERM if it had not started yet


def test_it_ends_when_the_trainers_end_of_its_life_is_closed(process: ToolProcess) -> None:
    assert select.select([process.output], [], [], 2)[0] == []  # by then it has reached the user's code
    os.close(process.lifeline)
    process.lifeline = os.open(os.devnull, os.O_RDONLY)
    assert process.popen.wait(20) == -signal.SIGKILL


def test_how_a_process_ends_in_words() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert describe_exit(-63) == "was killed by signal 63"
