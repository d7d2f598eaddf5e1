"""How a worker handles requests, tested without the process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.imports import load_module
from toolwise.errors import ToolwiseError
from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.isolation.tool_worker_main import _fault_to_json, _Server, make_tool

FILE = str(Path(__file__).with_name("isolated_tools.py"))
SCHEMA = OpenAIFunctionToolSchema(function=FunctionSchema(name="ledger")).model_dump()


def server() -> _Server:
    return _Server(load_module(FILE, what="tool"))


def test_functions_are_called_with_their_own_types() -> None:
    asked = {"call": "weather", "parameters": {"city": "Oslo", "days": 2}}
    assert server().answer(asked) == ("Oslo 2 CELSIUS", 0.5, {"ok": True, "seen": [2]})
    assert server().answer({"call": "plain", "parameters": {"x": 4}}) == ("8", None, {"ok": True})


def test_bad_arguments_are_an_answer() -> None:
    text, reward, info = server().answer({"call": "plain", "parameters": {"y": 4}})
    assert (text, reward, info) == ("error: missing argument 'x'", None, {"ok": False})


def test_async_functions_are_waited_for() -> None:
    assert server().answer({"call": "async_nap", "parameters": {"seconds": 0}})[0] == "rested in the trainer"


def test_a_tool_object_lives_from_question_to_question() -> None:
    one = server()
    assert one.answer({"make": "Ledger", "config": {"title": "t"}, "schema": SCHEMA}) is True
    assert one.answer({"verb": "create", "args": [None], "kwargs": {"first": "a"}}) == "one"
    text, _, _ = one.answer({"verb": "execute", "args": ["one", {"entry": "x"}], "kwargs": {}})
    assert text == "t: a, x"
    assert one.answer({"verb": "calc_reward", "args": ["one"], "kwargs": {}}) == 2.0


def test_only_the_life_cycle_can_be_asked_for() -> None:
    with pytest.raises(AssertionError):
        server().answer({"verb": "__class__", "args": [], "kwargs": {}})


def test_a_tool_is_made_with_or_without_a_schema() -> None:
    class Own(CalculatorTool):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)

    made = make_tool(Own, {"price": 2.0}, SCHEMA)
    assert (made.name, made.price) == ("calculator", 2.0)
    assert make_tool(CalculatorTool, {}, SCHEMA).name == "ledger"


def test_a_fault_is_told_in_three_parts() -> None:
    try:
        raise ToolwiseError("what was wrong")
    except ToolwiseError as fault:
        told = _fault_to_json(fault)
    assert (told["type"], told["message"]) == ("ToolwiseError", "what was wrong")
    assert "raise ToolwiseError" in told["traceback"]


def test_one_loop_serves_all_questions() -> None:
    one = server()

    async def loop() -> int:
        return id(asyncio.get_running_loop())

    assert one._wait(loop()) == one._wait(loop())
