"""The router that does not route: every prompt as it is, with all the tools its task offers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.protocols import Metrics
from toolwise.types import Rollout, RouteDecision, ScoredRollout, Task


@dataclass(frozen=True, slots=True)
class DirectRouter:
    """Gives each prompt a group of its own, and a seed that depends on the run, the step, the label and the place."""

    seed: int

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        # A task that comes up again within a step, under another label, must not repeat its rollouts.
        salt = 0 if label == "step" else zlib.crc32(label.encode()) << 24
        return [
            RouteDecision(
                task=task,
                group_id=f"{label}-{step}/{place}/{task.task_id}",
                n=n,
                seed=((self.seed * 1_000_003 + step) * 65_537 + place) ^ salt,
                prompt=task.prompt,
            )
            for place, task in enumerate(tasks)
        ]

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        return {}

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """There is no budget to exceed."""
        return None

    def save(self, folder: Any) -> None:
        """There is nothing to save beside the weights."""

    def load(self, folder: Any) -> None:
        """Nor to load."""

    def warm_start(self) -> None:
        """Nor to learn."""

    def with_written_usage(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """What was spent is what the tools say."""
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return
