"""Atomic checkpoints of everything that must survive a crash. The trainer saves them and resumes from the latest.
Tensors are stored as safetensors, everything else as JSON; nothing is pickled."""

from toolwise.serialization.files import make_folder, sync
from toolwise.training.checkpoint.loader import (
    OVERSPEND,
    Checkpoint,
    best,
    checkpoint_metrics,
    latest,
    load,
    ranking_key,
)
from toolwise.training.checkpoint.lock import FolderLock
from toolwise.training.checkpoint.manifest import MANIFEST, settings_digest
from toolwise.training.checkpoint.random_state import RngState
from toolwise.training.checkpoint.registry import StateRegistry
from toolwise.training.checkpoint.writer import save

__all__ = [
    "MANIFEST",
    "OVERSPEND",
    "Checkpoint",
    "FolderLock",
    "RngState",
    "StateRegistry",
    "best",
    "checkpoint_metrics",
    "latest",
    "load",
    "make_folder",
    "ranking_key",
    "save",
    "settings_digest",
    "sync",
]
