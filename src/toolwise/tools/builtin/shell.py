"""The `shell` tool: runs shell commands written by the model in separate namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from toolwise.tools.base import FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.builtin.program import ProgramTool

if TYPE_CHECKING:
    from toolwise.sandbox.programs.run import Language


class ShellTool(ProgramTool):
    """Runs one command line per call. Processes it starts end with the call.

    It needs the tier `namespaced`, or explicitly `tier="standard"` with `permissions=["subprocess"]`.
    """

    language: ClassVar[Language] = "shell"
    parameter = "command"

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or _SCHEMA)


_SCHEMA = OpenAIFunctionToolSchema(
    function=FunctionSchema(
        name="shell",
        description=(
            "Runs a shell command and gives back what it prints. Files in the working folder stay between calls; "
            "variables, the current folder and background processes do not. There is no network."
        ),
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command, for example wc -l *.txt."}},
            "required": ["command"],
        },
    )
)
