"""Tools that an agent can call: the tool life cycle, the built-in tools, and Python functions as tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolwise.lazy_imports import lazy_names
from toolwise.tools.base import BaseTool, FunctionSchema, OpenAIFunctionToolSchema
from toolwise.tools.function import FunctionTool, as_tool, tool
from toolwise.tools.schema import validate_arguments

if TYPE_CHECKING:
    from toolwise.tools.builtin.calculator import CalculatorTool
    from toolwise.tools.builtin.gsm8k import Gsm8kTool
    from toolwise.tools.builtin.program import PythonTool, ShellTool
    from toolwise.tools.builtin.search.tool import SearchTool
    from toolwise.tools.catalog import TOOLS, build_tools

_NAMES = {
    "toolwise.tools.builtin.calculator": ["CalculatorTool"],
    "toolwise.tools.builtin.gsm8k": ["Gsm8kTool"],
    "toolwise.tools.builtin.program": ["PythonTool", "ShellTool"],
    "toolwise.tools.builtin.search.tool": ["SearchTool"],
    "toolwise.tools.catalog": ["TOOLS", "build_tools"],
}
"""Imported on first use: tool workers start often and need none of them."""

__getattr__ = lazy_names(__name__, _NAMES)

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
