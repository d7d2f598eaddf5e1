"""Learning-rate schedules: linear warm-up, then constant, linear decay or cosine decay."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def lr_factor(
    step: int, *, schedule: Schedule = "constant", warmup_steps: int = 0, total_steps: int = 0, floor: float = 0.0
) -> float:
    """The rate's factor at `step` (counted from 1); `floor` is the factor at `total_steps` and after."""
    if step <= warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    decay = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * decay
