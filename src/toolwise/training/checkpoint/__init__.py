"""Atomic checkpoints of everything that must survive a crash. The trainer saves them and resumes from the latest.
Tensors are stored as safetensors, everything else as JSON; nothing is pickled."""

from toolwise.serialization.files import make_folder, sync
from toolwise.training.checkpoint.loader import (
    MANIFEST,
    OVERSPEND,
    Checkpoint,
    best,
    checkpoint_metrics,
    latest,
    load,
    ranking_key,
    settings_digest,
)
from toolwise.training.checkpoint.lock import FolderLock
from toolwise.training.checkpoint.writer import (
    STAGED,
    RngState,
    StateRegistry,
    amend,
    cleaning_up,
    save,
    tensor_bytes,
)

__all__ = [
    "MANIFEST",
    "OVERSPEND",
    "STAGED",
    "Checkpoint",
    "FolderLock",
    "RngState",
    "StateRegistry",
    "amend",
    "best",
    "checkpoint_metrics",
    "cleaning_up",
    "latest",
    "load",
    "make_folder",
    "ranking_key",
    "save",
    "settings_digest",
    "sync",
    "tensor_bytes",
]
