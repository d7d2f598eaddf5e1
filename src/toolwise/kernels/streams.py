"""CUDA streams of a process by what they are for, so that no two of them are the same.

torch hands out 32 streams in turn and begins again: a stream taken for each capture would sooner or later be the one on
which something else runs, and what that launches meanwhile would become part of the graph.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch

Purpose = Literal["engine", "update", "warm-up", "capture", "checkpoint"]

_streams: dict[tuple[torch.device, Purpose], Any] = {}
_lock = threading.Lock()


def stream_for(purpose: Purpose, device: torch.device) -> Any:
    """The stream of the process for this purpose."""
    with _lock:
        if (device, purpose) not in _streams:
            _streams[device, purpose] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device, purpose]
