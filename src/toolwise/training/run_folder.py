"""Reads a run folder for the views and reports; works on unfinished runs too."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolwise.errors import CheckpointError
from toolwise.training.records import RolloutRecord, read_records
from toolwise.training.trackers.jsonl import read_metrics

Series = tuple[list[int], list[float]]
"""Steps and values in step order; non-finite values are omitted."""


@dataclass(frozen=True)
class RunFolder:
    """A run folder whose files are read on demand; created by `open_run`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config_text(self) -> str | None:
        file = self.path / "config.toml"
        return file.read_text("utf-8", "replace") if file.exists() else None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    @cached_property
    def saved_summary(self) -> dict[str, Any] | None:
        """summary.json, which a run writes when it ends."""
        file = self.path / "summary.json"
        if not file.exists():
            return None
        try:
            summary = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not JSON ({error}); delete it to view the run without it") from None
        return summary if isinstance(summary, dict) else None

    @cached_property
    def diagnosis(self) -> list[dict[str, Any]]:
        """Findings about why the run does not learn: from its summary, or from diagnosis.json while it is running."""
        file = self.path / "diagnosis.json"
        try:
            findings = json.loads(file.read_bytes()) if file.exists() else None
        except (ValueError, RecursionError):  # the log has the same findings
            findings = None
        findings = (self.saved_summary or {}).get("diagnosis", findings)
        return [entry for entry in findings if isinstance(entry, dict)] if isinstance(findings, list) else []

    @property
    def finished(self) -> bool:
        summary = self.saved_summary or {}
        if "total_steps" not in summary:  # written by an older version
            return bool(summary.get("after"))
        return not summary.get("interrupted") and summary.get("steps") == summary["total_steps"]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's summary; missing parts are filled in from the validation metrics of an unfinished run."""
        summary = dict(self.saved_summary or {})
        validations = [line for line in self.metrics if any(name.startswith("eval/") for name in line)]
        lines = sorted(validations, key=lambda line: int(line.get("step") or 0))
        if not summary.get("before") and lines and (len(lines) > 1 or not lines[0].get("step")):
            summary["before"] = self._summarize(lines[0], self.rollouts_before)
        if not summary.get("after") and lines and (len(lines) > 1 or lines[0].get("step")):
            summary["after"] = self._summarize(lines[-1], self.rollouts_after)
        if "steps" not in summary and self.metrics:
            summary["steps"] = max(int(line.get("step") or 0) for line in self.metrics)
        return summary

    @cached_property
    def rollouts_before(self) -> list[RolloutRecord]:
        files = self._rollout_files("eval")
        return read_records(files[0]) if len(files) > 1 or _before_training(files) else []

    @cached_property
    def rollouts_after(self) -> list[RolloutRecord]:
        """Rollouts of the latest validation; empty while the only one is that before training."""
        files = self._rollout_files("eval")
        return read_records(files[-1]) if files and (len(files) > 1 or not _before_training(files)) else []

    @cached_property
    def latest_training(self) -> list[RolloutRecord]:
        files = self._rollout_files("step")
        return read_records(files[-1]) if files else []

    def series(self, *names: str) -> Series:
        """The series of the first of `names` that the run has logged; the last value logged for a step counts."""
        for name in names:
            by_step = {int(line["step"]): float(line[name]) for line in self.metrics if _has_finite(line, name)}
            if by_step:
                steps = sorted(by_step)
                return steps, [by_step[step] for step in steps]
        return [], []

    @cached_property
    def metric_names(self) -> set[str]:
        return {name for line in self.metrics for name in line}

    @property
    def kinds(self) -> list[str]:
        """Kinds of task that either validation reports."""
        sides = [self.summary.get(side) or {} for side in ("before", "after")]
        return list(dict.fromkeys(kind for side in sides for kind in side.get("by_kind") or {}))

    def _rollout_files(self, prefix: str) -> list[Path]:
        return sorted((self.path / "rollouts").glob(f"{prefix}-*.jsonl"))

    def _summarize(self, line: dict[str, Any], rollouts: Sequence[RolloutRecord]) -> dict[str, Any]:
        by_kind: dict[str, dict[str, Any]] = {}
        for name, value in line.items():
            match name.split("/"):
                case ["eval", *middle, ("correct" | "cost") as metric] if middle:
                    kind = "/".join(middle)
                    n = sum(r.kind == kind for r in rollouts) or None
                    by_kind.setdefault(kind, {"n": n})[metric] = value
        overall = {name: line.get(f"eval/{name}") for name in ("score", "correct", "cost", "tokens")}
        return {**overall, "by_kind": by_kind, "n": len(rollouts) or None, "step": line.get("step")}


def open_run(run_dir: str | os.PathLike[str]) -> RunFolder:
    path = Path(run_dir)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run folder; give the folder that holds the run's metrics.jsonl")
    return RunFolder(path)


def shared_steps(series: Sequence[Series]) -> tuple[list[int], list[list[float]]]:
    """The steps that all series have, and the values of each series at them."""
    by_step = [dict(zip(*one, strict=True)) for one in series]
    steps = sorted(set.intersection(*map(set, by_step)))
    return steps, [[values[step] for step in steps] for values in by_step]


def _before_training(files: Sequence[Path]) -> bool:
    return bool(files) and files[0].stem == "eval-000000"


def _has_finite(line: dict[str, Any], name: str) -> bool:
    value = line.get(name)
    return isinstance(value, int | float) and math.isfinite(value) and isinstance(line.get("step"), int)
