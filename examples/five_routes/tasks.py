"""Questions of six kinds, and conversations that show how to answer them with the tools at hand.

known       a small sum that the model has memorised: answer it
arithmetic  numbers too large for the model: calculate (or run code, at a higher price)
lookup      in the task's documents: search
clock       the time in another city: ask the MCP server
code        sums of digits and of squares: run a program
founded     in which year a place was founded: only the expensive model knows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any

from toolwise.demo.tasks import KNOWN_CALCULATIONS, make_row
from toolwise.demo.tasks import PLACES as ALL_PLACES

PLACES = ALL_PLACES[:24]
KINDS = ("known", "arithmetic", "lookup", "clock", "code", "founded")
ROUTES = ("myself", "calculate", "look-up", "run-code", "ask-expert")
CHEAPEST = dict(zip(KINDS, ("myself", "calculate", "look-up", "look-up", "run-code", "ask-expert"), strict=True))
"""The cheapest route that answers each kind, for the frontier's "oracle labels"."""
TOOLS = ("calculator", "search", "python", "get_current_time", "convert_time")
OFFERED = {
    "myself": (),
    "calculate": ("calculator",),
    "look-up": ("search", "get_current_time", "convert_time"),
    "run-code": ("python",),
    "all": TOOLS,
}
"""The tools of each route that the small model acts on, and of the original prompt."""
ZONES = {
    "Tokyo": ("Asia/Tokyo", 540),
    "Kolkata": ("Asia/Kolkata", 330),
    "Bangkok": ("Asia/Bangkok", 420),
    "Lagos": ("Africa/Lagos", 60),
    "Bogota": ("America/Bogota", -300),
    "Reykjavik": ("Atlantic/Reykjavik", 0),
}
"""Zones without daylight saving time, with minutes east of Greenwich: the answer does not depend on the date."""


TAUGHT = (4, 3, 2, 4, 3, 1)
"""How often each kind is shown in fine-tuning: the model that ships has never seen a clock or a program, and forgets
what it has memorised unless it is shown again."""


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str
    calls: tuple[tuple[str, dict[str, str]], ...] = ()
    """The calls that answer it, the cheapest first: any one of them does."""
    documents: tuple[str, ...] = ()


def founded(place: str) -> str:
    return str(1100 + int.from_bytes(sha256(f"founded|{place}".encode()).digest()[:4], "big") % 850)


def _known(rng: Random) -> Question:
    """A sum of the demo that the model that ships has memorised."""
    known = rng.choice(KNOWN_CALCULATIONS)
    return Question("known", f"What is {known.expression}?", str(known.value))


def _from_demo(kind: str, rng: Random) -> Question:
    """A question of the demo."""
    row = make_row(kind, rng, 0, "train")
    info = row["extra_info"]
    text = info["plan"][0][1]
    calls: tuple[tuple[str, dict[str, str]], ...] = ()
    if kind == "lookup":
        calls = (("search", {"query": text}),)
    elif kind == "arithmetic":
        calls = (("calculator", {"expression": text}), ("python", {"code": f"print({text})"}))
    documents = tuple(info["tools_kwargs"]["search"]["create_kwargs"]["documents"])
    return Question(kind, row["prompt"][0]["content"], row["reward_model"]["ground_truth"], calls, documents)


def _clock(rng: Random) -> Question:
    (here, (source, before)), (there, (target, after)) = rng.sample(sorted(ZONES.items()), 2)
    minutes = rng.randrange(0, 24 * 60, 5)
    time, answer = (f"{m // 60 % 24:02}:{m % 60:02}" for m in (minutes, minutes + after - before + 24 * 60))
    call = {"source_timezone": source, "time": time, "target_timezone": target}
    return Question("clock", f"It is {time} in {here}. What time is it in {there}?", answer, (("convert_time", call),))


def _code(rng: Random) -> Question:
    if rng.random() < 0.5:
        end = rng.randint(20, 999)
        code, squares = f"print(sum(n * n for n in range({end})))", sum(n * n for n in range(end))
        text = f"What is the sum of the squares below {end}?"
        return Question("code", text, str(squares), (("python", {"code": code}),))
    base, power = rng.randint(11, 99), rng.randint(11, 99)
    code = f"print(sum(map(int, str({base} ** {power}))))"
    digits = sum(map(int, str(base**power)))
    text = f"What is the sum of the digits of {base} to the power {power}?"
    return Question("code", text, str(digits), (("python", {"code": code}),))


def _founded(rng: Random) -> Question:
    place = rng.choice(PLACES)
    return Question("founded", f"In which year was {place} founded?", founded(place))


def make_question(kind: str, rng: Random) -> Question:
    makers: dict[str, Callable[[Random], Question]] = {
        "known": _known, "clock": _clock, "code": _code, "founded": _founded
    }  # fmt: skip
    return makers[kind](rng) if kind in makers else _from_demo(kind, rng)


def make_rows(count: int, *, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Tasks for `toolwise train`, of kinds in turn."""
    rng = Random(f"{seed}/{split}")
    for index in range(count):
        question = make_question(KINDS[index % len(KINDS)], rng)
        yield {
            "data_source": "toolwise/five-routes",
            "prompt": [{"role": "user", "content": question.text}],
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "tools": list(TOOLS),
            "extra_info": {
                "index": index,
                "split": split,
                "kind": question.kind,
                "oracle_route": CHEAPEST[question.kind],
                "need_tools_kwargs": True,
                "tools_kwargs": {"search": {"create_kwargs": {"documents": list(question.documents)}}},
            },
        }


Call = Callable[[str, dict[str, str], Sequence[str]], str]
"""(tool, arguments, documents) -> what the tool answers"""


def conversations(count: int, *, seed: int, call: Call, schemas: dict[str, Any]) -> list[dict[str, Any]]:
    """How the small model should use the tools of each route: conversations for `toolwise sft`."""
    rng = Random(f"{seed}/conversations")
    return [_conversation(rng, call, schemas) for _ in range(count)]


def _conversation(rng: Random, call: Call, schemas: dict[str, Any]) -> dict[str, Any]:
    question = make_question(rng.choices(KINDS, TAUGHT)[0], rng)
    useful = [route for route in OFFERED if any(tool in OFFERED[route] for tool, _ in question.calls)]
    offered = OFFERED[rng.choice(useful if useful and rng.random() < 0.7 else list(OFFERED))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question.text}]
    answer = question.answer if question.kind == "known" else "unknown"
    possible = [(tool, arguments) for tool, arguments in question.calls if tool in offered]
    if possible:
        tool, arguments = possible[0]
        function = {"name": tool, "arguments": arguments}
        messages.append({
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
        })  # fmt: skip
        result = call(tool, arguments, question.documents)
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": result})
        answer = question.answer
    messages.append({"role": "assistant", "content": f"Answer: {answer}"})
    return {"messages": messages, "tools": [schemas[name] for name in offered]}


def expert_conversations(repeats: int, *, seed: int) -> list[dict[str, Any]]:
    """What the expensive model knows: every year, and what the small one knows."""
    rng = Random(f"{seed}/expert")
    questions = [
        Question("founded", f"In which year was {place} founded?", founded(place))
        for place in PLACES
        for _ in range(repeats)
    ]
    questions += [make_question("known", rng) for _ in range(len(questions) // 4)]
    rng.shuffle(questions)
    return [{"prompt": question.text, "response": f"Answer: {question.answer}"} for question in questions]
