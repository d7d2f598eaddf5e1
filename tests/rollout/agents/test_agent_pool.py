"""What is found out about an agent before anything is rolled out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolwise.config.agent import AgentConfig
from toolwise.errors import ConfigError
from toolwise.rollout.agents.agent_pool import AgentPool


def check(*command: str) -> None:
    AgentPool(AgentConfig(command=list(command))).check()


def test_a_program_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.command: the program 'no-such-program' is not there"):
        check("no-such-program")
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="cannot be executed"):
        check(str(tmp_path / "mine"))


def test_a_script_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.command: there is no file 'missing\.py' in "):
        check(sys.executable, "-u", "missing.py")
    (tmp_path / "there.py").write_text("")
    check(sys.executable, "-u", str(tmp_path / "there.py"))
    check(sys.executable, "-m", "json.tool", "rows.txt")
