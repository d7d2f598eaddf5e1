"""The lifecycle of a run: folder, validation, checkpoints, interruption and resumption."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from toolwise.advantages.score_check import ScoreCheck, describe_rewards
from toolwise.concurrency.garbage import frozen_heap
from toolwise.config.secret_names import mask_secrets, secrets_warning
from toolwise.errors import CheckpointError, ConfigError, FaultRateError, ToolwiseError
from toolwise.protocols import Callback, Metrics
from toolwise.rewards.printed_output import PrintLog
from toolwise.training import checkpoint
from toolwise.training.async_loop import AsyncLoop
from toolwise.training.best_validation import compare_with_best, early_stop
from toolwise.training.budget_probe import probe_budgets
from toolwise.training.calibration import begin_calibration, budget_metrics, calibrate_run
from toolwise.training.changes import resume_command
from toolwise.training.diagnosis import Finding, FindingChanges, History, RunDoctor, finding_to_json
from toolwise.training.evaluate import validate
from toolwise.training.input_digests import changed_inputs, input_digests
from toolwise.training.loop import StepResult, train_step
from toolwise.training.metrics import summarize_validation, validation_metrics
from toolwise.training.rollout_files import RolloutFiles
from toolwise.training.run import Run
from toolwise.training.run_checkpoints import RunCheckpoints, SavedCheckpoint
from toolwise.training.run_folder import RunResult, open_folder, restore_run
from toolwise.training.run_summary import summarize_run
from toolwise.training.stop_signal import StopSignal
from toolwise.training.trackers.jsonl import read_metrics
from toolwise.training.trackers.observers import Observers
from toolwise.training.trackers.reporter import Reporter
from toolwise.training.validation_beside import Measured, ValidationBeside
from toolwise.types import CheckpointEvent, RunStart, ScoredRollout, StepEvent, ValidationEvent
from toolwise.untrusted.user_code import describe, describe_at

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
        if run.config.trainer.early_stopping is not None and not run.validation_tasks:
            raise ConfigError("trainer.early_stopping needs held-out tasks: set data.val")
        self.run = run
        self.out = out
        self._signal = StopSignal()
        self._validation_metrics: dict[str, float] = {}
        self._step_metrics: Metrics = {}
        self._error: Exception | None = None
        """Set when more fails than `faults` allows, or a part of the run fails; stops the run."""
        self._before_step: tuple[int, int, dict[str, Any]] | None = None
        """During a training step: the number of steps, the version of the weights and the other state before it."""
        self._beside: ValidationBeside | None = None
        self._lock = checkpoint.FolderLock(out)
        try:
            restore, digests = partial(restore_run, run, out), input_digests(run)
            changed = partial(changed_inputs, now=digests)
            self._saved_step = open_folder(out, run.config, self._lock, restore, resume=resume, changed=changed)
        except BaseException:
            self._lock.release()
            raise
        self._checkpoints = RunCheckpoints(run, out, digests)
        self._async = None if run.tickets is None else AsyncLoop(run)
        run.scoring.set_print_callback(PrintLog(out / "logs" / "reward.log"))
        trainer, title = run.config.trainer, run.config.name
        files = RolloutFiles(run.config.records, run.chat.tokenizer)
        self.reporter = Reporter(
            out, trainer, observers, name=title, total_steps=trainer.total_steps, first=[files], last=callbacks
        )
        self._doctor = RunDoctor(History(run.config.model_dump(mode="json")))
        self._doctor.replay(read_metrics(out / "metrics.jsonl"))
        self._start_time = time.monotonic() - run.progress.seconds
        self._reward_description = describe_rewards(run.config.algorithm.adv_estimator, run.estimator)
        self._score_check = ScoreCheck.of(run.estimator)

    async def run_training(self) -> RunResult:
        try:
            await self._train()
            if self._error is None:
                return RunResult(self.out, self._summarize())
            try:
                self._summarize()
            except Exception as fault:
                log.warning("no summary of the run: %s", describe(fault))
            if isinstance(self._error, ToolwiseError):
                self._error.args = (f"{self._error}; {self._cure()}",)
            raise self._error
        except Exception:
            self._finish_saves()
            raise
        finally:
            try:
                self.reporter.observers.close()
            finally:
                if self._checkpoints.abandon():  # stopped immediately; else its end is the lock's, too
                    self._lock.release()

    async def _train(self) -> None:
        run, total = self.run, self.run.config.trainer.total_steps
        try:
            with self._signal.handled(), frozen_heap():
                if run.config.router.train_actor:
                    rewards = run.estimator.rewards
                    never = rewards is not None and rewards.terminal_score == "never"
                    self.reporter.announce(self._reward_description, logging.WARNING if never else logging.INFO)
                self._warn_about_secrets()
                settings = mask_secrets(run.config.model_dump(mode="json"))
                self.reporter.observers.start(RunStart(self.out, run.config.name, run.progress.step, total, settings))
                self._publish_findings(run.progress.diagnosis.begin(run.startup_findings()))
                level = logging.WARNING if run.calibration.note else logging.INFO
                self.reporter.announce(begin_calibration(run, run.calibration, self.out), level)
                try:
                    await self._train_steps()
                except CheckpointError:
                    raise
                except Exception as fault:
                    self._error = fault
                    await self._end_validation_after_error()
                    self._save_after_error()
        finally:
            if self._async is not None:
                await self._async.close()
            run.close()
            self.reporter.close()

    async def _train_steps(self) -> None:
        run, progress, total = self.run, self.run.progress, self.run.config.trainer.total_steps
        if progress.step == 0:
            tasks = run.calibration.calibration or run.calibration.train
            self.reporter.announce(await probe_budgets(run, tasks), logging.WARNING)
        if progress.step == 0 and progress.before is None and run.config.validation.before:
            progress.before = await self._validate()
            self._save()
        if progress.validating:
            await self._validate_step()
            self._save()
        self._checkpoints.wait_for_copy()
        run.router.warm_start()
        while self._unfinished() and not (
            self._signal.received or self.reporter.stop_reason or self._error or self._stopped_early()
        ):
            progress.diagnosis.before_step(run.config, run.learner.weights_checksum)
            self._before_step = progress.step, run.learner.version, run.snapshot()
            step_once = train_step if self._async is None else self._async.train_step
            result = await step_once(run, self._checkpoints.wait_for_copy)
            self._before_step = None
            if self._beside is None:  # else its results belong to the checkpoint
                self._take_saved()
            self._record_step(result)
            self._validation_metrics = {}
            step = progress.step
            # a run whose weights never changed has another exit status
            ended = step == total and progress.diagnosis.updated is not False
            if (exceeded := progress.faults.describe_exceeded(run.config.faults, ended=ended)) is not None:
                self._error = FaultRateError(exceeded)
            due, save = self._validation_due(), step % run.config.trainer.save_every == 0
            await self._end_validation(wait=due or save)
            best = progress.best_rank
            if due and self._can_validate_beside():
                self._validate_beside(save=save or run.config.trainer.keep_best)
                continue
            if due:
                await self._validate_step()
            if save or (run.config.trainer.keep_best and progress.best_rank != best):
                self._save()
        await self._end_validation(wait=True)
        self.reporter.announce(self._stopped_early())
        self._take_saved(wait=True)
        if self._saved_step != progress.step:
            self._save()
            self._take_saved(wait=True)

    def _validation_due(self) -> bool:
        step, every = self.run.progress.step, self.run.config.validation.every
        return step == self.run.config.trainer.total_steps or bool(every and step % every == 0)

    async def _validate_step(self) -> None:
        progress = self.run.progress
        progress.last, progress.last_step = await self._validate(), progress.step
        progress.validating = False

    def _can_validate_beside(self) -> bool:
        """Whether the learner may go on meanwhile; after the last step there is nothing to go on with."""
        loop, tasks = self._async, self.run.validation_tasks
        return loop is not None and loop.can_hold_weights and bool(tasks) and self._unfinished() and self._error is None

    def _validate_beside(self, *, save: bool) -> None:
        """Begin a validation of the weights of this step. A checkpoint of them is saved first if they may be the best,
        or if one is due; a run that resumes from it begins with the validation."""
        assert self._async is not None
        step, self.run.progress.validating = self.run.progress.step, True
        if save:
            self._save(take=False)
        self._beside = ValidationBeside(step, self._async.hold_weights(partial(self._measure, step)), save)

    async def _end_validation(self, *, wait: bool) -> None:
        """Record the results of a validation beside the training, once it has ended, or after a `wait` for it."""
        beside = self._beside
        if beside is None or not (wait or beside.task.done()):
            return
        self._beside = None
        measured, progress = await beside.task, self.run.progress
        progress.last, progress.last_step = self._record_validation(beside.step, *measured), beside.step
        progress.validating = False
        if beside.saved:
            finish = partial(self._checkpoints.finish_with, self._validation_metrics, progress.validation_state())
            self._report_saved(await asyncio.to_thread(finish))
        if beside.saved or beside.step != progress.step:  # else for the last checkpoint, if the run stops here
            self._validation_metrics = {}

    async def _end_validation_after_error(self) -> None:
        """The weights of an earlier step are still being measured, and their checkpoint may be the best one."""
        try:
            await self._end_validation(wait=True)
        except Exception as fault:
            log.warning("no results of the validation under way: %s", describe(fault))

    def _save_after_error(self) -> None:
        """Save the latest complete step. An error in the middle of an update leaves weights that are not worth saving:
        the run then continues from its last checkpoint."""
        progress = self.run.progress
        self._finish_saves()
        step, version, state = self._before_step or (-1, -1, {})
        if progress.step > step:  # the step is complete
            state = {}
            due = progress.step > 0 and progress.last_step != progress.step
            progress.validating = due and (progress.validating or self._validation_due())
        elif version != self.run.learner.version:
            return
        if self._saved_step == progress.step:
            return
        try:
            self._save(state)
            self._take_saved(wait=True)
        except Exception as fault:
            log.warning("no checkpoint of step %d: %s", progress.step, describe(fault))

    def _finish_saves(self) -> None:
        """Wait for a checkpoint that is being written, after an error that matters more than one of the disk."""
        try:
            self._take_saved(wait=True)
        except CheckpointError as fault:
            log.warning("%s", fault)

    def _cure(self) -> str:
        if isinstance(self._error, FaultRateError):
            return f"see {self.out / 'report.html'} and rollouts/, then resume"
        start = f"step {self._saved_step}" if self._saved_step >= 0 else "the start"
        return f"fix it, then continue from {start}: {resume_command(self.out)}"

    def _unfinished(self) -> bool:
        return self.run.progress.step < self.run.config.trainer.total_steps

    def _record_step(self, result: StepResult) -> None:
        run, step = self.run, self.run.progress.step
        self.run.progress.faults.add(result.scored, self.run.config.faults.window)
        self._step_metrics = result.metrics | self._checkpoints.take_metrics()
        self._step_metrics |= self.reporter.observers.error_metrics()
        self.reporter.log(step, self._step_metrics)
        scored, credited = tuple(result.scored), tuple(result.credited)
        updated = run.learner.updated if credited else {}
        event = StepEvent(self.out, step, self._step_metrics, scored, credited, updated)
        self.reporter.notify("on_step", event, unfinished=self._unfinished())
        warning = self._score_check.observe(result.scored) if self._score_check and result.credited else None
        if warning is not None:
            self.reporter.announce(warning, logging.WARNING)
        self._publish_findings(
            run.progress.diagnosis.after_step(
                run.config, run.estimator, step, result.scored, result.metrics, run.learner.weights_checksum
            )
        )
        self._examine(step, self._step_metrics)

    def _warn_about_secrets(self) -> None:
        sandboxed = self.run.config.reward.sandbox.tier != "off"
        warning = secrets_warning(self.run.config.model_dump(), self.out, sandboxed_reward=sandboxed)
        self.reporter.announce(warning, logging.WARNING)

    async def _validate(self) -> dict[str, Any] | None:
        step = self.run.progress.step
        return self._record_validation(step, *await self._measure(step))

    async def _measure(self, step: int) -> Measured:
        """Calibrate the router and validate, with the weights as they are."""
        calibrated, warning = await calibrate_run(self.run, self.run.calibration.calibration, step=step)
        self.reporter.announce(warning, logging.WARNING)
        if not self.run.validation_tasks:
            return calibrated, None
        if step == 0 and self.reporter.console is not None:
            self.reporter.announce(f"validating on {len(self.run.validation_tasks)} held-out tasks before training …")
        return calibrated, await validate(self.run, step=step)

    def _record_validation(
        self, step: int, calibrated: Metrics, scored: Sequence[ScoredRollout] | None
    ) -> dict[str, Any] | None:
        if scored is None:
            if calibrated:
                self.reporter.log(step, calibrated)
            return None
        summary = summarize_validation(scored, self.run.config.multi_turn.held_out_tools)
        summary |= budget_metrics(self.run.router, scored)
        metrics = validation_metrics(summary) | calibrated
        if self.run.thinking is not None:
            metrics |= {f"eval/{name}": value for name, value in self.run.thinking.measure(scored).items()}
        self.reporter.log(step, metrics)
        event = ValidationEvent(self.out, step, metrics, tuple(scored))
        self.reporter.notify("on_validation", event, unfinished=self._unfinished())
        self._validation_metrics = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        compare_with_best(self.run.config.trainer, self.run.progress, self._validation_metrics)
        self._publish_findings(self.run.progress.diagnosis.after_validation(step, scored))
        self._examine(step, metrics)
        return summary

    def _stopped_early(self) -> str:
        """Why early stopping ends the run; empty if it does not."""
        return early_stop(self.run.config, self.run.progress) if self._unfinished() else ""

    def _examine(self, step: int, metrics: Mapping[str, float]) -> None:
        """Let the doctor look at new metrics, once the rollouts of the step are stored."""
        self._publish_findings(
            self._doctor.add({"step": step, **metrics}, self.out, self.run.progress.diagnosis.findings)
        )

    def _publish_findings(self, changes: FindingChanges) -> None:
        """Show findings on the console, or log them if there is none, and write them for the report."""
        self.reporter.warn(changes.found)
        for finding in changes.withdrawn:
            self.reporter.announce(f"no longer true: {finding.name} (found at step {finding.step})", logging.WARNING)
        if changes.found or changes.withdrawn:
            findings = self._doctor.findings(self.run.progress.diagnosis.findings, self.out)
            self.reporter.write_json("diagnosis.json", list(map(finding_to_json, findings)))

    def _save(self, state: Mapping[str, Any] | None = None, *, take: bool = True) -> None:
        """Begin a checkpoint, after the one before it is written. `state` replaces what the parts of the run have
        now. Without `take` it is not reported yet."""
        self._take_saved(wait=True)
        self.run.progress.seconds = time.monotonic() - self._start_time
        self.reporter.metrics.sync()  # metrics and rollouts up to a checkpoint must also survive a power cut
        for folder in filter(Path.exists, (self.out, self.out / "rollouts")):
            checkpoint.sync(folder)
        self._checkpoints.save(self._validation_metrics, state)
        if take:
            self._take_saved()

    def _take_saved(self, *, wait: bool = False) -> None:
        """Report a checkpoint that has been written; raises the error if it could not be."""
        if (saved := self._checkpoints.take_finished(wait=wait)) is not None:
            self._report_saved(saved)

    def _report_saved(self, saved: SavedCheckpoint) -> None:
        self._saved_step = saved.step
        event = CheckpointEvent(self.out, saved.step, saved.figures, saved.path)
        self.reporter.notify("on_checkpoint", event, unfinished=self._unfinished())

    def _summarize(self) -> dict[str, Any]:
        run, diagnosis = self.run, self.run.progress.diagnosis
        stopped = None if self._signal.received else self.reporter.stop_reason
        interrupted = self._unfinished() and (self._signal.received or stopped is not None)
        if not interrupted and self._error is None:
            self._publish_findings(diagnosis.end(run.progress.step))
            if diagnosis.updated is False:
                log.warning("the actor was never updated: see the diagnosis in %s", self.out)
        early = "" if interrupted or self._error is not None else self._stopped_early()
        findings = self._doctor.findings(diagnosis.findings, self.out)
        if self._error is not None:
            stopped = str(self._error) if isinstance(self._error, ToolwiseError) else describe_at(self._error)
            if not isinstance(self._error, FaultRateError):
                step = run.progress.step
                findings = [*findings, Finding("stopped", "warning", stopped, cure=self._cure(), step=step)]
        summary = summarize_run(run, self.out, findings) | {
            "interrupted": interrupted,
            "stopped": stopped or early or None,
            "stopped_early": bool(early),
            "seconds": round(time.monotonic() - self._start_time, 3),
            "advantages": self._reward_description,
        }
        return self.reporter.summarize(run.progress.step, self._step_metrics, summary)
