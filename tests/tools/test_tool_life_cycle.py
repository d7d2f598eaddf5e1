"""The contract of every tool: create, execute, calc_reward, release, for many rollouts at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolwise.sandbox.layers.bubblewrap import unavailable_reason
from toolwise.tools import TOOLS, BaseTool, build_tools, tool, validate_arguments
from toolwise.tools.function import FAMILIES, FunctionTool


@tool
def double(x: int) -> int:
    """Doubles a number."""
    return 2 * x


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "calculator": ("calculator", {}, {"expression": "6 * 7"}, "42"),
    "search": ("search", {"documents": ["The Nile is long."]}, {"query": "nile"}, "The Nile is long."),
    "calc_gsm8k_reward": (
        "calc_gsm8k_reward",
        {"ground_truth": "8"},
        {"answer": "8"},
        "Your answer is right.",
    ),
    "python": ("python", {}, {"code": "print(6 * 7)"}, "42"),
    "shell": ("shell", {}, {"command": "echo $((6 * 7))"}, "42"),
    "double": (double, {}, {"x": 4}, "8"),
}


def make(name: str) -> BaseTool:
    missing = unavailable_reason() if name == "shell" else ""
    if missing:
        pytest.skip(f"a shell needs namespaces: {missing}")
    return build_tools([CASES[name][0]])[name]


every_tool = pytest.mark.parametrize("name", CASES)


def test_every_builtin_is_tried_here() -> None:
    assert set(TOOLS) <= set(CASES)


@every_tool
def test_a_whole_life(name: str) -> None:
    _, create_kwargs, parameters, expected = CASES[name]

    async def live() -> None:
        made = make(name)
        instance = await made.create(**create_kwargs)
        for _ in range(2):
            own = {} if isinstance(made, FunctionTool) else {"not_the_models": 1}  # functions reject unknown ones
            text, reward, info = await made.execute(instance, parameters, **own)
            assert text == expected
            assert reward is None or isinstance(reward, float)
            assert isinstance(info, dict)
        assert isinstance(await made.calc_reward(instance), float | None)
        assert await made.release(instance) is None  # type: ignore[func-returns-value]

    asyncio.run(live())


@every_tool
def test_the_id_is_kept_or_made_fresh(name: str) -> None:
    create_kwargs = CASES[name][1]

    async def live() -> None:
        made = make(name)
        assert await made.create("mine", **create_kwargs) == "mine"
        assert await made.create(**create_kwargs) != await made.create(**create_kwargs)

    asyncio.run(live())


@pytest.mark.long
@every_tool
def test_many_rollouts_at_once_and_over_several_loops(name: str) -> None:
    _, create_kwargs, parameters, expected = CASES[name]
    made = make(name)

    async def rollout() -> str:
        instance = await made.create(**create_kwargs)
        await asyncio.sleep(0)
        text, _, _ = await made.execute(instance, parameters)
        await made.release(instance)
        return text

    async def batch() -> list[str]:
        return await asyncio.gather(*(rollout() for _ in range(32)))

    for _ in range(2):
        assert asyncio.run(batch()) == [expected] * 32


@every_tool
def test_nothing_is_kept_after_release(name: str) -> None:
    _, create_kwargs, parameters, _ = CASES[name]

    async def live() -> None:
        made = make(name)
        instance = await made.create(**create_kwargs)
        await made.execute(instance, parameters)
        await made.release(instance)
        assert not getattr(made, "_instances", {})

    asyncio.run(live())


@every_tool
def test_the_schema_describes_the_call(name: str) -> None:
    made = make(name)
    schema = made.get_openai_tool_schema()
    dumped = schema.model_dump()
    assert dumped["type"] == "function"
    assert dumped["function"]["name"] == name
    assert dumped["function"]["description"]
    assert validate_arguments(schema, CASES[name][2]) == []
    assert validate_arguments(schema, {}) != []
    assert validate_arguments(schema, {**CASES[name][2], "more": 1}) != []


@every_tool
def test_family_and_price(name: str) -> None:
    made = make(name)
    assert made.family in FAMILIES
    assert made.price == 1.0


def test_the_families_of_the_builtins() -> None:
    assert {name: make(name).family for name in TOOLS} == {
        "calculator": "CALCULATE",
        "search": "SEARCH",
        "calc_gsm8k_reward": "OTHER",
        "python": "CALCULATE",
        "shell": "OTHER",
    }
