"""Loads models from a folder, from a hub by name, or the small one that ships with the package. Lazy imports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolwise.models.folder import BUILTIN, locate
    from toolwise.models.loader import load_chat, load_model

_MODULE_OF = {"BUILTIN": "folder", "load_chat": "loader", "load_model": "loader", "locate": "folder"}

__all__ = ["BUILTIN", "load_chat", "load_model", "locate"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
