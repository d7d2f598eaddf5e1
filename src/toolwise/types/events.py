"""The events of a run that trackers and callbacks receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolwise.types.parts import UpdatedTokens
from toolwise.types.rollouts import CreditedRollout, ScoredRollout


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run that is about to train, for the first time or again."""

    run_folder: Path
    name: str
    step: int
    """Steps already done. A resumed run repeats the later ones, whose metrics are discarded."""
    total_steps: int
    settings: Mapping[str, Any]
    """The run's configuration as nested tables, with secrets masked."""


@dataclass(frozen=True, slots=True)
class _RunEvent:
    run_folder: Path
    step: int
    """Steps done so far; the first step is 1."""
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StepEvent(_RunEvent):
    """A training step has finished."""

    rollouts: tuple[ScoredRollout, ...]
    """All rollouts of the step."""
    credited: tuple[CreditedRollout, ...]
    """Those that the update used, with their advantages."""
    updated: Mapping[str, UpdatedTokens] = field(default_factory=dict)
    """What the learner computed for their tokens, by rollout id."""


@dataclass(frozen=True, slots=True)
class ValidationEvent(_RunEvent):
    """The held-out tasks have been scored. The names of its metrics start with "eval/"."""

    rollouts: tuple[ScoredRollout, ...]


@dataclass(frozen=True, slots=True)
class CheckpointEvent(_RunEvent):
    """A checkpoint has been written. Its metrics are the step's validation, without the prefix "eval/"; empty if there
    was none."""

    path: Path
    """Folder of the checkpoint; its subfolder `model` can be loaded with transformers."""


@dataclass(frozen=True, slots=True)
class EndEvent(_RunEvent):
    """The run has ended and written its summary: it is finished, interrupted, or was stopped. Its metrics are those of
    the last step; empty if this process trained none."""

    summary: Mapping[str, Any]
    """As in summary.json."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Returned by a callback to end the run; `reason` is shown and recorded in the summary."""

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise TypeError(f"Stop needs a reason as text, got {type(self.reason).__name__}")
