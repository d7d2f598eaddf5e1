"""Tools that ship with Toolwise."""

from __future__ import annotations

from typing import Any, ClassVar

from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema


class BuiltinTool(BaseTool):
    """A tool with a default schema, which a configuration may replace."""

    default_schema: ClassVar[OpenAIFunctionToolSchema]

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or self.default_schema)


def one_argument_schema(
    name: str, description: str, argument: str, argument_description: str
) -> OpenAIFunctionToolSchema:
    """The schema of a tool with one argument, a string."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": argument_description}},
        "required": [argument],
    }
    return OpenAIFunctionToolSchema(function=FunctionSchema(name=name, description=description, parameters=parameters))
