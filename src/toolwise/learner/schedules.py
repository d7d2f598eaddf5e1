"""The learning rate over a run: up from nothing, then constant, or down along a line or a cosine."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def lr_factor(
    step: int, *, schedule: Schedule = "constant", warmup_steps: int = 0, total_steps: int = 0, floor: float = 0.0
) -> float:
    """What the rate is multiplied by in step 1, 2, …; `floor` is what is left of it at `total_steps` and after."""
    if step <= warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return floor + (1.0 - floor) * left
