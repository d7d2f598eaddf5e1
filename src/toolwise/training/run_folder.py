"""A run folder: opened for training, with its last valid checkpoint restored, and read for the views and reports, which
works on unfinished runs too."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.config.loader import to_toml
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.serialization.files import checkpoint_folders, step_of, write_atomic
from toolwise.training import checkpoint
from toolwise.training.changes import AnyConfig, Change, changes_since, check_same_run, portable_config, record_changes
from toolwise.training.records import RolloutRecord, read_records
from toolwise.training.rollout_paths import rollout_files
from toolwise.training.trackers.jsonl import read_metrics, truncate_after

if TYPE_CHECKING:
    from toolwise.training.run import Run

log = logging.getLogger("toolwise.training.trainer")

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
        ended = summary.get("stopped_early") or summary.get("steps") == summary["total_steps"]
        return not summary.get("interrupted") and bool(ended)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The run's summary; missing parts are filled in from the validation metrics of an unfinished run."""
        summary = dict(self.saved_summary or {})
        lines = [line for line in self.metrics if any(name.startswith("eval/") for name in line)]
        lines.sort(key=lambda line: int(line.get("step") or 0))
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
        sides = (self.summary.get(side) or {} for side in ("before", "after"))
        return list(dict.fromkeys(kind for side in sides for kind in side.get("by_kind") or {}))

    def _rollout_files(self, prefix: str) -> list[Path]:
        return list(rollout_files(self.path / "rollouts", f"{prefix}-*").values())

    def _summarize(self, line: dict[str, Any], rollouts: Sequence[RolloutRecord]) -> dict[str, Any]:
        by_kind: dict[str, dict[str, Any]] = {}
        for name, value in line.items():
            match name.split("/"):
                case ["eval", *middle, ("correct" | "cost") as metric] if middle:
                    kind = "/".join(middle)
                    by_kind.setdefault(kind, {"n": sum(r.kind == kind for r in rollouts) or None})[metric] = value
        overall = {name: line.get(f"eval/{name}") for name in ("loss", "score", "correct", "cost", "tokens", "invalid")}
        overall |= {name.removeprefix("eval/"): line[name] for name in line if name.startswith("eval/budget/")}
        return {**overall, "by_kind": by_kind, "n": len(rollouts) or None, "step": line.get("step")}


def open_run(run_dir: str | os.PathLike[str]) -> RunFolder:
    path = Path(run_dir)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run folder; give the folder that holds the run's metrics.jsonl")
    return RunFolder(path)


def require_run(run: RunFolder) -> None:
    """Raise if the folder holds nothing of a run."""
    known = run.metrics or run.saved_summary is not None or run.config_text is not None
    if not known and not (run.path / "rollouts").is_dir():
        raise CheckpointError(f"{run.path}: not a run folder (it has no metrics.jsonl, summary.json or config.toml)")


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


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run wrote its files, and its summary."""

    out: Path
    summary: dict[str, Any]
    note: str = ""
    """Set if a resumed run had nothing left to do and changed nothing."""


def finished_result(out: Path, config: RunConfig) -> RunResult | None:
    """The result of the run in `out` if it has reached `trainer.total_steps` and written its summary, else None."""
    total = config.trainer.total_steps
    if max(map(step_of, checkpoint_folders(out / "checkpoints")), default=-1) < total:
        return None  # decided without reading a checkpoint
    newest = checkpoint.latest(out / "checkpoints", warnings_out=[])
    summary = open_run(out).saved_summary
    if newest is None or newest.step < total or (newest.step == total and summary is None):
        return None
    if summary is not None and summary.get("stopped") and not summary.get("after"):
        return None  # an error ended its last validation
    summary = summary or {
        "before": None,
        "after": None,
        "steps": newest.step,
        "total_steps": total,
        "interrupted": False,
    }
    note = f"nothing left to do: the run is at step {newest.step} of {total}"
    log.info("%s", note)
    return RunResult(out, summary, note)


def check_folder(out: Path, config: AnyConfig, *, resume: bool) -> None:
    """Raise unless a run with `config` may start, or resume, in `out`. Changes nothing."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: choose a folder for --out")
    if out.is_symlink() and not out.exists():
        raise ConfigError(f"{out} is a broken link: choose another --out")
    config_file = out / "config.toml"
    if config_file.exists():
        if not resume:
            raise ConfigError(
                f"{out} already holds a run: add --resume (resume=True) to continue it, or choose another --out (out=)"
            )
        check_same_run(config, config_file)
    elif checkpoint.latest(out / "checkpoints", warnings_out=[]) is not None:
        raise CheckpointError(f"{out} has checkpoints but no config.toml: choose another --out")
    elif resume:
        raise ConfigError(f"{out} holds no run to resume (no config.toml): omit --resume to start one there")


