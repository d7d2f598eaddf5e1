"""CUDA streams of a process by what they are for, so that no two of them are the same.

torch hands out 32 streams in turn and begins again: a stream taken for each capture would sooner or later be the one on
which something else runs, and what that launches meanwhile would become part of the graph. Other libraries take from
the same 32, so those of a device are taken together: were one taken later, it could be another one come round.
"""

from __future__ import annotations

import threading
from typing import Any, Literal, get_args

import torch

Purpose = Literal["engine", "update", "warm-up", "capture", "checkpoint"]

_streams: dict[tuple[torch.device, Purpose], Any] = {}
_lock = threading.Lock()


def stream_for(purpose: Purpose, device: torch.device) -> Any:
    """The stream of the process for this purpose."""
    with _lock:
        if (device, purpose) not in _streams:
            for each in get_args(Purpose):
                _streams[device, each] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device, purpose]
