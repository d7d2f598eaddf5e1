"""Functions as tools: schemas from signatures and docstrings, calls, and invalid functions."""

from __future__ import annotations

import asyncio
import enum
import inspect
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from toolwise.errors import ToolwiseError
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.function import FunctionTool, as_tool, tool
from toolwise.tools.schema import read_docstring, validate_arguments


class Unit(enum.Enum):
    CELSIUS = "c"
    FAHRENHEIT = "f"


class Node(BaseModel):
    children: list[Node] = []


@dataclass
class Point:
    title: str
    x: float


@tool
def weather(city: str, days: int = 1, unit: Unit = Unit.CELSIUS) -> str:
    """The weather of a city.

    Comes from nowhere in particular.

    Args:
        city: Name of the city,
            in any language.
        days (int): How many days.

    Returns:
        A sentence.
    """
    return f"{city} {days} {unit.name}"


def call(target: BaseTool, **parameters: Any) -> tuple[str, float | None, dict[str, Any]]:
    return asyncio.run(target.execute("i", parameters))


def properties(target: FunctionTool[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = target.tool_schema.function.parameters["properties"]
    return found


def test_the_schema_comes_from_signature_and_docstring() -> None:
    assert weather.tool_schema.function.model_dump() == {
        "name": "weather",
        "description": "The weather of a city.\n\nComes from nowhere in particular.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city, in any language."},
                "days": {"type": "integer", "description": "How many days.", "default": 1},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            },
            "required": ["city"],
        },
    }


def test_the_types_of_a_signature() -> None:
    @tool
    def many(
        a: str,
        b: int,
        c: float,
        d: bool,
        e: list[int],
        f: dict[str, float],
        g: Literal["x", "y"],
        h: Optional[int],  # noqa: UP045
        i: list,  # type: ignore[type-arg]
        j: dict,  # type: ignore[type-arg]
        k: list[Unit],
        m: Any,
        n: str | None = None,
    ) -> str:
        return ""

    assert properties(many) == {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "number"},
        "d": {"type": "boolean"},
        "e": {"type": "array", "items": {"type": "integer"}},
        "f": {"type": "object", "additionalProperties": {"type": "number"}},
        "g": {"type": "string", "enum": ["x", "y"]},
        "h": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "i": {"type": "array", "items": {}},
        "j": {"type": "object", "additionalProperties": True},
        "k": {"type": "array", "items": {"type": "string", "enum": ["c", "f"]}},
        "m": {},
        "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    assert "n" not in many.tool_schema.function.parameters["required"]


def test_a_dataclass_is_written_out_and_its_title_field_kept() -> None:
    @tool
    def plot(at: Point) -> str:
        return f"{at.title} {at.x}"

    assert properties(plot)["at"] == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "x": {"type": "number"}},
        "required": ["title", "x"],
    }
    assert call(plot, at={"title": "t", "x": 1})[0] == "t 1.0"


def test_an_annotated_description_is_kept() -> None:
    @tool
    def lookup(word: Annotated[str, Field(description="One word.")]) -> str:
        return word

    assert properties(lookup) == {"word": {"type": "string", "description": "One word."}}


@pytest.mark.parametrize(
    ("docstring", "description", "notes"),
    [
        ("", "", {}),
        ("Only this.", "Only this.", {}),
        (
            "Sum.\n\n:param int a: first\n:param b: second\n    and last\n:returns: c",
            "Sum.",
            {"a": "first", "b": "second and last"},
        ),
        (
            "Sum.\n\nArguments:\n  a (int, optional): first: of two\n  b: second\n\nRaises:\n  KeyError: no",
            "Sum.",
            {"a": "first: of two", "b": "second"},
        ),
        (
            "Sum.\n\nArgs:\n    a:\n        on its own line\n    b: second",
            "Sum.",
            {"a": "on its own line", "b": "second"},
        ),
    ],
)
def test_docstrings(docstring: str, description: str, notes: dict[str, str]) -> None:
    assert read_docstring(docstring) == (description, notes)


def test_the_decorated_function_stays_a_function() -> None:
    assert weather("Oslo", unit=Unit.FAHRENHEIT) == "Oslo 1 FAHRENHEIT"
    assert weather.__name__ == "weather"
    assert list(inspect.signature(weather).parameters) == ["city", "days", "unit"]


def test_arguments_become_the_functions_types() -> None:
    assert call(weather, city="Oslo", unit="f") == ("Oslo 1 FAHRENHEIT", None, {"ok": True})


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "error: missing argument 'city'"),
        ({"city": "Oslo", "town": "x"}, "error: unexpected argument 'town'"),
        ({"city": "Oslo", "unit": "k"}, "error: argument 'unit': Input should be 'c' or 'f'"),
    ],
)
def test_bad_arguments_are_an_error_for_the_model(parameters: dict[str, Any], text: str) -> None:
    assert call(weather, **parameters) == (text, None, {"ok": False})


