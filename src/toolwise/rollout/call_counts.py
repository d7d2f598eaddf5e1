"""What an episode's calls add up to: calls and failures by tool, their cost, and the time they waited for a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.envs.tool_env import add_counts
from toolwise.rollout.decision import count_tokens
from toolwise.types import StepData, Usage


@dataclass(slots=True)
class CallCounts:
    calls: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0
    queue_s: list[float] = field(default_factory=list)

    def add(self, info: dict[str, Any]) -> None:
        """A step's `info`. The time in the queue is taken out: it says something of the machine, not of the step."""
        add_counts(self.calls, info.get("calls") or {})
        add_counts(self.failed, info.get("failed_calls") or {})
        self.cost += float(info.get("cost") or 0.0)
        self.queue_s += info.pop("queue_s", ())

    def usage(self, steps: Sequence[StepData], seconds: float) -> Usage:
        return Usage(
            calls=dict(self.calls),
            failed_calls=dict(self.failed),
            cost=self.cost,
            prompt_tokens=sum(count_tokens(s.policy_logprobs, "prompt_ids") for s in steps),
            sampled_tokens=sum(count_tokens(s.policy_logprobs, "token_ids") for s in steps),
            seconds=seconds,
            queue_s=sum(self.queue_s),
            longest_queue_s=max(self.queue_s, default=0.0),
        )
