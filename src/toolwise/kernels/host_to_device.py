"""From the host's memory to where kernels run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(values: np.ndarray[Any, Any], device: torch.device | str) -> torch.Tensor:
    """A tensor on the device, which goes on with what it is doing: from pageable memory a copy would wait for it."""
    found = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type == "cuda":
        found = found.pin_memory()
    return found.to(device, non_blocking=True)
