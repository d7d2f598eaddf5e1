"""The tools that a model was trained with, recorded beside its weights; used without them, it is another agent."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolwise.errors import CheckpointError, ConfigError
from toolwise.serialization.json_text import json_text
from toolwise.tools.base import BaseTool

log = logging.getLogger("toolwise.tools")

TOOLS_FILE = "tools.json"
"""In the model's folder of a checkpoint and in an export; plain `transformers` does not look at it."""
FORMAT = 1


def write_tools(folder: Path, tools: Mapping[str, BaseTool]) -> None:
    """The names and schemas of `tools`, in OpenAI's form."""
    told = {"format": FORMAT, "tools": [_schema(tool) for tool in tools.values()]}
    (folder / TOOLS_FILE).write_text(json_text(told, indent=2) + "\n", encoding="utf-8")


def read_tools(folder: Path) -> dict[str, Any]:
    """name -> schema; nothing where an older version wrote the folder."""
    try:
        told = json.loads((folder / TOOLS_FILE).read_text(encoding="utf-8"))
        if told["format"] != FORMAT:
            raise CheckpointError(f"{folder / TOOLS_FILE} is of format {told['format']}, this version reads {FORMAT}")
        return {schema["function"]["name"]: schema for schema in told["tools"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(
            f"{folder / TOOLS_FILE} cannot be read ({fault}): copy or export the folder again"
        ) from None


def check_recorded_tools(folder: Path, tools: Mapping[str, BaseTool], hint: str) -> None:
    """Refuse the model in `folder` where a tool that it was trained with is missing; `hint` says what to do."""
    recorded = read_tools(folder)
    missing = [name for name in recorded if name not in tools]
    if missing:
        were = ", ".join(recorded)
        raise ConfigError(f"{folder} was trained with the tools {were}; missing here: {', '.join(missing)}; {hint}")
    for name, schema in recorded.items():
        if _schema(tools[name])["function"]["parameters"] != schema["function"]["parameters"]:
            log.warning("the tool %s takes other arguments than the one that %s was trained with", name, folder)


def _schema(tool: BaseTool) -> dict[str, Any]:
    return tool.get_openai_tool_schema().model_dump(mode="json")
