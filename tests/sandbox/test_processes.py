"""Worker processes: their environment and how they are ended."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.rollout.agents.agent_process import AgentProcess
from toolwise.sandbox.process_tree import sweep_leftovers
from toolwise.sandbox.processes import clean_environment, start_process
from toolwise.tools.isolation.code_location import ModuleRef
from toolwise.tools.isolation.tool_process import start_tool_process


def test_the_environment_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    names = set(clean_environment(tmp_path, tmp_path))
    assert "SECRET_KEY" not in names
    assert clean_environment(tmp_path, tmp_path)["HOME"] == str(tmp_path)


@pytest.mark.parametrize(
    "start",
    [
        lambda: start_tool_process(ModuleRef(None, "tools.py")),
        lambda: AgentProcess(["agent"], dict(os.environ), worker=False),
    ],
    ids=["tool", "agent"],
)
def test_no_process_gets_the_token_of_the_cluster(start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    def popen(command_line: list[str], *, env: dict[str, str], **settings: Any) -> None:
        environments.append(env)
        raise OSError("not started")

    monkeypatch.setattr("subprocess.Popen", popen)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "OTHER_KEY"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(OSError, match="not started"):
        start()
    [environment] = environments
    assert "OTHER_KEY" in environment
    assert not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & environment.keys()


def test_a_process_has_its_own_session_and_ends_with_its_folder(tmp_path: Path) -> None:
    scratch = tmp_path / "1"
    scratch.mkdir()
    process = start_process(scratch)
    assert select.select([process.channel], [], [], 30)[0]
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert process.threads() in (1, None)
    assert process.end(sweep=True) == -9
    assert not scratch.exists()
    assert process.popen.poll() is not None


def test_a_sweep_with_nothing_to_find_is_quiet() -> None:
    sweep_leftovers(2**22 + 1, "no such mark")
