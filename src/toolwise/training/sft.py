"""The lifecycle of a supervised fine-tuning run: folder, validation, checkpoints, interruption and resumption.

The output folder is a run folder like that of `toolwise train`; when the run is done it also holds the trained model,
which plain transformers loads.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from toolwise import __version__
from toolwise.config.secret_names import mask_secrets
from toolwise.config.sft import SftConfig
from toolwise.errors import CheckpointError, ToolwiseError
from toolwise.protocols import Callback, Metrics
from toolwise.training import checkpoint
from toolwise.training.changes import read_changes, resume_command, saved_settings
from toolwise.training.diagnosis import Finding, finding_to_json
from toolwise.training.metrics import peak_rss_mb
from toolwise.training.run_folder import RunResult, open_folder
from toolwise.training.sft_findings import MAX_NOT_FINITE, end_findings, not_finite
from toolwise.training.sft_folder import disk_error, list_names, write_model
from toolwise.training.sft_run import SftRun
from toolwise.training.stop_signal import StopSignal
from toolwise.training.trackers.jsonl import read_metrics
from toolwise.training.trackers.observers import Observers
from toolwise.training.trackers.reporter import Reporter
from toolwise.types import CheckpointEvent, RunStart, StepEvent, ValidationEvent

log = logging.getLogger("toolwise.training.sft")

BEST_METRIC = "-loss"


class SftTraining:
    """One run in one folder. `run_training` trains until done or interrupted, and saves everything either way."""

    def __init__(
        self,
        run: SftRun,
        recorded: SftConfig,
        out: Path,
        *,
        resume: bool,
        files: Mapping[str, bytes] | None = None,
        callbacks: Sequence[Callback] = (),
        observers: Observers | None = None,
    ) -> None:
        """`recorded` is the configuration for config.toml; `files` are written into the folder. `observers` are the
        user's trackers and callbacks; unlike theirs, an error in `callbacks` ends the run."""
        self.run, self.recorded, self.out = run, recorded, out
        self.findings: list[Finding] = []
        self._signal = StopSignal()
        self._before = list_names(out)
        self._model_written = False
        self._lock = checkpoint.FolderLock(out)
        config = run.config
        try:
            self._saved_step = open_folder(out, recorded, self._lock, run.restore, resume=resume, files=files)
            self.reporter = Reporter(
                out, config.trainer, observers, name=config.name, total_steps=config.steps, last=callbacks
            )
        except BaseException as fault:
            self._lock.release()
            if (error := disk_error(fault, out, before=self._before)) is not None:
                raise error from fault
            raise
        self._start_time = time.monotonic() - run.progress.seconds

    def run_training(self) -> RunResult:
        try:
            return self._run_training()
        except BaseException as fault:
            error = disk_error(fault, self.out, before=self._before, model_written=self._model_written)
            if error is not None:
                raise error from fault
            raise
        finally:
            try:
                self.reporter.observers.close()
            finally:
                self._lock.release()

    def _run_training(self) -> RunResult:
        try:
            with self._signal.handled():
                settings = mask_secrets(self.recorded.model_dump(mode="json"))
                progress, config = self.run.progress, self.run.config
                self.reporter.observers.start(RunStart(self.out, config.name, progress.step, config.steps, settings))
                self._train_steps()
        finally:
            self.reporter.close()
        return RunResult(self.out, self._summarize())

    def _train_steps(self) -> None:
        run, progress, config = self.run, self.run.progress, self.run.config
        if progress.step == 0 and progress.before is None and run.val.rows:
            progress.before = self._validate()
        from toolwise.learner.supervised import pack_ahead

        started = time.perf_counter()
        with closing(pack_ahead(run.pack, range(progress.step, config.steps))) as batches:
            for step, batch in batches:
                self._record_step(step + 1, run.learner.update(batch), started)
                best, due = progress.best_step, config.val_every and progress.step % config.val_every == 0
                if run.val.rows and (due or progress.step == config.steps):
                    self._validate()
                new_best = config.trainer.keep_best and progress.best_step != best
                if self._signal.received or self.reporter.stop_reason is not None:
                    break
                if progress.step < config.steps and (progress.step % config.trainer.save_every == 0 or new_best):
                    self._save()
                started = time.perf_counter()
        self._finish()

    def _record_step(self, step: int, metrics: Metrics, started: float) -> None:
        progress = self.run.progress
        seconds = time.perf_counter() - started
        progress.step = step
        progress.tokens += int(metrics["all_tokens"])
        progress.first = progress.first or dict(metrics)
        progress.last = dict(metrics)
        progress.updated = progress.updated or metrics["update_norm"] > 0.0
        if math.isfinite(metrics["loss"]):
            progress.not_finite_in_a_row = 0
        else:
            progress.not_finite += 1
            progress.not_finite_in_a_row += 1
            if progress.not_finite == 1:
                self._publish([not_finite(step, metrics["loss"])])
        metrics = metrics | {
            "epoch": step / len(self.run.batches),
            "time/step_s": seconds,
            "time/tokens_per_s": metrics["all_tokens"] / max(seconds, 1e-9),
            **self.reporter.observers.error_metrics(),
        }
        self.reporter.log(step, metrics)
        self.reporter.notify("on_step", StepEvent(self.out, step, metrics, (), ()), unfinished=self._unfinished())
        if progress.not_finite_in_a_row >= MAX_NOT_FINITE:
            where = f"{resume_command(self.out)} --set lr=…" if self._saved_step > 0 else "lower lr"
            raise ToolwiseError(
                f"the loss was not a finite number in the last {MAX_NOT_FINITE} steps, up to step {step}: {where}, or "
                'train in float32 (model.dtype = "float32")'
            )

    def _validate(self) -> float:
        progress = self.run.progress
        if progress.step == 0 and self.reporter.console is not None:
            held_out = self.run.val.conversations
            self.reporter.announce(f"validating on {held_out} held-out conversations before training …")
        loss = self.run.learner.loss(self.run.val.rows)
        progress.validation, progress.validated = loss, progress.step
        if progress.step and math.isfinite(loss) and (progress.best is None or loss < progress.best):
            progress.best, progress.best_step = loss, progress.step
        metrics = {"eval/loss": loss}
        self.reporter.log(progress.step, metrics)
        event = ValidationEvent(self.out, progress.step, metrics, ())
        self.reporter.notify("on_validation", event, unfinished=self._unfinished())
        return loss

    def _finish(self) -> None:
        """The model first, if all steps are done: it matters more than a checkpoint of the same step."""
        if self._unfinished():
            self._save()
            return
        self._write_model()
        if self._saved_step != self.run.progress.step:
            try:
                self._save()
            except CheckpointError as fault:
                log.warning("the model is complete, but there is no checkpoint to continue from: %s", fault)

    def _unfinished(self) -> bool:
        return self.run.progress.step < self.run.config.steps

    def _save(self) -> None:
        progress, trainer = self.run.progress, self.run.config.trainer
        progress.seconds = time.monotonic() - self._start_time
        self.reporter.metrics.sync()  # metrics up to a checkpoint must also survive a power cut
        figures = {"loss": progress.validation} if progress.validated == progress.step else {}
        saved = checkpoint.save(
            self.out / "checkpoints",
            progress.step,
            self.run.registry().state_dict(),
            extra_files={"model": self._save_model},
            facts={"settings": saved_settings(self.recorded, self.out), "toolwise": __version__},
            figures={name: value for name, value in figures.items() if value is not None},
            keep_last=trainer.keep_checkpoints,
            keep_best=BEST_METRIC if trainer.keep_best else "",
        )
        self._saved_step = progress.step
        event = CheckpointEvent(self.out, progress.step, saved.figures, saved.path)
        self.reporter.notify("on_checkpoint", event, unfinished=self._unfinished())

    def _save_model(self, folder: Path) -> None:
        self.run.learner.save_model(folder)
        self.run.chat.tokenizer.save_pretrained(folder)

    def _write_model(self) -> None:
        """Write the trained model, or the best one if that is kept, into the folder itself."""
        write, progress = self._save_model, self.run.progress
        if self.run.config.trainer.keep_best and progress.best_step != progress.step:
            best = checkpoint.best(self.out / "checkpoints", BEST_METRIC)
            if best is not None and progress.validation is not None and best.figures["loss"] < progress.validation:
                write = partial(shutil.copytree, best.path / "model", dirs_exist_ok=True)
        write_model(self.out, write)
        self._model_written = True

    def _summarize(self) -> dict[str, Any]:
        run, progress = self.run, self.run.progress
        interrupted = self._unfinished()
        if not interrupted:
            lines = read_metrics(self.out / "metrics.jsonl")
            self._publish(end_findings(run, [line["loss"] for line in lines if isinstance(line.get("loss"), float)]))
        validation = None if progress.validation is None else {"loss": progress.validation}
        summary = {
            "name": run.config.name,
            "kind": "sft",
            "before": None if progress.before is None else {"loss": progress.before},
            "after": validation if progress.validated == progress.step else None,
            "best": None if progress.best is None else {"loss": progress.best, "step": progress.best_step},
            "first_loss": progress.first.get("loss"),
            "loss": progress.last.get("loss"),
            "last_step": progress.last,
            "steps": progress.step,
            "total_steps": run.config.steps,
            "epochs": progress.step / len(run.batches),
            "tokens": progress.tokens,
            "conversations": _counts(run),
            "reply_tokens": run.train.reply_tokens(),
            "interrupted": interrupted,
            "stopped": None if self._signal.received else self.reporter.stop_reason,
            "seed": run.config.seed,
            "seconds": round(time.monotonic() - self._start_time, 3),
            "peak_rss_mb": peak_rss_mb(),
            "model": run.config.model.path,
            "version": __version__,
            "changes": read_changes(self.out),
            "updated": progress.updated,
            "diagnosis": list(map(finding_to_json, self.findings)),
        }
        return self.reporter.summarize(progress.step, progress.last, summary)

    def _publish(self, findings: Sequence[Finding]) -> None:
        """Show findings; the summary has them too."""
        self.findings += findings
        self.reporter.warn(findings)


def _counts(run: SftRun) -> dict[str, int]:
    """Conversations of the run: how many, how many were too long, and the held-out ones."""
    train, val = run.train, run.val
    counts = {"train": train.conversations, "truncated": train.truncated, "dropped": train.dropped}
    return counts | {"val": val.conversations, "val_truncated": val.truncated, "val_dropped": val.dropped}
