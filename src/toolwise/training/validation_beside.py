"""A validation that runs while the learner goes on: see `AsyncLoop.hold_weights`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from toolwise.protocols import Metrics
from toolwise.types import ScoredRollout

Measured = tuple[Metrics, Sequence[ScoredRollout] | None]
"""What calibration reports, and the rollouts of the validation; None without validation tasks."""


@dataclass(frozen=True, slots=True)
class ValidationBeside:
    step: int
    """Whose weights are measured."""
    task: asyncio.Task[Measured]
    saved: bool
    """Whether a checkpoint of these weights is being saved, to which the results belong."""
