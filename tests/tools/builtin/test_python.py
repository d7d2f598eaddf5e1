"""The tool `python` returns what the model's code prints, whatever the code does."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from toolwise.tools.builtin.program import PythonTool
from toolwise.tools.catalog import build_tools
from toolwise.tools.schema import validate_arguments

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tiers for programs are Linux's")


@pytest.fixture(scope="module")
def python() -> Iterator[PythonTool]:
    tool = PythonTool({"timeout_s": 2.0, "output_kb": 1})
    yield tool
    tool.sandbox.close()


def _calls(tool: PythonTool, *codes: Any) -> list[tuple[str, float | None, dict[str, Any]]]:
    async def go() -> list[tuple[str, float | None, dict[str, Any]]]:
        name = await tool.create()
        try:
            return [await tool.execute(name, {"code": code}) for code in codes]
        finally:
            await tool.release(name)

    return asyncio.run(go())


def test_it_is_in_the_catalog() -> None:
    tool = build_tools([{"name": "python", "price": 0.5, "timeout_s": 3}])["python"]
    assert isinstance(tool, PythonTool)
    assert (tool.family, tool.price, tool.sandbox.timeout_s) == ("CALCULATE", 0.5, 3)
    assert validate_arguments(tool.get_openai_tool_schema(), {"code": "1"}) == []
    assert validate_arguments(tool.get_openai_tool_schema(), {}) != []


def test_a_value_and_a_print_come_back(python: PythonTool) -> None:
    (one, two) = _calls(python, "print('a')\n6 * 7", "x = 1")
    assert one[:2] == ("a\n42", None)
    assert {key: one[2][key] for key in ("ok", "kind", "exit_status")} == {"ok": True, "kind": "ok", "exit_status": 0}
    assert two[0] == "(no output)"


def test_files_stay_within_a_rollout_and_not_beyond(python: PythonTool) -> None:
    code = "open('note', 'w').write('kept')", "open('note').read()"
    assert _calls(python, *code)[1][0] == "'kept'"
    assert "FileNotFoundError" in _calls(python, "open('note').read()")[0][0]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("1/0", "exit", "ZeroDivisionError: division by zero\nerror: it exited with status 1"),
        ("sum(range(10**12))", "timeout", "longer than 2 s"),
        ("import socket; socket.socket()", "denied", "no network"),
        ("x = 'a' * 10**10", "memory", "memory"),
        ("print('x' * 5000)", "ok", "bytes left out"),
        ("import os; os._exit(3)", "exit", "status 3"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(python: PythonTool, code: str, kind: str, words: str) -> None:
    ((text, reward, info),) = _calls(python, code)
    assert info["kind"] == kind
    assert info["ok"] == (kind == "ok")
    assert words in text
    assert reward is None


def test_code_that_is_no_text_is_an_error_message(python: PythonTool) -> None:
    assert _calls(python, 3, None) == [("error: code must be a string", None, {"ok": False})] * 2


def test_release_removes_the_folder_and_may_come_twice(python: PythonTool) -> None:
    async def go() -> bool:
        name = await python.create()
        folder = python._folders[name]
        await python.release(name)
        await python.release(name)
        return folder.path.exists()

    assert not asyncio.run(go())


def test_a_deadline_from_outside_ends_the_program(python: PythonTool) -> None:
    tool = PythonTool({"timeout_s": 60})

    async def go() -> None:
        name = await tool.create()
        folder = tool._folders[name]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await tool.execute(name, {"code": "while True: pass"})
        assert list(folder.path.iterdir()) == [folder.work_path]
        await tool.release(name)
        assert not folder.path.parent.exists()

    asyncio.run(go())
    tool.sandbox.close()
