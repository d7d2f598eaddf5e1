"""The state of a diagnosis: checks each step, keeps the findings, and is saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.protocols import AdvantageEstimator
from toolwise.training.diagnosis.symptoms import (
    FIRST_STEPS,
    SYMPTOMS,
    UNCHANGED_STEPS_LIMIT,
    explain_unchanged,
    prompt_too_long,
)
from toolwise.types import ScoredRollout
from toolwise.types.findings import Finding

WEIGHTS_UNCHANGED = "weights_unchanged"
_UNKNOWN = (
    "the checkpoint that the run resumed from lacks the reason",
    "Look at actor/… and groups/… in metrics.jsonl",
)


@dataclass(frozen=True, slots=True)
class FindingChanges:
    """Findings added and withdrawn by one check."""

    found: list[Finding] = field(default_factory=list)
    withdrawn: list[Finding] = field(default_factory=list)
    """Findings that a later step disproved."""


@dataclass(slots=True)
class Diagnosis:
    """All findings so far, and the state needed to continue after a resume."""

    findings: list[Finding] = field(default_factory=list)
    updated: bool | None = None
    """Whether any weight of the actor has changed; None if it is not trained, or before the first step."""
    steps: int = 0
    rollouts: int = 0
    evidence: dict[str, str] = field(default_factory=dict)
    """kind of symptom -> evidence that all steps so far have in common"""
    healthy: list[str] = field(default_factory=list)
    """Symptoms that some step did not show; they are no longer checked."""
    weights: str = ""
    """Checksum of the actor's trainable weights before the first step; "" once they have changed."""
    why: list[str] = field(default_factory=list)
    """Cause and fix for unchanged weights, according to the latest step."""
    dropped_groups: int = 0
    """Number of groups in steps without an update, counted until the weights change."""
    dropped_steps: int = 0
    """Number of those steps."""

    def begin(self, findings: Sequence[Finding]) -> FindingChanges:
        """Add the startup findings; return all findings so far, including those from before a resume."""
        for finding in findings:
            self._add(finding)
        return FindingChanges(list(self.findings))

    def before_step(self, config: RunConfig, checksum: Callable[[], str]) -> None:
        if config.router.train_actor and self.updated is None:
            self.updated, self.weights = False, checksum()

    def after_step(
        self,
        config: RunConfig,
        estimator: AdvantageEstimator,
        step: int,
        scored: Sequence[ScoredRollout],
        metrics: Mapping[str, float],
        checksum: Callable[[], str],
    ) -> FindingChanges:
        """Check the results of a step. `checksum` is called only until the weights have changed."""
        self.steps += 1
        self.rollouts += len(scored)
        changes = FindingChanges()
        findings = [prompt_too_long(scored, f"step {step}", step)]
        for symptom in SYMPTOMS:
            if symptom.kind in self.healthy:
                continue
            evidence = symptom.evidence(scored, config, estimator)
            if evidence is not None and symptom.kind in self.evidence:
                evidence = symptom.combine(self.evidence[symptom.kind], evidence)
            if evidence is None:
                self.healthy.append(symptom.kind)
                changes.withdrawn.extend(self._withdraw(symptom.kind))
                continue
            self.evidence[symptom.kind] = evidence
            if self.steps == FIRST_STEPS and evidence:
                findings = [finding for finding in findings if finding is None or finding.name not in symptom.hides]
                cause, cure = symptom.explain(evidence, self.rollouts, config)
                findings.append(Finding(symptom.kind, "warning", cause, cure=cure, step=step))
        if self.updated is False:
            if metrics.get("actor/update_norm") and checksum() != self.weights:
                self.updated, self.weights, self.why = True, "", []
                changes.withdrawn.extend(self._withdraw(WEIGHTS_UNCHANGED))
            else:
                if not metrics.get("actor/updates"):
                    self.dropped_groups += len({s.rollout.group_id for s in scored})
                    self.dropped_steps += 1
                self.why = list(explain_unchanged(config, scored, metrics, self._dropped()))
                findings.append(self._unchanged(step) if self.steps >= UNCHANGED_STEPS_LIMIT else None)
        changes.found.extend(finding for finding in findings if finding is not None and self._add(finding))
        return changes

    def after_validation(self, step: int, scored: Sequence[ScoredRollout]) -> FindingChanges:
        return self._changes_from(prompt_too_long(scored, f"the validation at step {step}", step))

    def end(self, step: int) -> FindingChanges:
        """At the end of a run, unchanged weights are a finding even after few steps."""
        return self._changes_from(self._unchanged(step) if self.updated is False and self.steps else None)

    def _unchanged(self, step: int) -> Finding:
        cause, cure = self.why or _UNKNOWN
        says = f"No weight of the actor has changed in {self.steps} step{'' if self.steps == 1 else 's'}: {cause}"
        return Finding(WEIGHTS_UNCHANGED, "warning", says, cure=cure, step=step)

    def _dropped(self) -> str:
        """The start of a sentence, such as `all 40 groups were`."""
        groups = "the only group" if self.dropped_groups == 1 else f"all {self.dropped_groups} groups"
        steps = "step" if self.dropped_steps == 1 else f"{self.dropped_steps} steps"
        suffix = "" if self.dropped_steps == self.steps else f" of the {steps} without an update"
        return f"{groups}{suffix} {'was' if self.dropped_groups == 1 else 'were'}"

    def _changes_from(self, finding: Finding | None) -> FindingChanges:
        return FindingChanges([finding] if finding is not None and self._add(finding) else [])

    def _add(self, finding: Finding) -> bool:
        """Add `finding` unless there is one of its kind; return whether it was added."""
        if any(other.name == finding.name for other in self.findings):
            return False
        self.findings.append(finding)
        return True

    def _withdraw(self, kind: str) -> list[Finding]:
        before = self.findings
        self.findings = [finding for finding in before if finding.name != kind]
        return [finding for finding in before if finding.name == kind]

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"findings": [finding_to_json(finding) for finding in self.findings]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for item in fields(self):
            if item.name in state:
                setattr(self, item.name, state[item.name])
        self.findings = [finding_from_json(stored) for stored in state.get("findings", [])]


def finding_from_json(stored: Mapping[str, Any]) -> Finding:
    """Older files have fewer fields, and some older checkpoints store the fields of a `Finding` as they are."""
    name, says = stored.get("kind", stored.get("name", "")), stored.get("cause", stored.get("says", ""))
    evidence = stored.get("evidence")
    evidence = evidence if isinstance(evidence, Mapping) else {}
    return Finding(
        str(name),
        "wrong" if stored.get("severity") == "critical" else "warning",
        str(says),
        dict(evidence.get("figures") or {}),
        cure=str(stored.get("cure", "")),
        step=int(stored.get("step") or 0),
        steps=tuple(evidence.get("steps") or ()),
        rollouts=tuple(evidence.get("rollouts") or ()),
        settings=tuple(stored.get("settings") or ()),
    )


def finding_to_json(finding: Finding) -> dict[str, Any]:
    """A finding about a run as checkpoints, summary.json and diagnosis.json store it."""
    return {
        "kind": finding.name,
        "severity": finding.severity,
        "cause": finding.says,
        "cure": finding.cure,
        "settings": list(finding.settings),
        "step": finding.step,
        "evidence": {
            "steps": list(finding.steps),
            "rollouts": list(finding.rollouts),
            "figures": dict(finding.figures),
        },
    }
