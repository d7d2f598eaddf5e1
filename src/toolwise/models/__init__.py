"""Loads models from a folder, from a hub by name, or the small one that ships with the package."""

from __future__ import annotations

from toolwise.models.folder import BUILTIN, locate
from toolwise.models.loader import load_model

__all__ = ["BUILTIN", "load_model", "locate"]
