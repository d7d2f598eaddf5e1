"""The names of a configuration's settings, without those of its tables."""

from __future__ import annotations

from pydantic import BaseModel

from toolwise.config.loader import setting_paths


def setting_keys(model: type[BaseModel]) -> list[str]:
    paths = list(dict.fromkeys(setting_paths(model)))
    return [path for path in paths if not any(other.startswith(f"{path}.") for other in paths)]
