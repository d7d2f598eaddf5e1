"""Reads data files into `Task`s and serves them in seeded, resumable batches."""

from __future__ import annotations

from toolwise.data.batches import Batches
from toolwise.data.rows import load_tasks

__all__ = ["Batches", "load_tasks"]
