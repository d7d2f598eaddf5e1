"""What an episode spends on tools, added up from what its world says of each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolwise.envs.tool_env import add_counts


@dataclass(slots=True)
class Spending:
    calls: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0
    queue_s: list[float] = field(default_factory=list)
    """How long calls waited for a worker or a place."""

    def add(self, info: dict[str, Any]) -> None:
        add_counts(self.calls, info.get("calls") or {})
        add_counts(self.failed, info.get("failed_calls") or {})
        self.cost += float(info.get("cost") or 0.0)
        self.queue_s += info.pop("queue_s", ())  # a clock's word, and no part of what happened in the step
