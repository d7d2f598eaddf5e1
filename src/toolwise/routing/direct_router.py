"""The router used without routing: every prompt unchanged, with all tools of its task."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.protocols import Metrics
from toolwise.types import Rollout, RouteDecision, ScoredRollout, Task


@dataclass(frozen=True, slots=True)
class DirectRouter:
    """One group per prompt, with a seed that depends on the run, the step, the label and the index."""

    seed: int

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        # A task that occurs twice in a step, under another label, must not repeat its rollouts.
        salt = 0 if label == "step" else zlib.crc32(label.encode()) << 24
        return [
            RouteDecision(
                task=task,
                group_id=f"{label}-{step}/{index}/{task.task_id}",
                n=n,
                seed=((self.seed * 1_000_003 + step) * 65_537 + index) ^ salt,
                prompt=task.prompt,
            )
            for index, task in enumerate(tasks)
        ]

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        return {}

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """None: there is no budget."""
        return None

    def save(self, folder: Any) -> None:
        """Nothing to save."""

    def load(self, folder: Any) -> None:
        """Nothing to load."""

    def warm_start(self) -> None:
        """Nothing to train."""

    def with_written_usage(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        return rollouts

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return
