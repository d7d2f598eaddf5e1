"""The run doctor: applies all checks after each step, live or to a stored run, and keeps what they found.

Both give the same findings, because both see the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from toolwise.training.diagnosis import learning_checks, rollout_checks
from toolwise.training.diagnosis.evidence import with_rollouts
from toolwise.training.diagnosis.history import History, Row
from toolwise.training.diagnosis.monitor import FindingChanges
from toolwise.types.findings import Finding

HEALTHY_STEPS = 10
"""A finding that so many steps in a row do not show is withdrawn."""


class Check(NamedTuple):
    examine: Callable[[History], Finding | None]
    event: bool = False
    """Something that happened, and is not withdrawn; else a state, which may end."""


CHECKS: dict[str, Check] = {
    "entropy_collapse": Check(learning_checks.entropy_collapse),
    "score_collapse": Check(learning_checks.score_collapse),
    "kl_spike": Check(learning_checks.kl_spike, event=True),
    "zero_advantages": Check(learning_checks.zero_advantages),
    "canary_drift": Check(learning_checks.canary_drift, event=True),
    "reward_hacking": Check(learning_checks.reward_hacking),
    "overfitting": Check(learning_checks.overfitting),
    "length_creep": Check(rollout_checks.length_creep),
    "identical_outputs": Check(rollout_checks.identical_outputs),
    "truncation": Check(rollout_checks.truncation),
    "tool_failures": Check(rollout_checks.tool_failures, event=True),
    "budget_missed": Check(rollout_checks.budget_missed),
    "starvation": Check(rollout_checks.starvation),
}

SAME_CAUSE = {
    "constant_reward": ("zero_advantages",),
    "weights_unchanged": ("zero_advantages",),
    "replies_cut": ("truncation",),
    "tool_failed": ("tool_failures",),
    "score_collapse": ("truncation", "zero_advantages", "length_creep"),
    "kl_spike": ("truncation",),
    "reward_hacking": ("truncation", "zero_advantages"),
    "length_creep": ("truncation",),
}
"""Findings, and those that are only their consequences, or would only repeat them."""


@dataclass(slots=True)
class RunDoctor:
    """The findings so far, by kind, in the order in which they were found."""

    history: History
    found: dict[str, Finding] = field(default_factory=dict)
    _absent: dict[str, int] = field(default_factory=dict)

    def add(self, row: Row, run_folder: Path | None = None, others: Sequence[Finding] = ()) -> FindingChanges:
        """Take one line of metrics; return what is new, with rollouts from `run_folder`, and what is no longer true.
        `others` are the findings of the first steps, which are not repeated."""
        steps = len(self.history.rows)
        self.history.add(row)
        changes = FindingChanges()
        for kind, check in CHECKS.items():
            finding = check.examine(self.history)
            if finding is not None:
                self._absent[kind] = 0
                if kind not in self.found:
                    self.found[kind] = finding if run_folder is None else with_rollouts(finding, run_folder)
                    changes.found.append(self.found[kind])
            elif kind in self.found and not check.event and len(self.history.rows) > steps:
                self._absent[kind] = self._absent.get(kind, 0) + 1
                if self._absent[kind] >= HEALTHY_STEPS:
                    changes.withdrawn.append(self.found.pop(kind))
        shown = self.findings(others)
        return FindingChanges([finding for finding in changes.found if finding in shown], changes.withdrawn)

    def replay(self, rows: Iterable[Row]) -> None:
        """Take the rows of a stored run."""
        for row in rows:
            self.add(row)

    def findings(self, others: Sequence[Finding], run_folder: Path | None = None) -> list[Finding]:
        """All findings of a run, `others` and the doctor's that do not repeat them, with rollouts from `run_folder`."""
        names = {other.name for other in others}
        repeated = names.union(*(SAME_CAUSE.get(name, ()) for name in (*names, *self.found)))
        found = [*others, *(finding for kind, finding in self.found.items() if kind not in repeated)]
        return found if run_folder is None else [with_rollouts(finding, run_folder) for finding in found]
