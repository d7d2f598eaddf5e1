"""`check_tool` finds each way to break the tool contract, and passes good tools."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import pytest

from toolwise.checks.contract import CheckReport
from toolwise.checks.tool.check import check_tool
from toolwise.tools import BaseTool, FunctionSchema, OpenAIFunctionToolSchema, build_tools
from toolwise.tools.call_errors import SERVER_DOWN, ToolCallError

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "description": "A word."}},
    "required": ["word"],
}


class Counter(BaseTool):
    """A tool with nothing wrong: it counts the calls of each instance. The others below change one thing each."""

    def __init__(self, **about: Any) -> None:
        schema = {"name": "counter", "description": "Counts.", "parameters": PARAMETERS, **about}
        super().__init__({}, OpenAIFunctionToolSchema(function=FunctionSchema(**schema)))
        self.counts: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        self.counts[instance_id] = 0
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.counts[instance_id] += 1
        return f"call {self.counts[instance_id]}", 0.5, {"ok": True}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.counts.pop(instance_id, None)


class SameId(Counter):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.counts["it"] = 0
        return "it"


class OwnId(Counter):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return await super().create(None, **kwargs)


class NoId(Counter):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        return 7


class ReleasesOnce(Counter):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.counts[instance_id]


class ReleasesAll(Counter):
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.counts.clear()


class Shares(Counter):
    """Instances that exist at the same time share one count; it resets when none is left."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await super().execute(instance_id, parameters)
        return f"call {sum(self.counts.values())}", None, {}


class Random(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return str(random.random()), None, {}


class Counts(Counter):
    """Never resets."""

    every = itertools.count()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return str(next(self.every)), None, {}


class Clock(Counter):
    """Returns the same text for a while, then another."""

    said = 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.said += 1
        return f"tick {self.said // 7}", None, {}


class Long(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return "x" * 5000, None, {}


class Raises(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        parameters["word"].encode()
        return "fine", None, {}


class Refuses(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if not parameters["word"].isalpha():
            raise ToolCallError("that is no word")
        return "fine", None, {}


class Fragile(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if "\x00" in parameters["word"]:
            raise ToolCallError("the server is gone", SERVER_DOWN)
        return "fine", None, {}


class Hangs(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await asyncio.sleep(60)
        return "late", None, {}


class Stubborn(Counter):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            await asyncio.sleep(3)
        return "done", None, {}


class Blocks(Counter):
    blocked = False

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["word"] == "block" and not self.blocked:
            self.blocked = True
            time.sleep(0.8)  # noqa: ASYNC251
        return "done", None, {}


class BadReward(Counter):
    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        return float("nan")


def gives(*result: Any) -> Counter:
    class Gives(Counter):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            return result

    return Gives()


def seen(check: CheckReport, name: str) -> tuple[str, str]:
    (finding,) = (finding for finding in check.findings if finding.name == name)
    return finding.verdict, finding.says


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    check = check_tool(Counter())
    assert {finding.verdict for finding in check.findings} == {"ok"}
    assert len(check.findings) == 14
    assert check.ok


@pytest.mark.parametrize(
    ("tool", "name", "verdict", "says"),
    [
        (Counter(name="no spaces"), "name", "wrong", "use 1 to 64 letters"),
        (Counter(description=""), "description", "warning", "models choose tools by their description"),
        (Counter(parameters={"type": "objekt"}), "schema", "wrong", "not a valid JSON schema"),
        (Counter(parameters={"type": "array"}), "schema", "wrong", "arguments are always an object"),
        (
            Counter(parameters={"type": "object", "required": ["x"]}),
            "schema",
            "wrong",
            "required, but not in properties: x",
        ),
        (
            Counter(parameters={"type": "object", "properties": {"x": {"type": "string"}}}),
            "schema",
            "warning",
            "no description: x",
        ),
        (SameId(), "life cycle", "wrong", "the same id twice"),
        (OwnId(), "life cycle", "warning", "return the given id"),
        (NoId(), "life cycle", "wrong", "create returned 7"),
        (BadReward(), "life cycle", "wrong", "calc_reward returned nan"),
        (ReleasesOnce(), "life cycle", "wrong", "release fails if the instance is already released: KeyError"),
        (ReleasesAll(), "life cycle", "wrong", "KeyError"),
        (gives("text"), "results", "wrong", "return (text, reward or None, info)"),
        (gives(3, None, {}), "results", "wrong", "the text 3; return a string"),
        (gives("x", float("inf"), {}), "results", "wrong", "the reward inf"),
        (gives("x", True, {}), "results", "wrong", "the reward True"),
        (gives("x", None, None), "results", "wrong", "the info None"),
        (gives("x", None, {"a": object()}), "results", "wrong", "not JSON-serializable"),
        (Long(), "results", "warning", "5000 characters"),
        (Random(), "equal calls", "warning", "randomness, the clock, or shared state"),
        (Counts(), "equal calls", "warning", "shared state"),
        (Clock(), "instances", "warning", "cannot be tested"),
        (Shares(), "instances", "wrong", "keep state per instance_id"),
        (Raises(), "odd arguments", "warning", "raises UnicodeEncodeError"),
        (Refuses(), "odd arguments", "ok", "all were answered"),
        (Fragile(), "odd arguments", "wrong", "breaks the tool's backend"),
        (Stubborn(), "cancelling", "wrong", "still runs"),
    ],
)
def test_each_fault_is_found_where_it_is(tool: BaseTool, name: str, verdict: str, says: str) -> None:
    found = seen(check_tool(tool, calls=[] if name == "schema" else [{"word": "hello"}]), name)
    assert found[0] == verdict
    assert says in found[1]


def test_a_call_that_never_ends_is_wrong_and_the_rest_is_skipped() -> None:
    check = check_tool(Hangs(), timeout_s=0.2)
    assert seen(check, "life cycle")[0] == "wrong"
    assert "took longer than 0.2 s; the arguments were generated" in seen(check, "life cycle")[1]
    assert seen(check, "cancelling") == ("skipped", "not tried")
    assert not check.ok


def test_a_call_that_keeps_the_loop_is_found() -> None:
    check = check_tool(Blocks(), calls=[{"word": "quick"}, {"word": "block"}])
    assert seen(check, "event loop")[0] == "wrong"


def test_calls_that_do_not_fit_are_named() -> None:
    check = check_tool(Counter(), calls=[{"word": 3}])
    verdict, says = seen(check, "calls")
    assert verdict == "wrong"
    assert "argument 'word' must be a string, got an integer" in says


def test_all_of_it_can_be_written_as_json() -> None:
    told = check_tool(Random()).to_json()
    assert (told["tool"], told["ok"]) == ("counter", True)
    assert told["findings"][0] == {"name": "name", "verdict": "ok", "says": "counter"}


@pytest.mark.parametrize(
    ("entry", "call", "create"),
    [
        ("calculator", {"expression": "2 + 2"}, {}),
        ("search", {"query": "nile"}, {"documents": ["The Nile."]}),
        ("calc_gsm8k_reward", {"answer": "3"}, {"ground_truth": "3"}),
    ],
)
def test_the_tools_that_ship_pass(entry: str, call: dict[str, Any], create: dict[str, Any]) -> None:
    check = check_tool(build_tools([entry])[entry], calls=[call], create_kwargs=create)
    assert check.ok, check
