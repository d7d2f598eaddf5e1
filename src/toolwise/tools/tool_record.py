"""Records the tools a model was trained with next to its weights, and checks them when the model is used."""

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
"""In a checkpoint's model folder and in an export; plain `transformers` ignores it."""
FORMAT = 1


def write_tools(folder: Path, tools: Mapping[str, BaseTool]) -> None:
    """Write the names and schemas of `tools` in OpenAI's format."""
    record = {"format": FORMAT, "tools": [_schema(tool) for tool in tools.values()]}
    (folder / TOOLS_FILE).write_text(json_text(record, indent=2) + "\n", encoding="utf-8")


def read_tools(folder: Path) -> dict[str, Any]:
    """name -> schema; empty if an older version wrote the folder."""
    try:
        record = json.loads((folder / TOOLS_FILE).read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise CheckpointError(f"{folder / TOOLS_FILE} has format {record['format']}, this version reads {FORMAT}")
        return {schema["function"]["name"]: schema for schema in record["tools"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(
            f"{folder / TOOLS_FILE} cannot be read ({fault}): copy or export the folder again"
        ) from None


def check_recorded_tools(folder: Path, tools: Mapping[str, BaseTool], hint: str) -> None:
    """Raise if a tool that the model in `folder` was trained with is missing; `hint` tells the user what to do."""
    recorded = read_tools(folder)
    missing = [name for name in recorded if name not in tools]
    if missing:
        names = ", ".join(recorded)
        raise ConfigError(f"{folder} was trained with the tools {names}; missing here: {', '.join(missing)}; {hint}")
    for name, schema in recorded.items():
        if _schema(tools[name])["function"]["parameters"] != schema["function"]["parameters"]:
            log.warning("the tool %s takes other arguments than when %s was trained", name, folder)


def _schema(tool: BaseTool) -> dict[str, Any]:
    return tool.get_openai_tool_schema().model_dump(mode="json")
