"""What an optimiser step must not be: not a number, or far out of line. Such steps are skipped, counted and named."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

log = logging.getLogger("toolwise.learner")

HISTORY_SIZE = 64
"""Norms that the median is taken over."""
MIN_HISTORY = 16
"""Below so many there is no saying what is usual."""
MAX_NAMED_ROLLOUTS = 5


class Guard:
    """Decides by the norm of the gradient, which sees everything that goes into a step."""

    def __init__(self, spike_factor: float | None, *, floor: float = 0.0, owner: str = "actor") -> None:
        self.spike_factor = spike_factor
        self.floor = floor
        """A norm up to this is never a spike: clipping leaves it alone, however small the others were."""
        self.owner = owner
        self.not_numbers = 0
        self.spikes = 0
        self._norms: deque[float] = deque(maxlen=HISTORY_SIZE)

    @property
    def skipped(self) -> int:
        return self.not_numbers + self.spikes

    def admits(self, norm: float, suspects: Callable[[], Sequence[str]] = list) -> bool:
        """Whether to take the step; `suspects` gives the rollouts to name if not, the likeliest first."""
        if not math.isfinite(norm):
            self.not_numbers += 1
            self._warn(f"the gradient's norm is {norm}", suspects)
            return False
        usual = median(self._norms) if len(self._norms) >= MIN_HISTORY else math.inf
        if norm > 0.0:  # a step without any gradient says nothing of what is usual
            self._norms.append(norm)
        # Remembered even when skipped: if this is how it is from now on, the median follows and learning goes on.
        if self.spike_factor is not None and norm > max(self.floor, self.spike_factor * usual):
            self.spikes += 1
            self._warn(f"the gradient's norm is {norm:.3g}, {norm / usual:.0f} times the usual {usual:.3g}", suspects)
            return False
        return True

    def _warn(self, what: str, suspects: Callable[[], Sequence[str]]) -> None:
        names = list(dict.fromkeys(suspects()))
        more = f" and {len(names) - MAX_NAMED_ROLLOUTS} more" if len(names) > MAX_NAMED_ROLLOUTS else ""
        who = f"; rollouts {', '.join(names[:MAX_NAMED_ROLLOUTS])}{more}" if names else ""
        log.warning("an update of the %s is skipped: %s%s", self.owner, what, who)

    def state_dict(self) -> dict[str, Any]:
        return {"not_numbers": self.not_numbers, "spikes": self.spikes, "norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.not_numbers, self.spikes = state["not_numbers"], state["spikes"]
        self._norms = deque(state["norms"], maxlen=HISTORY_SIZE)
