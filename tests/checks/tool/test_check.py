"""The parts of a trial one by one; test_conformance.py tests the findings that authors see."""

from __future__ import annotations

import asyncio

from toolwise.checks.tool.check import ToolTrial
from toolwise.tools.builtin.calculator import CalculatorTool


def trial() -> ToolTrial:
    return ToolTrial(CalculatorTool(), [{"expression": "1 + 1"}, {"expression": "1 /"}], {}, 5.0)


def test_every_part_says_what_it_saw() -> None:
    async def run() -> list[str]:
        return [(await part())[0] for part in trial().parts().values()]

    assert asyncio.run(run()) == ["ok"] * 8


def test_the_slowest_call_is_remembered() -> None:
    tried = trial()
    asyncio.run(tried.parts()["results"]())
    assert 0 < tried.slowest_s < 5
