"""Totals of an episode: calls and failures per tool, cost, and the time that calls and replies took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.envs.tool_env import add_counts
from toolwise.types import CountUsage, PriceCalls, RouteDecision, StepData, Usage
from toolwise.untrusted.bounds import MAX_DISTINCT_NAMES, MAX_NAME_CHARS, MAX_SCORE, truncate_text
from toolwise.untrusted.user_code import call_user_code, describe

OTHER_NAMES = "(other names)"


@dataclass(slots=True)
class CallCounts:
    count_usage: CountUsage | None = None
    """Counts the calls in the text instead, at the end of the episode."""
    calls: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    cost: float = 0.0
    queue_s: list[float] = field(default_factory=list)
    tool_s: dict[str, float] = field(default_factory=dict)
    reply_s: float = 0.0
    price: float = 0.0
    """Cost of the episode besides its calls, if the agent acted."""
    price_calls: PriceCalls | None = None
    """Prices the calls, instead of what the environment says they cost."""

    @classmethod
    def of(cls, decision: RouteDecision | None, count_usage: CountUsage | None) -> CallCounts:
        """For an episode of `decision`, at its prices."""
        if decision is None:
            return cls(count_usage)
        return cls(count_usage, price=decision.price, price_calls=decision.price_calls)

    def add(self, info: dict[str, Any]) -> None:
        """Add a step's `info`. Removes `queue_s` and `call_s` from it: times describe the machine, not the step."""
        for counts, new in ((self.calls, info.get("calls")), (self.failed, info.get("failed_calls"))):
            if new:
                add_counts(counts, _limit_names(counts, new))
        self.cost += _check_cost(float(info.get("cost") or 0.0))
        self.queue_s += info.pop("queue_s", ())
        for name, seconds in info.pop("call_s", ()):
            self.tool_s[name] = self.tool_s.get(name, 0.0) + seconds

    def recount(self, steps: Sequence[StepData]) -> str | None:
        """Replace the counts by those of `count_usage`, if given; returns its error if it fails."""
        if self.count_usage is None:
            return None
        try:
            calls, cost = call_user_code(self.count_usage, steps)
            self.calls, self.cost = dict(_limit_names({}, calls)), _check_cost(float(cost))
        except Exception as fault:
            return f"count_usage: {describe(fault)}"
        return None

    def usage(self, steps: Sequence[StepData], seconds: float) -> Usage:
        tokens = [step.tokens for step in steps]
        priced = self.price_calls is not None and self.count_usage is None
        cost = self.price_calls(self.calls) if priced and self.price_calls is not None else self.cost
        return Usage(
            calls=dict(self.calls),
            failed_calls=dict(self.failed),
            cost=cost + (self.price if steps else 0.0),
            prompt_tokens=sum(t.prompt_count for t in tokens),
            sampled_tokens=sum(t.sampled_count for t in tokens),
            seconds=seconds,
            queue_s=sum(self.queue_s),
            longest_queue_s=max(self.queue_s, default=0.0),
            tool_s=dict(self.tool_s),
            reply_s=self.reply_s,
        )


def _check_cost(cost: float) -> float:
    if not 0 <= cost <= MAX_SCORE:  # a NaN would silently corrupt the budget of the whole run
        raise ValueError(f"cost {cost} is not between 0 and {MAX_SCORE:g}")
    return cost


def _limit_names(counts: Mapping[str, int], new: Mapping[str, int]) -> Mapping[str, int]:
    """`new` with names that are safe to store: models and environments choose their length and number."""
    for name, count in new.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(
                f"the count of {truncate_text(str(name), MAX_NAME_CHARS)!r} is {count!r:.80}, not a whole number >= 0"
            )
    if len(counts) + len(new) <= MAX_DISTINCT_NAMES and all(len(name) <= MAX_NAME_CHARS for name in new):
        return new
    limited: dict[str, int] = {}
    for name, count in new.items():
        short = truncate_text(name, MAX_NAME_CHARS)
        key = short if short in counts or len(counts) + len(limited) < MAX_DISTINCT_NAMES else OTHER_NAMES
        limited[key] = limited.get(key, 0) + count
    return limited
