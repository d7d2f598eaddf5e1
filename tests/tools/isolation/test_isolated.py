"""Tool classes whose objects live in a separate process per rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.config.imports import load_reference
from toolwise.errors import ToolwiseError
from toolwise.tools import isolation
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.isolation.isolated_tool import IsolatedTool, isolate_tool
from toolwise.tools.isolation.tool_worker import ToolDied, ToolFault

T = TypeVar("T")
FILE = Path(__file__).with_name("isolated_tools.py")
SCHEMA = OpenAIFunctionToolSchema(function=FunctionSchema(name="ledger"))


@pytest.fixture(autouse=True, scope="module")
def _none_is_left() -> Iterator[None]:
    yield
    isolation.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


def ledger(**config: Any) -> BaseTool:
    kind = load_reference(f"{FILE}:Ledger", what="tool")
    return isolate_tool(kind({"title": "mine", **config}, SCHEMA))


def test_a_class_that_asks_for_it_is_isolated_once_and_no_other() -> None:
    made = ledger(price=3.0)
    assert isinstance(made, IsolatedTool)
    assert (made.name, made.price, made.family) == ("ledger", 3.0, "OTHER")
    assert isolate_tool(made) is made
    calculator = CalculatorTool({})
    assert isolate_tool(calculator) is calculator


def test_the_life_of_two_rollouts_in_two_processes(tmp_path: Path) -> None:
    async def live() -> list[Any]:
        made = ledger()
        one, two = await asyncio.gather(made.create(first="a"), made.create(first="b"))
        assert one != two
        said = [await made.execute(i, {"entry": e}) for i, e in ((one, "x"), (two, "y"), (one, "z"))]
        rewards = [await made.calc_reward(i, more=m) for i, m in ((one, 0.5), (two, 0))]
        await asyncio.gather(*(made.release(i, mark=str(tmp_path / i)) for i in (one, two)))
        assert all((tmp_path / i).read_text() == "released" for i in (one, two))
        return [*said, *rewards]

    first, second, third, *rewards = run(live())
    assert [first[0], second[0], third[0]] == ["mine: a, x", "mine: b, y", "mine: a, x, z"]
    assert first[2]["pid"] == third[2]["pid"] != second[2]["pid"]
    assert rewards == [3.5, 2.0]
    for pid in (first[2]["pid"], second[2]["pid"]):
        assert run(_gone(pid))


async def _gone(pid: int) -> bool:
    for _ in range(1000):
        if not Path(f"/proc/{pid}").exists():
            return True
        await asyncio.sleep(0.01)
    return False


def test_calls_of_one_turn_wait_for_each_other(tmp_path: Path) -> None:
    async def live() -> list[Any]:
        made = ledger()
        instance = await made.create()
        said = await asyncio.gather(*(made.execute(instance, {"entry": e, "seconds": 0.05}) for e in "xyz"))
        await made.release(instance, mark=str(tmp_path / "mark"))
        return list(said)

    assert run(live())[-1][0] == "mine: nothing, x, y, z"


def test_a_deadline_ends_the_process_and_the_rollout_goes_on_without_the_tool(tmp_path: Path) -> None:
    async def live() -> None:
        made = ledger()
        instance = await made.create()
        pid = (await made.execute(instance, {"entry": "x"}))[2]["pid"]
        with pytest.raises(TimeoutError, match="late"):
            await run_with_deadline(0.3, made.execute(instance, {"entry": "y", "seconds": 1000}), TimeoutError("late"))
        assert await _gone(pid)
        with pytest.raises(ToolFault, match="ended in the middle of execute"):
            await made.execute(instance, {"entry": "z"})
        assert await made.calc_reward(instance) is None
        await made.release(instance, mark=str(tmp_path / "mark"))
        assert not (tmp_path / "mark").exists()

    run(live())


def test_a_process_that_dies_is_a_death_once(tmp_path: Path) -> None:
    async def live() -> None:
        made = ledger()
        instance = await made.create()
        with pytest.raises(ToolDied, match="exited with status 5"):
            await made.execute(instance, {"entry": "x", "die": True})
        with pytest.raises(ToolFault, match="exited with status 5"):
            await made.execute(instance, {"entry": "x"})
        await made.release(instance, mark=str(tmp_path / "mark"))
        await made.release(instance, mark=str(tmp_path / "mark"))

    run(live())


def test_a_fault_in_create_leaves_no_process() -> None:
    async def live() -> None:
        kind = load_reference(f"{FILE}:Ledger", what="tool")
        made = IsolatedTool(kind({}, SCHEMA))
        instance = await made.create()
        with pytest.raises(ToolFault, match="title") as caught:
            await made.execute(instance, {"entry": "x"})
        assert type(caught.value).__name__ == "KeyError"
        with pytest.raises(ToolFault, match="mark"):
            await made.release(instance)
        assert not made._rollout_processes

    run(live())


def test_what_cannot_be_made_again_is_refused() -> None:
    kind = load_reference(f"{FILE}:NeedsMore", what="tool")
    with pytest.raises(ToolwiseError, match=r"takes only \(config\) or \(config, tool_schema\)"):
        isolate_tool(kind({}, SCHEMA, object()))
    with pytest.raises(ToolwiseError, match="plain JSON"):
        ledger(connection=object())

    class Inner(load_reference(f"{FILE}:Ledger", what="tool")):  # type: ignore[misc]
        pass

    with pytest.raises(ToolwiseError, match=r"tool ledger: isolate = True .* defined inside a function"):
        isolate_tool(Inner({}, SCHEMA))
