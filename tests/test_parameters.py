"""A tool's parameters as what arguments are checked by."""

from __future__ import annotations

import json

import pytest

from toolwise.errors import ConfigError
from toolwise.parameters import compile_parameters


def fits(schema: object, arguments: object) -> bool:
    return compile_parameters("t", json.dumps(schema)).is_valid(arguments)


def test_an_argument_that_the_tool_lacks_is_a_mistake() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert fits(schema, {"a": 1})
    assert not fits(schema, {"a": 1, "b": 2})


@pytest.mark.parametrize("open_schema", [{}, {"type": "object", "properties": {}}, True])
def test_a_schema_that_names_no_properties_stays_open(open_schema: object) -> None:
    assert fits(open_schema, {"b": 2})


def test_what_is_no_schema_is_named() -> None:
    with pytest.raises(ConfigError, match="tool t: its parameters are no JSON schema"):
        compile_parameters("t", json.dumps({"type": "nonsense"}))


def test_equal_schemas_share_a_validator() -> None:
    text = json.dumps({"type": "object"})
    assert compile_parameters("t", text) is compile_parameters("t", text)
