"""The noisy demonstrator behind the SFT data of the shipped model: competent, but wasteful and often wrong.

It calls tools for what it knows, guesses what it should look up, stops half-way, and sometimes misreports a tool's
result, so that reinforcement learning has something to improve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

from toolwise.demo.tasks import KINDS, SPLITS, make_row
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool

WeightedStrategy = tuple[str, float]

# The teacher's strategies for each kind, with both tools available:
#   right      gives the right answer from memory
#   guess      answers a random number
#   settle     makes the calls that solve the question, then answers
#   misreport  the same, but answers wrongly
#   half       makes the first call and answers its result
#   detour     wastes a call on the wrong tool, then continues with settle, right or guess
STRATEGIES: dict[str, list[WeightedStrategy]] = {
    "known": [("right", 0.74), ("guess", 0.04), ("settle", 0.14), ("detour right", 0.08)],
    "lookup": [("guess", 0.60), ("settle", 0.24), ("misreport", 0.05), ("detour settle", 0.06), ("detour guess", 0.05)],
    "arithmetic": [
        ("guess", 0.30),
        ("settle", 0.22),
        ("misreport", 0.06),
        ("detour settle", 0.36),
        ("detour guess", 0.06),
    ],
    "two_step": [("half", 0.40), ("settle", 0.22), ("misreport", 0.06), ("guess", 0.22), ("detour guess", 0.10)],
}
TOOL_OFFERS: list[tuple[list[str], float]] = [
    (["calculator", "search"], 0.55),
    (["search", "calculator"], 0.15),
    (["search"], 0.10),
    (["calculator"], 0.10),
    ([], 0.10),
]


async def demonstrate(row: dict[str, Any], offered: Sequence[str], rng: Random) -> list[dict[str, Any]]:
    """One conversation about a task, with real tool calls."""
    info = row["extra_info"]
    answer: str = row["reward_model"]["ground_truth"]
    plan = _weighted_choice(STRATEGIES[info["kind"]], rng)
    calls: list[list[str]] = info["plan"]
    if not all(name in offered for name, _ in calls):
        plan = "right" if info["kind"] == "known" else "guess"
    messages = list(row["prompt"])
    tools = {"calculator": CalculatorTool({}), "search": SearchTool({})}
    documents = info["tools_kwargs"]["search"]["create_kwargs"]["documents"]
    if plan.startswith("detour"):
        plan = plan.removeprefix("detour ")
        name, text = calls[0]
        wrong = "calculator" if name == "search" else "search"
        if wrong in offered:
            await _call(messages, tools[wrong], wrong, text, documents)
    if plan in ("settle", "misreport", "half"):
        for name, text in calls[:1] if plan == "half" else calls:
            await _call(messages, tools[name], name, text, documents)
    if plan in ("guess", "misreport"):
        answer = _wrong_answer(answer, rng)
    elif plan == "half":
        answer = calls[-1][1].split()[0]  # the number from the first call, without the addition
    messages.append({"role": "assistant", "content": f"Answer: {answer}"})
    return messages


def conversations(count: int, *, seed: int) -> list[dict[str, Any]]:
    """SFT data for the model: rows of {"messages", "tools"}."""
    rng = Random(f"{seed}/{SPLITS['teach']}")

    async def make() -> list[dict[str, Any]]:
        rows = []
        for index in range(count):
            row = make_row(rng.choice(KINDS), rng, index, "teach")
            offered = _weighted_choice(TOOL_OFFERS, rng)
            schemas = [_SCHEMAS[name] for name in offered]
            rows.append({"messages": await demonstrate(row, offered, rng), "tools": schemas})
        return rows

    return asyncio.run(make())


_SCHEMAS = {tool.name: tool.get_openai_tool_schema().model_dump() for tool in (CalculatorTool({}), SearchTool({}))}
_PARAMETER = {"calculator": "expression", "search": "query"}


async def _call(messages: list[dict[str, Any]], tool: BaseTool, name: str, text: str, documents: list[str]) -> None:
    call_id = f"call_{sum(m['role'] == 'tool' for m in messages)}"
    call = {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": {_PARAMETER[name]: text}},
    }
    kwargs: dict[str, Any] = {"documents": documents} if name == "search" else {}
    instance = await tool.create(**kwargs)
    result, _, _ = await tool.execute(instance, {_PARAMETER[name]: text})
    await tool.release(instance)
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": result})


def _wrong_answer(answer: str, rng: Random) -> str:
    """A number of about the right size that is not the answer."""
    while True:
        low = 10 ** (len(answer) - 1) if len(answer) > 1 else 0
        guess = str(rng.randint(low, 10 ** len(answer) - 1))
        if guess != answer:
            return guess


def _weighted_choice(weighted: Sequence[tuple[Any, float]], rng: Random) -> Any:
    return rng.choices([item for item, _ in weighted], [weight for _, weight in weighted])[0]
