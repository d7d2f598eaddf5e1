"""Checkpoints: all that must survive a crash, on disk whole or not at all. The training loop saves them
and resumes from the latest. Tensors are in safetensors files, the rest in JSON; nothing is pickled."""

from toolwise.checkpoint.files import make_folder, sync
from toolwise.checkpoint.loading import OVERSPEND, Checkpoint, best, kept_figures, latest, load, rank
from toolwise.checkpoint.locking import FolderLock
from toolwise.checkpoint.manifest import MANIFEST, digest
from toolwise.checkpoint.randomness import Randomness
from toolwise.checkpoint.registry import Registry
from toolwise.checkpoint.saving import save

__all__ = [
    "MANIFEST",
    "OVERSPEND",
    "Checkpoint",
    "FolderLock",
    "Randomness",
    "Registry",
    "best",
    "digest",
    "kept_figures",
    "latest",
    "load",
    "make_folder",
    "rank",
    "save",
    "sync",
]