def open_folder(
    out: Path,
    config: AnyConfig,
    lock: checkpoint.FolderLock,
    restore: Callable[[checkpoint.Checkpoint, list[Change]], None],
    *,
    resume: bool,
    files: Mapping[str, bytes] | None = None,
    changed: Callable[[object], list[Change]] | None = None,
) -> int:
    """Create the folder and lock it, or restore an existing one to its last valid checkpoint, discarding later steps.

    `restore` loads that checkpoint, given the settings that have changed since, which are logged and recorded. Writes
    `files` and `config`. `changed` compares the inputs that the checkpoint knows with those of now.

    Returns the checkpoint's step, or -1 if there is none.
    """
    check_folder(out, config, resume=resume)
    try:
        checkpoint.make_folder(out)
    except OSError as fault:
        raise ConfigError(f"cannot create {out} ({fault.strerror}): choose another --out") from fault
    lock.acquire()
    check_folder(out, config, resume=resume)  # again: another process may have changed it
    newest = find_checkpoint(out / "checkpoints")
    if newest is not None:
        changes = changes_since(newest.facts.get("settings"), config, out)
        changes += changed(newest.facts.get("inputs")) if changed is not None else []
        restore(newest, changes)
        record_changes(out, newest.step, changes)
        if changes:
            log.warning("resumed at step %d with changed settings: %s", newest.step, ", ".join(map(str, changes)))
    step = newest.step if newest is not None else -1
    repeats = newest is not None and "progress" in newest.parts and newest.part("progress").get("validating", False)
    truncate_after(out / "metrics.jsonl", step, validation=not repeats)
    delete_rollouts_after(out / "rollouts", step)
    for name in ("summary.json", "diagnosis.json"):
        (out / name).unlink(missing_ok=True)
    remove_partial_files(out)
    for name, data in (files or {}).items():
        write_atomic(out / name, data)
    write_atomic(out / "config.toml", to_toml(portable_config(config, out)).encode())
    return step


def restore_run(run: Run, out: Path, saved: checkpoint.Checkpoint, changes: Sequence[Change]) -> None:
    """Load a checkpoint, with settings that have changed since."""
    run.registry().load_state_dict(saved.state())
    progress, best_metric = run.progress, run.config.trainer.best_metric
    if {"trainer.best_metric", "trainer.keep_best"} & {change.key for change in changes}:
        # the best validation by the current metric, of the checkpoints still on disk
        validations = checkpoint.checkpoint_metrics(out / "checkpoints", saved.step)
        ranks = (checkpoint.ranking_key(metrics, best_metric) for metrics in validations)
        progress.best_rank = min((rank for rank in ranks if rank is not None), default=None)
        progress.without_best = 0
    run.learner.load_weights(saved.path / "model")
    if run.weights is not None:
        run.weights.copy()
    run.policy.version = run.learner.version
    if progress.last is not None and progress.last_step is None:  # older checkpoints do not have the step
        lines = read_metrics(out / "metrics.jsonl")
        steps = (line["step"] for line in lines if any(name.startswith("eval/") for name in line))
        progress.last_step = max((step for step in steps if step <= progress.step), default=None)


def find_checkpoint(folder: Path) -> checkpoint.Checkpoint | None:
    """The last valid checkpoint. Damaged ones are skipped, unless all are: that would restart the run from scratch."""
    damaged: list[str] = []
    newest = checkpoint.latest(folder, warnings_out=damaged)
    if newest is None and damaged:
        raise CheckpointError(f"cannot resume, all checkpoints are damaged: {damaged[0]}; or remove {folder}")
    for warning in damaged:
        log.warning("%s", warning)
    return newest


def delete_rollouts_after(folder: Path, step: int) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(
            r"(?:step|eval)-(\d{6,})\.(?:jsonl|jsonl\.gz|safetensors|(?:tokens|index)\.parquet)", path.name
        )
        if match is not None and int(match.group(1)) > step:
            path.unlink()


def remove_partial_files(out: Path) -> None:
    """Remove files that a killed run left half-written."""
    patterns = [".*.tmp", "rollouts/.*.tmp", "code/.*.tmp", "data/.*.tmp"]
    patterns += ["metrics.jsonl.tmp", "changes.jsonl.tmp", "report.*.tmp"]  # from earlier versions
    for path in [path for pattern in patterns for path in out.glob(pattern)]:
        path.unlink()
    for pattern in ("checkpoints/step-*.tmp-*", f"checkpoints/{checkpoint.STAGED}*"):
        for path in out.glob(pattern):
            shutil.rmtree(path)
