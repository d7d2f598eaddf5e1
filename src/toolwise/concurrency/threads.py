"""How many threads a run computes with on a CPU, and what must be said before the first of them starts."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from toolwise.config.schema import RunConfig

SMALL_MODEL_WEIGHTS = 4_000_000
"""A model of fewer is faster with one thread: 1.3 times for one of 0.9 million weights, 1.4 for one of 2.2 million."""


def configure_threads(config: RunConfig) -> None:
    """On a shared machine idle threads must sleep, not spin; a deterministic run has one."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU computes the same twice only with this
    import torch

    _initial_thread_count()
    if config.deterministic:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


def set_thread_count(config: RunConfig, model: Any) -> None:
    """As many as are of use to this model. What the configuration says comes first, then the environment."""
    import torch

    if config.deterministic:
        return
    threads = config.model.threads or _initial_thread_count()
    if config.model.threads is None and "OMP_NUM_THREADS" not in os.environ and model.device.type == "cpu":
        small = sum(weight.numel() for weight in model.parameters()) < SMALL_MODEL_WEIGHTS
        threads = 1 if small else threads
    torch.set_num_threads(threads)


@cache
def _initial_thread_count() -> int:
    """What this process began with: another run may have left fewer."""
    import torch

    return torch.get_num_threads()
