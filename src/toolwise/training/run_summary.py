"""What `summary.json` says about a run, but for how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolwise import __version__
from toolwise.training.calibration import calibration_summary
from toolwise.training.changes import read_changes
from toolwise.training.diagnosis import Finding, finding_to_json
from toolwise.training.metrics import peak_rss_mb
from toolwise.training.run import Run


def summarize_run(run: Run, out: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    progress = run.progress
    return {
        "name": run.config.name,
        "before": progress.before,
        "after": progress.last if progress.last_step == progress.step else None,
        "last_validation": progress.last and {"step": progress.last_step, **progress.last},
        "steps": progress.step,
        "total_steps": run.config.trainer.total_steps,
        "faults": progress.faults.totals,
        "seed": run.config.seed,
        "peak_rss_mb": peak_rss_mb(),
        "model": run.config.model.path,
        "version": __version__,
        "sandbox": run.scoring.describe(),
        "calibration": calibration_summary(run.router, run.calibration.calibration),
        "changes": read_changes(out),
        "updated": progress.diagnosis.updated,
        "diagnosis": list(map(finding_to_json, findings)),
        "tool_prompt": run.chat.tool_prompt.describe() if run.scheduler.tools else None,
    }
