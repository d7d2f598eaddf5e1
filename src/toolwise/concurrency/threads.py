"""CPU thread counts, and environment variables that must be set before the first compute thread starts."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.config.sft import SftConfig

SMALL_MODEL_WEIGHTS = 4_000_000
"""Smaller models are faster with one thread: 1.3 times at 0.9 million weights, 1.4 times at 2.2 million."""


def configure_threads(config: RunConfig | SftConfig) -> None:
    """Make idle threads sleep instead of spin (machines may be shared); a deterministic run uses one thread."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for reproducible results on a GPU
    import torch

    _initial_thread_count()
    if config.deterministic:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


def set_thread_count(config: RunConfig | SftConfig, model: Any) -> None:
    """Set the number of threads that suits this model. The configuration takes precedence, then the environment."""
    import torch

    if config.deterministic:
        return
    threads = config.model.threads or _initial_thread_count()
    if config.model.threads is None and "OMP_NUM_THREADS" not in os.environ and model.device.type == "cpu":
        small = sum(weight.numel() for weight in model.parameters()) < SMALL_MODEL_WEIGHTS
        threads = 1 if small else threads
    torch.set_num_threads(threads)


def core_count() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() or 1 if affinity is None else len(affinity(0))


@cache
def _initial_thread_count() -> int:
    """The count at process start: an earlier run may have lowered it."""
    import torch

    return torch.get_num_threads()
