"""Building tools from a run's `tools` entries: names, references, mappings, functions, and error messages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toolwise.errors import ConfigError
from toolwise.sandbox.layers.bubblewrap import unavailable_reason
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.catalog import TOOLS, as_entries, build_tools
from toolwise.tools.function import tool

USER_FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from toolwise.tools import BaseTool, tool

@dataclass
class Place:
    name: str

@tool(family="SEARCH", price=0.5)
def locate(place: Place) -> str:
    """Finds a place."""
    return place.name

def shout(text: str) -> str:
    return text.upper()

class NeedsSchema(BaseTool):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return await super().create(instance_id, **kwargs)
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return self.config["greeting"], None, {}
    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None

finished = NeedsSchema({}, None)
nothing = 3
'''


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    path = tmp_path / "my_tools.py"
    path.write_text(USER_FILE)
    return str(path)


def double(x: int) -> int:
    return 2 * x


def test_names_functions_and_tools() -> None:
    calculator = CalculatorTool()
    made = build_tools([calculator, "search", double, tool(name="twice")(double)])
    assert list(made) == ["calculator", "search", "double", "twice"]
    assert made["calculator"] is calculator
    assert build_tools([]) == {}


def test_every_builtin_is_known_by_its_own_name() -> None:
    assert list(TOOLS) == ["calculator", "search", "calc_gsm8k_reward", "python", "shell"]
    here = [
        name for name in TOOLS if name != "shell" or not unavailable_reason()
    ]  # which needs namespaces, and says so itself
    assert list(build_tools(here)) == here


def test_a_mapping_configures() -> None:
    made = build_tools([{"name": "search", "price": 2, "family": "OTHER", "k": 3, "documents": ["x"]}])["search"]
    assert (made.price, made.family, made.config["k"]) == (2.0, "OTHER", 3)
    assert build_tools([{"name": "search", "family": "FILES"}])["search"].family == "FILES"  # for routes of one's own
    assert "name" not in made.config


def test_a_mapping_sets_the_terms_of_a_function() -> None:
    made = build_tools([{"name": double, "price": 3, "description": "Doubles."}])["double"]
    assert (made.price, made.tool_schema.function.description) == (3.0, "Doubles.")


def test_references_into_a_file(user_file: str) -> None:
    made = build_tools([f"{user_file}:locate", {"name": f"{user_file}:shout", "price": 0}])
    assert [(t.name, t.family, t.price) for t in made.values()] == [
        ("locate", "SEARCH", 0.5),
        ("shout", "OTHER", 0.0),
    ]
    assert asyncio.run(made["locate"].execute("i", {"place": {"name": "Rome"}}))[0] == "Rome"
    assert asyncio.run(made["shout"].execute("i", {"text": "hi"}))[0] == "HI"


def test_a_file_is_loaded_once(user_file: str) -> None:
    first = build_tools([f"{user_file}:locate"])["locate"]
    assert build_tools([f"{user_file}:locate"])["locate"] is first


def test_references_into_a_module() -> None:
    assert list(build_tools(["toolwise.tools.builtin.search.tool:SearchTool"])) == ["search"]


def test_a_class_gets_its_schema_from_the_mapping(user_file: str) -> None:
    entry = {
        "name": f"{user_file}:NeedsSchema",
        "tool_schema": {"type": "function", "function": {"name": "greet"}},
        "greeting": "hello",
    }
    made = build_tools([entry])["greet"]
    assert asyncio.run(made.execute("i", {}))[0] == "hello"
    assert made.config == {"greeting": "hello"}


def test_a_builtin_may_be_a_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(config: dict[str, Any]) -> BaseTool:
        return CalculatorTool(config, OpenAIFunctionToolSchema(function=FunctionSchema(name="abacus")))

    monkeypatch.setitem(TOOLS, "abacus", factory)
    assert build_tools([{"name": "abacus", "price": 7}])["abacus"].price == 7.0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["calculater"], "no tool 'calculater'; did you mean 'calculator'?"),
        (["zzz"], "no tool 'zzz'; there are calc_gsm8k_reward, calculator, "),
        (["search", {"name": "search"}], "'search' is listed twice"),
        ([{"price": 1}], "an entry has no `name`, only price"),
        ([{"name": "search", "document": []}], "search has no option 'document'; did you mean 'documents'?"),
        (
            [{"name": "calculator", "k": 1}],
            "calculator has no option 'k'; it has family, isolate, max_concurrent, price",
        ),
        ([{"name": "search", "price": "dear"}], "search: price must be a number ≥ 0, got 'dear'"),
        ([{"name": "search", "family": "SERCH"}], "search: family must be one of SEARCH, CALCULATE, OTHER"),
        ([{"name": "search", "family": "a b"}], "search: family must be one of SEARCH, CALCULATE, OTHER"),
        ([{"name": double, "cost": 1}], "double has no option 'cost'"),
        (["no.such.module:x"], "cannot import 'no.such.module'"),
        (["no_such_file.py:x"], "file 'no_such_file.py' does not exist"),
        (["toolwise.tools.builtin.search.tool:SearchTol"], "has no 'SearchTol'; did you mean 'SearchTool'?"),
        (["toolwise.tools.builtin.search.index:MAX_TERMS"], "is not a tool"),
        ([lambda: 1], "<lambda>"),
        ([3], "is not a tool"),
        ([{"name": CalculatorTool(), "price": 2}], "is an existing tool object; set price where it is created"),
        (
            [{"name": "search", "tool_schema": {"function": {}}}],
            "search: tool_schema.function.name: Field required",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(entries: list[Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tools(entries)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("NeedsSchema", "needs a tool_schema next to its name"),
        ("locat", "did you mean 'locate'?"),
        ("nothing", "is not a tool"),
    ],
)
def test_mistakes_in_a_file_are_named(user_file: str, attribute: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tools([f"{user_file}:{attribute}"])
    assert message in str(caught.value)
    assert user_file in str(caught.value)


def test_a_file_that_fails_says_how(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no luck')")
    for _ in range(2):
        with pytest.raises(ConfigError, match="RuntimeError: no luck"):
            build_tools([f"{path}:x"])


def test_what_is_neither_a_tool_nor_a_list_is_one_line() -> None:
    with pytest.raises(ConfigError, match="tools: 3 is neither a tool nor a list of tools"):
        as_entries(3)  # type: ignore[arg-type]
