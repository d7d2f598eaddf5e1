"""Detects runs that cannot learn, before and during the first steps; each finding has a cause and a fix."""

from toolwise.training.diagnosis.doctor import RunDoctor
from toolwise.training.diagnosis.history import History
from toolwise.training.diagnosis.monitor import Diagnosis, FindingChanges, finding_to_json
from toolwise.training.diagnosis.preflight import (
    check_family_names,
    check_routable,
    evaluation_findings,
    startup_findings,
)
from toolwise.types.findings import Finding

__all__ = [
    "Diagnosis",
    "Finding",
    "FindingChanges",
    "History",
    "RunDoctor",
    "check_family_names",
    "check_routable",
    "evaluation_findings",
    "finding_to_json",
    "startup_findings",
]
