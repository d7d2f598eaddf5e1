"""The lifecycle of a run: folder, validation, checkpoints, interruption and resumption."""

from __future__ import annotations

import copy
import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise import __version__
from toolwise.advantages.description import describe_rewards
from toolwise.advantages.score_check import ScoreCheck
from toolwise.config.loader import to_toml
from toolwise.config.secret_names import mask_secrets, secret_keys
from toolwise.errors import ConfigError, FaultRateError
from toolwise.protocols import Callback, Tracker
from toolwise.rewards.printed_output import PrintLog
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_text
from toolwise.tools.tool_record import write_tools
from toolwise.training import checkpoint
from toolwise.training.changes import (
    Change,
    changes_since,
    portable_config,
    read_changes,
    record_changes,
    saved_settings,
)
from toolwise.training.diagnosis import FindingChanges, finding_to_json
from toolwise.training.evaluate import validate
from toolwise.training.loop import StepResult, train_step
from toolwise.training.metrics import summarize_validation, validation_metrics
from toolwise.training.records import RolloutFiles
from toolwise.training.run import Run
from toolwise.training.run_files import check_folder, delete_rollouts_after, find_checkpoint, remove_partial_files
from toolwise.training.run_result import RunResult
from toolwise.training.stop_signal import StopSignal
from toolwise.training.trackers.console import ConsoleTracker
from toolwise.training.trackers.contained import ContainedObserver
from toolwise.training.trackers.jsonl import JsonlTracker, read_metrics, truncate_after
from toolwise.training.trackers.observers import Observers
from toolwise.types import CheckpointEvent, EndEvent, RunStart, StepEvent, Stop, ValidationEvent
from toolwise.untrusted.bounds import truncate_text

log = logging.getLogger("toolwise.training.trainer")


