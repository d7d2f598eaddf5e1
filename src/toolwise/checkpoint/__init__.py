"""Checkpoints: all that must survive a crash, on disk whole or not at all. The training loop saves them
and resumes from the latest. Tensors are in safetensors files, the rest in JSON; nothing is pickled."""

from toolwise.checkpoint.files import make_folder, sync
from toolwise.checkpoint.loading import OVERSPEND, Checkpoint, best, checkpoint_figures, latest, load, ranking_key
from toolwise.checkpoint.locking import FolderLock
from toolwise.checkpoint.manifest import MANIFEST, settings_digest
from toolwise.checkpoint.randomness import RngState
from toolwise.checkpoint.registry import StateRegistry
from toolwise.checkpoint.saving import save

__all__ = [
    "MANIFEST",
    "OVERSPEND",
    "Checkpoint",
    "FolderLock",
    "RngState",
    "StateRegistry",
    "best",
    "checkpoint_figures",
    "latest",
    "load",
    "make_folder",
    "ranking_key",
    "save",
    "settings_digest",
    "sync",
]
