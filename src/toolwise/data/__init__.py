"""The data room: rows of a file become `Task`s, and tasks become seeded, resumable batches."""

from __future__ import annotations

from toolwise.data.batches import Batches
from toolwise.data.rows import load_tasks

__all__ = ["Batches", "load_tasks"]