def test_the_schema_and_the_validator_agree() -> None:
    assert validate_arguments(weather.tool_schema, {"city": "Oslo", "unit": "f"}) == []
    assert validate_arguments(weather.tool_schema, {"unit": "k"}) == [
        "missing argument 'city'",
        'argument \'unit\' must be one of "c", "f"',
    ]


def test_terms_of_the_decorator() -> None:
    @tool(name="find", family="SEARCH", price=0.5, description="Finds.")
    def lookup(word: str) -> str:
        """Not this."""
        return word

    assert (lookup.name, lookup.family, lookup.price) == ("find", "SEARCH", 0.5)
    assert lookup.tool_schema.function.description == "Finds."
    assert lookup("x") == "x"


def test_with_terms_leaves_the_original_alone() -> None:
    dearer = weather.with_options(price=3, family="SEARCH")
    assert (dearer.name, dearer.price, dearer.family) == ("weather", 3.0, "SEARCH")
    assert (weather.price, weather.family) == (1.0, "OTHER")
    assert dearer.with_options(price=4).family == "SEARCH"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (3, "3"),
        (None, "null"),
        ({"é": [1]}, '{"é": [1]}'),
        (Point("a", 1), '{"title": "a", "x": 1}'),
        ((1, 2), "[1, 2]"),
        (Unit.CELSIUS, '"c"'),
    ],
)
def test_returned_values_become_text(value: Any, text: str) -> None:
    def give() -> Any:
        return value

    assert call(as_tool(give)) == (text, None, {"ok": True})


def test_a_tuple_is_a_reward_only_where_it_is_annotated() -> None:
    def data() -> tuple[int, int]:
        return 1, 2

    def pair() -> tuple[str, float]:
        return "good", 1

    def triple() -> tuple[str, float | None, dict[str, Any]]:
        return "so", None, {"seen": 3}

    def bare() -> tuple:  # type: ignore[type-arg]
        return {"a": 1}, 0.25

    def plain():  # type: ignore[no-untyped-def]
        return "good", 1

    assert call(as_tool(data)) == ("[1, 2]", None, {"ok": True})
    assert call(as_tool(pair)) == ("good", 1.0, {"ok": True})
    assert call(as_tool(triple)) == ("so", None, {"ok": True, "seen": 3})
    assert call(as_tool(bare)) == ('{"a": 1}', 0.25, {"ok": True})
    assert call(as_tool(plain)) == ('["good", 1]', None, {"ok": True})


@pytest.mark.parametrize("value", ["text", ("a",), ("a", "b"), ("a", 1, 2), ("a", True)])
def test_a_wrong_tuple_names_the_tool(value: Any) -> None:
    def give() -> tuple:  # type: ignore[type-arg]
        return value  # type: ignore[no-any-return]

    with pytest.raises(ToolwiseError, match="tool give "):
        call(as_tool(give))


def test_what_has_no_json_names_the_tool() -> None:
    def give() -> Any:
        return object()

    with pytest.raises(ToolwiseError, match="tool give returned a value that is not JSON"):
        call(as_tool(give))


def test_async_functions_run_on_the_loop_and_sync_ones_beside_it() -> None:
    @tool
    async def here() -> bool:
        return threading.current_thread() is threading.main_thread()

    @tool
    def beside() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert call(here)[0] == "true"
    assert call(beside)[0] == "false"


def test_sync_functions_do_not_block_each_other() -> None:
    meeting = threading.Barrier(2, timeout=10)

    @tool
    def meet() -> int:
        return meeting.wait()

    async def both() -> list[Any]:
        return await asyncio.gather(meet.execute("a", {}), meet.execute("b", {}))

    assert sorted(text for text, _, _ in asyncio.run(both())) == ["0", "1"]


def test_the_functions_own_exception_comes_through() -> None:
    @tool
    def broken() -> str:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call(broken)


def test_the_tasks_arguments_reach_the_function_in_its_own_types() -> None:
    assert asyncio.run(weather.execute("i", {"city": "Oslo"}, days=9, unit="c"))[0] == "Oslo 9 CELSIUS"


def test_what_is_given_at_the_beginning_is_given_to_every_call_of_the_rollout() -> None:
    async def two_rollouts() -> list[str]:
        await weather.create("one", days=4)
        await weather.create("two")
        texts = [(await weather.execute(i, {"city": "Oslo"}))[0] for i in ("one", "two", "one")]
        texts.append((await weather.execute("one", {"city": "Oslo"}, days=5))[0])
        await weather.release("one")
        texts.append((await weather.execute("one", {"city": "Oslo"}))[0])
        return texts

    days = [text.split()[1] for text in asyncio.run(two_rollouts())]
    assert days == ["4", "1", "4", "5", "1"]


