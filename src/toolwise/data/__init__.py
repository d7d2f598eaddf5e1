"""Reads data files into `Task`s and serves them in seeded, resumable batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolwise.lazy_imports import lazy_names

if TYPE_CHECKING:
    from toolwise.data.batches import Batches
    from toolwise.data.rows import load_tasks
    from toolwise.data.sources import open_tasks

__all__ = ["Batches", "load_tasks", "open_tasks"]

__getattr__ = lazy_names(
    __name__,
    {
        "toolwise.data.batches": ["Batches"],
        "toolwise.data.rows": ["load_tasks"],
        "toolwise.data.sources": ["open_tasks"],
    },
)
