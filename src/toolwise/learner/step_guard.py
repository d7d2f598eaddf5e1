"""Guard against bad optimiser steps: skips, counts and logs those whose gradient norm is not finite or spikes."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

log = logging.getLogger("toolwise.learner")

HISTORY_SIZE = 64
"""Gradient norms that the running median covers."""
MIN_HISTORY = 16
"""With fewer norms than this, nothing counts as a spike."""
MAX_NAMED_ROLLOUTS = 5


class Guard:
    """Decides by the gradient norm, which reflects everything that goes into a step."""

    def __init__(self, spike_factor: float, *, floor: float = 0.0, owner: str = "actor") -> None:
        self.spike_factor = spike_factor
        """0: nothing counts as a spike."""
        self.floor = floor
        """A norm up to this is never a spike, however small the others were: clipping would not touch it."""
        self.owner = owner
        self.not_numbers = 0
        self.spikes = 0
        self._norms: deque[float] = deque(maxlen=HISTORY_SIZE)

    @property
    def skipped(self) -> int:
        return self.not_numbers + self.spikes

    def admits(self, norm: float, suspects: Callable[[], Sequence[str]] = list) -> bool:
        """Whether to take the step. If not, the warning lists the rollouts from `suspects`, most likely first."""
        if not math.isfinite(norm):
            self.not_numbers += 1
            self._warn(f"the gradient norm is {norm}", suspects)
            return False
        typical = median(self._norms) if len(self._norms) >= MIN_HISTORY else math.inf
        if norm > 0.0:  # a step without gradients says nothing about the typical norm
            self._norms.append(norm)
        # Recorded even when skipped: if norms stay at this level, the median follows and training continues.
        if self.spike_factor and norm > max(self.floor, self.spike_factor * typical):
            self.spikes += 1
            self._warn(
                f"the gradient norm is {norm:.3g}, {norm / typical:.0f} times the median {typical:.3g}", suspects
            )
            return False
        return True

    def _warn(self, reason: str, suspects: Callable[[], Sequence[str]]) -> None:
        names = list(dict.fromkeys(suspects()))
        more = f" and {len(names) - MAX_NAMED_ROLLOUTS} more" if len(names) > MAX_NAMED_ROLLOUTS else ""
        rollouts = f"; rollouts {', '.join(names[:MAX_NAMED_ROLLOUTS])}{more}" if names else ""
        log.warning("skipped an update of the %s: %s%s", self.owner, reason, rollouts)

    def state_dict(self) -> dict[str, Any]:
        return {"not_numbers": self.not_numbers, "spikes": self.spikes, "norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.not_numbers, self.spikes = state["not_numbers"], state["spikes"]
        self._norms = deque(state["norms"], maxlen=HISTORY_SIZE)
