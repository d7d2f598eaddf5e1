"""What an agent may call: the tool life cycle, the built-in tools, and Python functions as tools."""

from __future__ import annotations

from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.calculator import CalculatorTool
from toolwise.tools.catalog import TOOLS, build_tools
from toolwise.tools.function import FunctionTool, as_tool, tool
from toolwise.tools.gsm8k import Gsm8kTool
from toolwise.tools.python import PythonTool
from toolwise.tools.schema import validate_arguments
from toolwise.tools.search.tool import SearchTool
from toolwise.tools.shell import ShellTool

__all__ = [
    "TOOLS",
    "BaseTool",
    "CalculatorTool",
    "FunctionSchema",
    "FunctionTool",
    "Gsm8kTool",
    "OpenAIFunctionToolSchema",
    "PythonTool",
    "SearchTool",
    "ShellTool",
    "as_tool",
    "build_tools",
    "tool",
    "validate_arguments",
]
