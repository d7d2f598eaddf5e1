"""Copies from host to device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(values: np.ndarray[Any, Any], device: torch.device | str) -> torch.Tensor:
    """Copy to the device without blocking: via pinned memory, since a copy from pageable memory would wait for the
    device."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
