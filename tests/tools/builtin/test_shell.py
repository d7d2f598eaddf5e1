"""The tool `shell`: commands run in separate namespaces; weaker isolation needs an explicit setting."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from namespaces import needs_namespaces

from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.sandbox import report
from toolwise.sandbox.report import Report, probe
from toolwise.tools.builtin.program import ShellTool
from toolwise.tools.catalog import build_tools
from toolwise.training.run import assemble


@pytest.fixture(scope="module")
def shell() -> Iterator[ShellTool]:
    tool = ShellTool({"timeout_s": 2.0})
    yield tool
    tool.sandbox.close()


def _calls(tool: ShellTool, *commands: Any) -> list[tuple[str, float | None, dict[str, Any]]]:
    async def go() -> list[tuple[str, float | None, dict[str, Any]]]:
        name = await tool.create()
        try:
            return [await tool.execute(name, {"command": command}) for command in commands]
        finally:
            await tool.release(name)

    return asyncio.run(go())


@needs_namespaces
def test_it_is_in_the_catalog() -> None:
    tool = build_tools(["shell"])["shell"]
    assert isinstance(tool, ShellTool)
    assert tool.family == "OTHER"


@needs_namespaces
def test_commands_pipes_and_files_work(shell: ShellTool) -> None:
    commands = (
        "printf 'b\\na\\n' > words; sort words | head -1",
        "cat words | wc -l",
        "pwd",
        "cd /tmp; X=1",
        "pwd; echo $X",
    )
    assert [text for text, _, _ in _calls(shell, *commands)] == ["a", "2", "/sandbox", "(no output)", "/sandbox"]


@needs_namespaces
@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("cat /etc/passwd", "exit", "No such file"),
        ("sleep 100", "timeout", "longer than 2 s"),
        ("b() { b | b & }; b; sleep 5", "too_big", "processes"),
        ("echo out; echo err >&2; exit 7", "exit", "out\nerr\nerror: it exited with status 7"),
        ("no-such-command", "exit", "status 127"),
        ("echo x > /usr/x", "exit", "Read-only"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(shell: ShellTool, command: str, kind: str, words: str) -> None:
    ((text, _, info),) = _calls(shell, command)
    assert info["kind"] == kind
    assert words in text


@needs_namespaces
def test_a_command_that_is_no_text_is_an_error_message(shell: ShellTool) -> None:
    assert _calls(shell, ["ls"])[0][0] == "error: command must be a string"


def test_without_namespaces_it_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = dict.fromkeys(("limits", "capabilities", "no_new_privs", "landlock", "seccomp"), "got")
    gap = Report("namespaced", "standard", layers, {"namespaces": "bwrap is not installed"}, ("subprocess",))
    monkeypatch.setitem(report._cache, ("namespaced", ("subprocess",)), gap)
    with pytest.raises(ToolwiseError, match=r"apt install bubblewrap.*tier='standard' with permissions") as error:
        ShellTool()
    assert "\n" not in str(error.value)


def test_a_run_with_it_is_refused_at_start_up_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = dict.fromkeys(("limits", "capabilities", "no_new_privs", "landlock", "seccomp"), "got")
    gap = Report("namespaced", "standard", layers, {"namespaces": "bwrap is not installed"}, ("subprocess",))
    monkeypatch.setitem(report._cache, ("namespaced", ("subprocess",)), gap)
    with pytest.raises(ConfigError, match=r"tool shell: .*bwrap is not installed") as error:
        assemble(RunConfig(tools=["shell"]), tasks=[])
    assert "\n" not in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the standard tier is Linux's")
def test_less_is_had_by_the_users_own_word() -> None:
    if not probe("standard", ("subprocess",)).complete:
        pytest.skip(str(probe("standard", ("subprocess",))))
    with pytest.raises(ToolwiseError, match="subprocess"):
        ShellTool({"tier": "standard"})
    tool = ShellTool({"tier": "standard", "permissions": ["subprocess"], "timeout_s": 20})
    texts = [text for text, _, _ in _calls(tool, "(setsid sleep 300 &); echo a | cat", "cat /etc/passwd")]
    assert texts[0] == "a"
    assert "Permission denied" in texts[1]
    tool.sandbox.close()
