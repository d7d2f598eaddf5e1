"""Fault rates of a run by cause: counted over the whole run, and limited over its latest rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.config.schema import FaultsConfig
from toolwise.protocols import Metrics
from toolwise.types import ScoredRollout, StopReason

_FAULT_OF_STOP_REASON = {
    StopReason.POLICY_FAULT: "policy",
    StopReason.ENV_FAULT: "env",
    StopReason.DEADLINE: "deadline",
}
_MODEL_ERROR_KINDS = {"bad_json", "unknown_tool", "forbidden_tool", "bad_arguments", "tool_error"}
"""Failed calls caused by the model or refused by a tool; all other kinds are tool faults."""
CALL_FAULTS = ("tool", "parse")
_FAULT_DESCRIPTIONS = {
    "policy": "the policy failed",
    "env": "the environment failed",
    "deadline": "the episode passed rollout.deadline_s",
    "infrastructure": "the backend of a tool was down",
    "tool": "the tool raised or timed out",
    "parse": "the call could not be parsed",
}


def count_faults(scored: Sequence[ScoredRollout]) -> dict[str, int]:
    """Faults by class, with the totals `rollouts` and `calls`."""
    counts: Counter[str] = Counter(
        {"rollouts": len(scored), "calls": 0, **dict.fromkeys(_FAULT_DESCRIPTIONS, 0), "reward": 0}
    )
    for s in scored:
        rollout = s.rollout
        if rollout.stop_reason in _FAULT_OF_STOP_REASON:
            counts[_FAULT_OF_STOP_REASON[rollout.stop_reason]] += 1
        counts["infrastructure"] += rollout.infrastructure_fault
        counts["reward"] += s.result.error is not None
        counts["calls"] += sum(rollout.usage.calls.values())
        for kind, times in rollout.usage.failed_calls.items():
            counts["parse"] += times if kind == "bad_json" else 0
            counts["tool"] += times if kind not in _MODEL_ERROR_KINDS else 0
    return dict(counts)


def fault_metrics(scored: Sequence[ScoredRollout]) -> Metrics:
    """`faults/policy`, …: number of the step's rollouts, or calls, with that fault; `faults/rollouts`: with any."""
    counts = count_faults(scored)
    faulty = sum(is_faulty(s) for s in scored)
    by_class = {f"faults/{name}": float(counts[name]) for name in (*_FAULT_DESCRIPTIONS, "reward")}
    return {"faults/rollouts": float(faulty), **by_class}


def is_faulty(scored: ScoredRollout) -> bool:
    """Whether a fault ended the rollout or kept it from being scored."""
    rollout = scored.rollout
    return (
        rollout.stop_reason in _FAULT_OF_STOP_REASON or rollout.infrastructure_fault or scored.result.error is not None
    )


@dataclass(slots=True)
class FaultRates:
    """The faults of a run so far; saved in checkpoints."""

    totals: dict[str, int] = field(default_factory=dict)
    recent: list[dict[str, int]] = field(default_factory=list)
    """Counts of the latest steps, enough to fill the window."""
    examples: dict[str, str] = field(default_factory=dict)
    """The latest fault of each class."""

    def add(self, scored: Sequence[ScoredRollout], window: int) -> None:
        counts = count_faults(scored)
        self.totals = {name: self.totals.get(name, 0) + count for name, count in counts.items()}
        self.recent.append(counts)
        while len(self.recent) > 1 and all(
            sum(step[unit] for step in self.recent[1:]) >= window for unit in ("rollouts", "calls")
        ):
            self.recent.pop(0)
        for s in scored:
            kind = _FAULT_OF_STOP_REASON.get(
                s.rollout.stop_reason, "infrastructure" if s.rollout.infrastructure_fault else None
            )
            if kind is not None:
                message = " ".join((s.rollout.fault or s.rollout.stop_reason.value).split())
                self.examples[kind] = f"{s.rollout.rollout_id}: {message[:300]}"

    def describe_exceeded(self, bounds: FaultsConfig, *, ended: bool = False) -> str | None:
        """One line about the first fault class above its limit. With fewer than `window` rollouts (or calls) a class
        is judged only at the end of the run."""
        for name, description in _FAULT_DESCRIPTIONS.items():
            unit, bound = "calls" if name in CALL_FAULTS else "rollouts", getattr(bounds, name)
            faults, total = self._recent_counts(name, unit, bounds.window)
            if total and faults > bound * total and (total >= bounds.window or ended):
                last = f"; the last one, {self.examples[name]}" if name in self.examples else ""
                share = f"{faults} of the latest {total} {unit}"
                return f"{description} in {share}, more than faults.{name} = {bound:g} allows{last}"
        return None

    def _recent_counts(self, name: str, unit: str, window: int) -> tuple[int, int]:
        faults = total = 0
        for step in reversed(self.recent):
            faults, total = faults + step[name], total + step[unit]
            if total >= window:
                break
        return faults, total

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self.totals, "recent": self.recent, "examples": self.examples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals, self.recent = dict(state.get("totals", {})), list(state.get("recent", []))
        self.examples = dict(state.get("examples", {}))


def describe_totals(totals: Mapping[str, int]) -> str:
    """Such as `policy 16 of 128, tool 3 of 40`; empty if nothing failed."""
    return ", ".join(
        f"{name} {totals[name]} of {totals['calls' if name in CALL_FAULTS else 'rollouts']}"
        for name in (*_FAULT_DESCRIPTIONS, "reward")
        if totals.get(name)
    )
