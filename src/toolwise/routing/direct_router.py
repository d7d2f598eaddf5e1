"""The router used without routing: every prompt unchanged, with all tools of its task."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from toolwise.protocols import Router
from toolwise.types import RouteDecision, Task


@dataclass(frozen=True, slots=True)
class DirectRouter(Router):
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
