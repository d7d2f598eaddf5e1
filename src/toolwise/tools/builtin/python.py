"""The `python` tool: runs Python programs written by the model in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.builtin.program import ProgramTool

if TYPE_CHECKING:
    from toolwise.sandbox.programs.run import Language


class PythonTool(ProgramTool):
    """Runs one program per call, in a fresh interpreter without network or subprocesses."""

    family = "CALCULATE"
    language: ClassVar[Language] = "python"
    parameter = "code"

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or _SCHEMA)


_SCHEMA = OpenAIFunctionToolSchema(
    function=FunctionSchema(
        name="python",
        description=(
            "Runs a Python program and gives back what it prints, with the value of a last expression. Each call is a "
            "fresh interpreter: files in the working folder stay between calls, variables do not. There is no network."
        ),
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program, for example print(2**10)."}},
            "required": ["code"],
        },
    )
)
