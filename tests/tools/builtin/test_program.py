"""The base of the program tools: configuration, text for the model, and life cycle."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from toolwise.errors import ConfigError, DataError, ToolwiseError
from toolwise.sandbox.programs.run import ProgramResult
from toolwise.tools.builtin.program import NO_OUTPUT, PythonTool, format_result
from toolwise.tools.catalog import build_tools

linux = pytest.mark.skipif(sys.platform != "linux", reason="the tiers for programs are Linux's")


def test_the_model_reads_what_was_printed_and_what_went_wrong() -> None:
    assert format_result(ProgramResult("ok", "", "4\n", "", 0)) == "4"
    assert format_result(ProgramResult("ok", "", "", "", 0)) == NO_OUTPUT
    assert format_result(ProgramResult("exit", "it exited with status 1", "a\n", "b\n", 1)) == (
        "a\nb\nerror: it exited with status 1"
    )
    assert format_result(ProgramResult("timeout", "too long", "", "", None)) == "error: too long"


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"timeout_s": "10"}, "timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"memory_mb": 1.5}, "memory_mb"),
        ({"output_kb": True}, "output_kb"),
        ({"read": "/data"}, "read"),
        ({"permissions": [3]}, "permissions"),
        ({"require": "yes"}, "require"),
        ({"permissions": ["fly"]}, "fly"),
        ({"tier": "strict"}, "strict"),
        ({"tier": "off"}, "off"),
        ({"timeout": 3}, "timeout"),
    ],
)
def test_a_configuration_that_is_wrong_is_told_in_one_line(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ToolwiseError, match=word) as error:
        build_tools([{"name": "python", **config}])
    assert "\n" not in str(error.value)


@linux
def test_a_task_brings_files() -> None:
    tool = PythonTool({"timeout_s": 30})

    async def go() -> str:
        name = await tool.create(files={"data/rows.csv": "1,2"})
        text, _, _ = await tool.execute(name, {"code": "open('data/rows.csv').read()"})
        await tool.release(name)
        return text

    assert asyncio.run(go()) == "'1,2'"
    with pytest.raises(DataError, match="files"):
        asyncio.run(tool.create(files=["a"]))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="files"):
        asyncio.run(tool.create(files={"../a": "x"}))


def test_a_number_is_a_number() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        PythonTool({"at_once": -1})
