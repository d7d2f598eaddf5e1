"""`toolwise check tool`: a table, with exit status 0 (no problems), 1 (problems) or 2 (usage error)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOOLS = '''
from typing import Any
from toolwise.tools import BaseTool, FunctionSchema, OpenAIFunctionToolSchema, tool

@tool(family="SEARCH")
async def shout(text: str) -> str:
    """Shouts.

    Args:
        text: What to shout.
    """
    return text.upper()

class Careless(BaseTool):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config, OpenAIFunctionToolSchema(function=FunctionSchema(name="careless")))
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return "always the same"
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return self.config.get("says"), None, {}
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None
'''


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolwise", "check", "tool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_good_tool_passes(tools: Path) -> None:
    done = check(f"{tools}:shout", "--call", '{"text": "hi"}')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems found" in done.stdout
    assert "life cycle" in done.stdout


def test_a_bad_tool_fails_with_a_table_of_why(tools: Path) -> None:
    done = check(f"{tools}:Careless")
    assert done.returncode == 1
    assert "the same id twice" in " ".join(done.stdout.split())
    assert "wrong: life cycle" in done.stdout


def test_what_was_found_as_json(tools: Path) -> None:
    done = check(f"{tools}:Careless", "--config", '{"price": 2}', "--json")
    (found,) = json.loads(done.stdout)
    assert (found["tool"], found["ok"], done.returncode) == ("careless", False, 1)
    assert {"name": "terms", "verdict": "ok", "says": "family OTHER, price 2"} in found["findings"]


@pytest.mark.long
def test_every_tool_of_an_mcp_server_is_checked() -> None:
    config = json.dumps({"command": ["mcp-server-time"], "include": ["get_current_time"]})
    done = check("mcp", "--config", config, "--call", '{"timezone": "Etc/UTC"}', "--json")
    (found,) = json.loads(done.stdout)
    assert (found["tool"], done.returncode) == ("get_current_time", 0), found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_tool"], "there is no tool 'no_such_tool'"),
        (["calculator", "--call", "{"], "--call '{' is not valid JSON"),
        (["calculator", "--call", "[1]"], "--call '[1]' is not a JSON object"),
        (["calculator", "--config", '{"kk": 1}'], "calculator has no option 'kk'"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("old", [["--create", "[]"], ["--create=[]"]])
def test_an_old_name_of_an_option_works_and_is_noted(cli: Callable[..., Any], old: list[str]) -> None:
    ended = cli("check", "tool", "calculator", *old)
    assert "note: --create is now --create-kwargs" in ended.err
    assert "--create-kwargs '[]' is not a JSON object" in ended.err
    assert ended.status == 2
