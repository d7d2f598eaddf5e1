"""Detects runs that cannot learn, before and during the first steps; each finding has a cause and a fix."""

from toolwise.training.diagnosis.display import show_changes
from toolwise.training.diagnosis.finding import Finding
from toolwise.training.diagnosis.monitor import Diagnosis, FindingChanges
from toolwise.training.diagnosis.startup import check_routable, evaluation_findings, startup_findings

__all__ = [
    "Diagnosis",
    "Finding",
    "FindingChanges",
    "check_routable",
    "evaluation_findings",
    "show_changes",
    "startup_findings",
]
