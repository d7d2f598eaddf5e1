"""`toolwise doctor RUN`: what is wrong with a run, finished or not, why, and which setting to try."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.training.diagnosis.examination import Examination
    from toolwise.types.findings import Finding


def examine(run: Path, *, as_json: bool) -> bool:
    """Print what the doctor finds in a run folder; return whether it found anything."""
    from toolwise.training.diagnosis.evidence import pages
    from toolwise.training.diagnosis.examination import examine_run
    from toolwise.training.diagnosis.monitor import finding_to_json

    examination = examine_run(run)
    if as_json:
        print_json(
            {
                "run": str(examination.run_folder),
                "state": examination.state,
                "step": examination.step,
                "findings": [{**finding_to_json(finding), "pages": pages(finding)} for finding in examination.findings],
            }
        )
    else:
        _show(examination)
    return bool(examination.findings)


def _show(examination: Examination) -> None:
    from toolwise.training.diagnosis.evidence import pages

    steps = f"{examination.step} step{'' if examination.step == 1 else 's'}"
    print_line(f"{examination.run_folder}: {examination.state}, {steps}")
    for finding in examination.findings:
        print_line(f"\n{finding.severity.upper()} {finding.name} ({_when(finding)})")
        print_line(f"  {finding.says}.")
        print_line(f"  What to do: {finding.cure}.")
        if finding.rollouts:
            print_line(f"  See the rollouts {', '.join(finding.rollouts)}")
        if links := pages(finding):
            print_line(f"  In the browser: toolwise view {shlex.quote(str(examination.run_folder))}, at")
            for link in links:
                print_line(f"    {link}")
    if not examination.findings:
        print_line("nothing found")


def _when(finding: Finding) -> str:
    if finding.steps:
        first, last = finding.steps[0], finding.steps[-1]
        return f"step {last}" if first == last else f"steps {first} to {last}"
    return f"step {finding.step}" if finding.step else "before the first step"