class Training:
    """One run in one folder. `run_training` trains until done or interrupted, and saves everything either way."""

    def __init__(
        self,
        run: Run,
        out: Path,
        *,
        resume: bool,
        callbacks: Sequence[Callback] = (),
        observers: Observers | None = None,
    ) -> None:
        """`observers` are the user's trackers and callbacks; unlike theirs, an error in `callbacks` ends the run."""
        self.run = run
        self.out = out
        self._signal = StopSignal()
        self._stop_reason: str | None = None
        """Set when a callback stops the run."""
        self._validation_metrics: dict[str, float] = {}
        self._step_metrics: Mapping[str, float] = {}
        self._fault_rate_message: str | None = None
        """Set when more fails than `faults` allows; stops the run."""
        self._lock = checkpoint.FolderLock(out)
        try:
            self._saved_step = self._open_folder(resume)
        except BaseException:
            self._lock.release()
            raise
        run.scoring.set_print_callback(PrintLog(out / "logs" / "reward.log"))
        self.metrics = JsonlTracker(out / "metrics.jsonl")
        self.console: ConsoleTracker | None = None
        if run.config.trainer.console:
            self.console = ConsoleTracker(run.config.trainer.total_steps, title=run.config.name)
        self.observers = observers or Observers()
        own = [self.console] if self.console is not None else []
        self._own_trackers: list[Tracker] = [self.metrics, *own]
        self._callbacks: list[Callback] = [RolloutFiles(), *own, *self.observers.callbacks, *callbacks]
        self._start_time = time.monotonic() - run.progress.seconds
        self._reward_description = describe_rewards(run.config.algorithm.adv_estimator, run.estimator)
        self._score_check = ScoreCheck.of(run.estimator)

    async def run_training(self) -> RunResult:
        try:
            await self._train()
            summary = self._summarize()
            if self._fault_rate_message is not None:
                raise FaultRateError(
                    f"{self._fault_rate_message}; see {self.out / 'report.html'} and rollouts/, then resume"
                )
            return RunResult(self.out, summary)
        finally:
            try:
                self.observers.close()
            finally:
                self._lock.release()

    async def _train(self) -> None:
        run, total = self.run, self.run.config.trainer.total_steps
        try:
            with self._signal.handled():
                if run.config.router.train_actor:
                    rewards = run.estimator.rewards
                    never = rewards is not None and rewards.terminal_score == "never"
                    self._announce(self._reward_description, logging.WARNING if never else logging.INFO)
                self._warn_about_secrets()
                settings = mask_secrets(run.config.model_dump(mode="json"))
                self.observers.start(RunStart(self.out, run.config.name, run.progress.step, total, settings))
                self._publish_findings(run.progress.diagnosis.begin(run.startup_findings()))
                if run.progress.step == 0 and run.progress.before is None and run.config.validation.before:
                    run.progress.before = await self._validate()
                    self._save()
                run.router.warm_start()
                while self._unfinished() and not (
                    self._signal.received or self._stop_reason or self._fault_rate_message
                ):
                    run.progress.diagnosis.before_step(run.config, run.learner.weights_checksum)
                    self._record_step(await train_step(run))
                    self._validation_metrics = {}
                    step, best = run.progress.step, run.progress.best_rank
                    # a run whose weights never changed has another exit status
                    ended = step == total and run.progress.diagnosis.updated is not False
                    self._fault_rate_message = run.progress.faults.describe_exceeded(run.config.faults, ended=ended)
                    if step == total or (run.config.validation.every and step % run.config.validation.every == 0):
                        run.progress.last, run.progress.last_step = await self._validate(), step
                    if step % run.config.trainer.save_every == 0 or run.progress.best_rank != best:
                        self._save()
                if self._saved_step != run.progress.step:
                    self._save()
        finally:
            run.close()
            for tracker in self._own_trackers:
                tracker.close()

    def _unfinished(self) -> bool:
        return self.run.progress.step < self.run.config.trainer.total_steps

    def _record_step(self, result: StepResult) -> None:
        step, learner = self.run.progress.step, self.run.learner
        self.run.progress.faults.add(result.scored, self.run.config.faults.window)
        self._step_metrics = result.metrics | self.observers.error_metrics()
        self._log_metrics(step, self._step_metrics)
        event = StepEvent(self.out, step, self._step_metrics, tuple(result.scored), tuple(result.credited))
        self._notify(lambda callback: callback.on_step(event))
        warning = self._score_check.observe(result.scored) if self._score_check and result.credited else None
        if warning is not None:
            self._announce(warning, logging.WARNING)
        diagnosis, config = self.run.progress.diagnosis, self.run.config
        self._publish_findings(
            diagnosis.after_step(
                config, self.run.estimator, step, result.scored, result.metrics, learner.weights_checksum
            )
        )

    def _log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in (*self._own_trackers, *self.observers.trackers):
            tracker.log(step, metrics)

    def _notify(self, call: Callable[[Callback], Stop | None]) -> None:
        """Call a method of all callbacks. The first `Stop` gives the reason; after the last step it has no effect."""
        for callback in self._callbacks:
            stop = call(callback)
            if stop is not None and self._stop_reason is None and self._unfinished():
                name = callback.name if isinstance(callback, ContainedObserver) else type(callback).__name__
                self._stop_reason = f"{name}: {truncate_text(' '.join(stop.reason.split()), 300)}"
                self._announce(f"{self._stop_reason}; finishing this step and saving", logging.WARNING)

    def _warn_about_secrets(self) -> None:
        keys = list(secret_keys(self.run.config.model_dump()))
        if keys:
            text = (
                f"{', '.join(keys)}: looks like a secret and is stored as plain text in {self.out}; read it from "
                "os.environ inside the function instead"
            )
            if any(key.startswith("reward.") for key in keys) and self.run.config.reward.sandbox.tier != "off":
                text += " (a reward in the sandbox does not see the environment: name its module in sandbox.trusted)"
            self._announce(text, logging.WARNING)

    def _announce(self, text: str, level: int) -> None:
        """Show `text` on the console, or log it if there is none."""
        if self.console is not None:
            self.console.note(text)
        else:
            log.log(level, "%s", text)

    async def _validate(self) -> dict[str, Any] | None:
        if not self.run.validation_tasks:
            return None
        step = self.run.progress.step
        if step == 0 and self.console is not None:
            self.console.note(f"validating on {len(self.run.validation_tasks)} held-out tasks before training …")
        scored = await validate(self.run, step=step)
        summary = summarize_validation(scored, self.run.config.multi_turn.held_out_tools)
        metrics = validation_metrics(summary)
        if self.run.thinking is not None:
            metrics |= {f"eval/{name}": value for name, value in self.run.thinking.measure(scored).items()}
        overspend = self.run.router.overspend(scored)
        metrics |= {} if overspend is None else {f"eval/{checkpoint.OVERSPEND}": overspend}
        self._log_metrics(step, metrics)
        event = ValidationEvent(self.out, step, metrics, tuple(scored))
        self._notify(lambda callback: callback.on_validation(event))
        self._validation_metrics = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self._update_best_rank()
        self._publish_findings(self.run.progress.diagnosis.after_validation(step, scored))
        return summary

    def _update_best_rank(self) -> None:
        trainer, progress = self.run.config.trainer, self.run.progress
        if not trainer.keep_best:
            return
        rank = checkpoint.ranking_key(self._validation_metrics, trainer.best_metric)
        if rank is None:
            available, name = ", ".join(sorted(self._validation_metrics)), trainer.best_metric.removeprefix("-")
            log.warning("trainer.best_metric is %r, but the validation reports only: %s", name, available)
        elif progress.best_rank is None or rank < progress.best_rank:
            progress.best_rank = rank

    def _publish_findings(self, changes: FindingChanges) -> None:
        """Show findings on the console, or log them if there is none, and write them for the report."""
        for finding in changes.found:
            if self.console is not None:
                self.console.warn(finding.name, (finding.says, finding.cure))
            else:
                log.warning("%s", finding)
        for finding in changes.withdrawn:
            self._announce(f"no longer true: {finding.name} (found at step {finding.step})", logging.WARNING)
        if changes.found or changes.withdrawn:
            findings = [finding_to_json(finding) for finding in self.run.progress.diagnosis.findings]
            write_atomic(self.out / "diagnosis.json", json_text(findings, indent=2).encode())

    def _save(self) -> None:
        progress, trainer = self.run.progress, self.run.config.trainer
        progress.seconds = time.monotonic() - self._start_time
        self.metrics.sync()  # metrics and rollouts up to a checkpoint must also survive a power cut
        for folder in (self.out, self.out / "rollouts"):
            if folder.exists():
                checkpoint.sync(folder)
        saved = checkpoint.save(
            self.out / "checkpoints",
            progress.step,
            self.run.registry().state_dict(),
            extra_files={"model": self._save_model},
            facts={
                "policy_version": self.run.learner.version,
                "settings": saved_settings(self.run.config, self.out),
                "toolwise": __version__,
            },
            figures=self._validation_metrics,
            keep_last=trainer.keep_checkpoints,
            keep_best=trainer.best_metric if trainer.keep_best else "",
        )
        self._saved_step = progress.step
        event = CheckpointEvent(self.out, progress.step, self._validation_metrics, saved.path)
        self._notify(lambda callback: callback.on_checkpoint(event))

    def _save_model(self, folder: Path) -> None:
        self.run.learner.save_model(folder)
        self.run.chat.tokenizer.save_pretrained(folder)
        self.run.router.save(folder)
        write_tools(folder, self.run.scheduler.tools)

    def _summarize(self) -> dict[str, Any]:
        run, diagnosis = self.run, self.run.progress.diagnosis
        interrupted = self._unfinished() and (self._signal.received or self._stop_reason is not None)
        if not interrupted and self._fault_rate_message is None:
            self._publish_findings(diagnosis.end(run.progress.step))
            if diagnosis.updated is False:
                log.warning("the actor was never updated: see the diagnosis in %s", self.out)
        summary = {
            "name": run.config.name,
            "before": run.progress.before,
            "after": run.progress.last if run.progress.last_step == run.progress.step else None,
            "last_validation": run.progress.last and {"step": run.progress.last_step, **run.progress.last},
            "steps": run.progress.step,
            "total_steps": run.config.trainer.total_steps,
            "interrupted": interrupted,
            "stopped": self._fault_rate_message or (None if self._signal.received else self._stop_reason),
            "observers": self.observers.to_json(),
            "faults": run.progress.faults.totals,
            "seed": run.config.seed,
            "seconds": round(time.monotonic() - self._start_time, 3),
            "peak_rss_mb": peak_rss_mb(),
            "model": run.config.model.path,
            "version": __version__,
            "sandbox": run.scoring.describe(),
            "advantages": self._reward_description,
            "changes": read_changes(self.out),
            "updated": diagnosis.updated,
            "diagnosis": [finding_to_json(finding) for finding in diagnosis.findings],
            "tool_prompt": run.chat.tool_prompt.describe() if run.scheduler.tools else None,
        }
        self._end(summary)
        return summary

    def _end(self, summary: dict[str, Any]) -> None:
        """Write the summary, tell the callbacks, and add to it what failed after that."""
        self._write_summary(summary)
        event = EndEvent(self.out, self.run.progress.step, self._step_metrics, copy.deepcopy(summary))
        for callback in self._callbacks:
            callback.on_end(event)
        self.observers.close()
        if summary["observers"] != self.observers.to_json():
            summary["observers"] = self.observers.to_json()
            self._write_summary(summary)

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        write_atomic(self.out / "summary.json", json_text(summary, indent=2).encode())

    def _open_folder(self, resume: bool) -> int:
        """Create the folder, or restore an existing one to its last valid checkpoint, discarding later steps.

        Returns the checkpoint's step, or -1 if there is none.
        """
        check_folder(self.out, self.run.config, resume=resume)
        try:
            checkpoint.make_folder(self.out)
        except OSError as fault:
            raise ConfigError(f"cannot create {self.out} ({fault.strerror}): choose another --out") from fault
        self._lock.acquire()
        check_folder(self.out, self.run.config, resume=resume)  # again: another process may have changed it
        newest = find_checkpoint(self.out / "checkpoints")
        if newest is not None:
            changes = self._record_resumed_changes(newest)
            self.run.registry().load_state_dict(newest.state())
            if {"trainer.best_metric", "trainer.keep_best"} & {change.key for change in changes}:
                self._restore_best_rank(newest.step)
            self.run.learner.load_weights(newest.path / "model")
            self.run.policy.version = self.run.learner.version
            self._find_last_validation()
        step = newest.step if newest is not None else -1
        truncate_after(self.out / "metrics.jsonl", step)
        delete_rollouts_after(self.out / "rollouts", step)
        for name in ("summary.json", "diagnosis.json"):
            (self.out / name).unlink(missing_ok=True)
        remove_partial_files(self.out)
        write_atomic(self.out / "config.toml", to_toml(portable_config(self.run.config, self.out)).encode())
        return step

    def _find_last_validation(self) -> None:
        """Restore the step of the last validation from the metrics; older checkpoints do not have it."""
        progress, lines = self.run.progress, read_metrics(self.out / "metrics.jsonl")
        if progress.last is not None and progress.last_step is None:
            steps = (line["step"] for line in lines if any(name.startswith("eval/") for name in line))
            progress.last_step = max((step for step in steps if step <= progress.step), default=None)

    def _record_resumed_changes(self, newest: checkpoint.Checkpoint) -> list[Change]:
        """Log and record the settings that differ from those of the checkpoint."""
        changes = changes_since(newest.facts.get("settings"), self.run.config, self.out)
        record_changes(self.out, newest.step, changes)
        if changes:
            log.warning("resumed at step %d with changed settings: %s", newest.step, ", ".join(map(str, changes)))
        return changes

    def _restore_best_rank(self, step: int) -> None:
        """Recompute the best validation by the current `trainer.best_metric` from the checkpoints still on disk."""
        trainer, progress = self.run.config.trainer, self.run.progress
        saved_metrics = checkpoint.checkpoint_metrics(self.out / "checkpoints", step)
        ranks = (checkpoint.ranking_key(metrics, trainer.best_metric) for metrics in saved_metrics)
        progress.best_rank = min((rank for rank in ranks if rank is not None), default=None)


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 if sys.platform != "darwin" else 1024 * 1024), 1)