def test_an_argument_that_the_function_does_not_take_is_refused() -> None:
    with pytest.raises(ToolwiseError, match="tool weather takes no argument 'depth': it takes city, days, unit"):
        asyncio.run(weather.create("i", depth=3))
    with pytest.raises(ToolwiseError, match=r"tool weather, argument 'days': .*valid integer"):
        asyncio.run(weather.execute("i", {"city": "Oslo"}, days="many"))


def test_the_model_neither_sees_nor_gives_what_the_task_gives() -> None:
    left = weather.schema_without({"days": 9}).function.parameters
    assert list(left["properties"]) == ["city", "unit"]
    assert weather.schema_without(["city"]).function.parameters["required"] == []
    assert weather.schema_without(()) is weather.tool_schema
    text, _, info = asyncio.run(weather.execute("i", {"city": "Oslo", "days": 2}, days=9))
    assert (text, info["ok"]) == ("error: unexpected argument 'days'", False)


def test_what_a_model_could_not_fill_in_is_refused() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    def several(*xs: int) -> int:
        return 0

    def open_ended(**xs: int) -> int:
        return 0

    def by_position(x: int, /) -> int:
        return x

    def strange(x: threading.Thread) -> int:
        return 0

    def endless(x: Node) -> int:
        return 0

    for function, message in [
        (bare, "tool bare: parameter 'x' needs a type annotation"),
        (several, "tool several: parameter [*]xs"),
        (open_ended, "tool open_ended: parameter [*][*]xs"),
        (by_position, "tool by_position: parameter x"),
        (strange, "tool strange: parameter 'x' has a type without a JSON schema"),
        (endless, "tool endless: parameter 'x' has a type that refers to itself"),
    ]:
        with pytest.raises(ToolwiseError, match=message) as caught:
            as_tool(function)
        assert "\n" not in str(caught.value)


def test_unreadable_annotations_name_the_tool() -> None:
    def lost(x: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
        return 0

    with pytest.raises(ToolwiseError, match="tool lost: cannot resolve its annotations"):
        as_tool(lost)


@pytest.mark.parametrize(
    "terms",
    [
        {"family": "SERCH"},
        {"price": -1},
        {"price": float("nan")},
        {"price": True},
        {"name": "a b"},
        {"name": ""},
    ],
)
def test_bad_terms_are_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(ToolwiseError):
        FunctionTool(weather.function, **terms)


def test_a_lambda_needs_a_name() -> None:
    with pytest.raises(ToolwiseError, match="<lambda>"):
        as_tool(lambda: 1)


def test_as_tool_passes_tools_through_and_refuses_the_rest() -> None:
    calculator = CalculatorTool()
    assert as_tool(calculator) is calculator
    assert as_tool(weather) is weather
    with pytest.raises(ToolwiseError, match="is not a tool"):
        as_tool("calculator")  # type: ignore[arg-type]


def test_how_many_calls_at_once_is_a_term_of_a_tool() -> None:
    @tool(max_concurrent=3)
    def few() -> int:
        return 0

    assert few.max_concurrent == 3
    assert few.with_options(price=2.0).max_concurrent == 3
    for wrong in (0, True, 1.5):
        with pytest.raises(ToolwiseError, match="max_concurrent must be an integer ≥ 1"):
            few.with_options(max_concurrent=wrong)


def test_a_cell_s_tool_follows_the_file_that_each_run_gives_it(tmp_path: Path) -> None:
    from toolwise.config.imports import register, unregister
    from toolwise.tools import isolation

    source = "import os\ndef rate() -> str:\n    return '{n}' if os.environ.get('TOOLWISE_WORKER') else 'here'\n"
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "/tmp/ipykernel_0/rate.py", "exec"), space)
    made, file = tool(space["rate"]), tmp_path / "tool_rate.py"
    try:
        assert call(made)[0] == "here"  # tried by hand before any run
        for number in (1, 2, 3):
            file.write_text(source.format(n=number))
            register(space["rate"], f"{file}:rate")
            assert call(made)[0] == str(number)
        unregister(space["rate"])
        assert call(made)[0] == "here"
    finally:
        unregister(space["rate"])
        isolation.close()


def rated(word: str, value: int = 0):  # type: ignore[no-untyped-def]
    """Returns something to read, and a number beside it."""
    return [("fine", 0.5), ("fine", 1, {"a": 2}), ("x", "y"), (1.0, 2.0), ("x", True), "fine"][value]


@pytest.mark.parametrize("isolate", [True, False])
def test_a_reward_that_is_not_annotated_is_warned_of_once(isolate: bool, caplog: pytest.LogCaptureFixture) -> None:
    target = FunctionTool(rated, isolate=isolate)
    for value in (2, 3, 4, 5):
        call(target, word="a", value=value)
    assert not caplog.records
    assert call(target, word="a") == ('["fine", 0.5]', None, {"ok": True})
    assert call(target, word="a", value=1)[2] == {"ok": True}
    (record,) = caplog.records
    assert "tool rated returned (text, reward)" in record.getMessage()
    assert "annotate -> tuple[str, float] to give a reward" in record.getMessage()
