"""A run from beginning to end: its folder, validation, checkpoints, interruption and resumption."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from toolwise import __version__, checkpoint
from toolwise.config import RunConfig, load_config
from toolwise.errors import CheckpointError, ConfigError
from toolwise.evaluation import validate
from toolwise.loop import Turn, train_step
from toolwise.placing import place_paths
from toolwise.records import record_of, write_records, write_whole
from toolwise.run import Run
from toolwise.settings import to_toml
from toolwise.summary import summarize_validation, validation_metrics
from toolwise.trackers.console import ConsoleTracker
from toolwise.trackers.jsonl import JsonlTracker, truncate_after

log = logging.getLogger("toolwise.training")

MAY_CHANGE_ON_RESUME = ("trainer", "validation", "name", "deterministic")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run leaves behind."""

    out: Path
    summary: dict[str, Any]


class Training:
    """One run in one folder. `go` trains until done or told to stop; everything is on disk either way."""

    def __init__(self, run: Run, out: Path, *, resume: bool) -> None:
        self.run = run
        self.out = out
        self.interrupted = False
        self._figures: dict[str, float] = {}
        self._lock = checkpoint.FolderLock(out)
        try:
            self._saved_step = self._open_folder(resume)
        except BaseException:
            self._lock.release()
            raise
        self.metrics = JsonlTracker(out / "metrics.jsonl")
        self.console: ConsoleTracker | None = None
        if run.config.trainer.console:
            self.console = ConsoleTracker(run.config.trainer.total_steps, title=run.config.name)
        self._began = time.monotonic() - run.progress.seconds

    async def go(self) -> RunResult:
        try:
            await self._train()
            return RunResult(self.out, self._summarize())
        finally:
            self._lock.release()

    async def _train(self) -> None:
        run, total = self.run, self.run.config.trainer.total_steps
        try:
            with self._stop_on_signal():
                if run.progress.step == 0 and run.progress.before is None and run.config.validation.before:
                    run.progress.before = await self._validate()
                    self._save()
                run.router.warm_start()
                while run.progress.step < total and not self.interrupted:
                    self._note(await train_step(run))
                    self._figures = {}
                    step, best = run.progress.step, run.progress.best
                    if step == total or (run.config.validation.every and step % run.config.validation.every == 0):
                        run.progress.last = await self._validate()
                    if step % run.config.trainer.save_every == 0 or run.progress.best != best:
                        self._save()
                if self._saved_step != run.progress.step:
                    self._save()
        finally:
            run.close()
            self.metrics.close()
            if self.console is not None:
                self.console.close()

    def _note(self, turn: Turn) -> None:
        step = self.run.progress.step
        self.metrics.log(step, turn.metrics)
        write_records(self.out / "rollouts", f"step-{step:06d}", turn.scored, turn.credited)
        if self.console is not None:
            self.console.log(step, turn.metrics)
            for scored in turn.scored[:1]:
                self.console.show_rollout(record_of(scored))

    async def _validate(self) -> dict[str, Any] | None:
        if not self.run.validation_tasks:
            return None
        step = self.run.progress.step
        scored = await validate(self.run)
        figures = summarize_validation(scored, self.run.config.multi_turn.held_out_tools)
        metrics = validation_metrics(figures)
        if self.run.thinking is not None:
            metrics |= {f"eval/{name}": value for name, value in self.run.thinking.measure(scored).items()}
        self.metrics.log(step, metrics)
        write_records(self.out / "rollouts", f"eval-{step:06d}", scored, [])
        if self.console is not None:
            self.console.log(step, metrics)
        self._figures = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        self._compare_with_the_best()
        return figures

    def _compare_with_the_best(self) -> None:
        trainer, progress = self.run.config.trainer, self.run.progress
        name = trainer.best_metric.removeprefix("-")
        if not trainer.keep_best:
            return
        if name not in self._figures:
            known = ", ".join(sorted(self._figures))
            log.warning("trainer.best_metric is %r, and the validation reports: %s", name, known)
            return
        value = self._figures[name] * (-1 if trainer.best_metric.startswith("-") else 1)
        if progress.best is None or value > progress.best:
            progress.best = value

    def _save(self) -> None:
        progress, trainer = self.run.progress, self.run.config.trainer
        progress.seconds = time.monotonic() - self._began
        self.metrics.sync()  # what a checkpoint vouches for outlasts a power cut as well
        for folder in (self.out, self.out / "rollouts"):
            if folder.exists():
                checkpoint.sync(folder)
        checkpoint.save(
            self.out / "checkpoints",
            progress.step,
            self.run.registry().state_dict(),
            extra_files={"model": self._save_model},
            facts={
                "policy_version": self.run.learner.version,
                "config_sha256": config_digest(self.run.config, self.out),
                "toolwise": __version__,
            },
            figures=self._figures,
            keep_last=trainer.keep_checkpoints,
            keep_best=trainer.best_metric if trainer.keep_best else "",
        )
        self._saved_step = progress.step

    def _save_model(self, folder: Path) -> None:
        self.run.learner.save_model(folder)
        self.run.chat.tokenizer.save_pretrained(folder)
        self.run.router.save(folder)

    def _summarize(self) -> dict[str, Any]:
        run = self.run
        summary = {
            "name": run.config.name,
            "before": run.progress.before,
            "after": run.progress.last,
            "steps": run.progress.step,
            "total_steps": run.config.trainer.total_steps,
            "interrupted": self.interrupted and run.progress.step < run.config.trainer.total_steps,
            "seed": run.config.seed,
            "seconds": round(time.monotonic() - self._began, 3),
            "peak_rss_mb": peak_rss_mb(),
            "model": run.config.model.path,
            "version": __version__,
            "sandbox": run.scoring.describe(),
            "tool_prompt": run.chat.tool_prompt.describe() if run.scheduler.tools else None,
        }
        write_whole(self.out / "summary.json", json.dumps(summary, indent=2).encode())
        from toolwise.view.report import write_report

        write_report(self.out)
        return summary

    def _open_folder(self, resume: bool) -> int:
        """A fresh folder, or an old one brought back to its last whole checkpoint: what came after it is undone.

        Gives the checkpoint's step, -1 where there is none.
        """
        check_folder(self.out, self.run.config, resume=resume)
        try:
            checkpoint.make_folder(self.out)
        except OSError as fault:
            raise ConfigError(f"{self.out} cannot be made ({fault.strerror}): choose another --out") from fault
        self._lock.acquire()
        check_folder(self.out, self.run.config, resume=resume)  # again: somebody may have been here in between
        found = find_checkpoint(self.out / "checkpoints")
        if found is not None:
            if found.facts.get("config_sha256") != config_digest(self.run.config, self.out):
                log.warning("%s was saved under other settings than config.toml has now", found.path)
            self.run.registry().load_state_dict(found.state())
            self.run.learner.load_weights(found.path / "model")
            self.run.policy.version = self.run.learner.version
        step = found.step if found is not None else -1
        truncate_after(self.out / "metrics.jsonl", step)
        forget_rollouts_after(self.out / "rollouts", step)
        (self.out / "summary.json").unlink(missing_ok=True)
        sweep(self.out)
        write_whole(self.out / "config.toml", to_toml(portable(self.run.config, self.out)).encode())
        return step

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) lets the step end and saves; a second one stops at once.

        Plain handlers and not the event loop's, which would hear of nothing until an update is over.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            name = signal.Signals(number).name
            print(f"\n{name}: finishing this step and saving; once more to stop at once", file=sys.stderr, flush=True)

        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the host
            return
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def check_folder(out: Path, config: RunConfig, *, resume: bool) -> None:
    """Whether a run under `config` may begin, or go on, in `out`. Nothing is changed."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: choose a folder for --out")
    config_file = out / "config.toml"
    if config_file.exists():
        if not resume:
            raise ConfigError(f"{out} already holds a run: add --resume to go on with it, or choose another --out")
        check_same_run(config, config_file)
    elif checkpoint.latest(out / "checkpoints", warnings_out=[]) is not None:
        raise CheckpointError(f"{out} has checkpoints and no config.toml to tell whose: choose another --out")


def check_same_run(config: RunConfig, config_file: Path) -> None:
    """Resuming under another configuration would mix two runs in one folder."""
    try:
        before = _comparable(load_config(config_file))
    except ConfigError as fault:
        raise CheckpointError(f"cannot resume: {fault}; put the file right, or choose another --out") from fault
    now = _comparable(config)
    for section, value in now.items():
        if section not in MAY_CHANGE_ON_RESUME and before[section] != value:
            where = section
            if isinstance(value, dict):
                where = next(f"{section}.{key}" for key in value if before[section].get(key) != value[key])
            raise ConfigError(
                f"cannot resume {config_file.parent}: {where} is not what the run began with; use a new --out"
            )


def find_checkpoint(folder: Path) -> checkpoint.Checkpoint | None:
    """The last whole one. Damaged ones are passed over, but never all of them: that would begin the run anew."""
    damaged: list[str] = []
    found = checkpoint.latest(folder, warnings_out=damaged)
    if found is None and damaged:
        raise CheckpointError(f"cannot resume, all checkpoints are damaged: {damaged[0]}; or remove {folder}")
    for warning in damaged:
        log.warning("%s", warning)
    return found


def _comparable(config: RunConfig) -> dict[str, Any]:
    """Paths as what they lead to, from wherever and by whatever links the run was started."""
    settings = place_paths(config.model_dump(mode="json"), Path.cwd())
    for which in ("train", "val"):
        if settings["data"][which] is not None:
            settings["data"][which] = str(Path(settings["data"][which]).resolve())
    del settings["reward"]["sandbox"]  # where a reward runs does not change what it says
    return settings


def portable(config: RunConfig, out: Path) -> RunConfig:
    """As config.toml says it: what lies in the run's folder relative to that, so that the folder can be moved."""
    settings, folder = place_paths(config.model_dump(), Path.cwd()), out.resolve()
    for which in ("train", "val"):
        path = settings["data"][which]
        if path is not None and Path(path).resolve().is_relative_to(folder):
            settings["data"][which] = str(Path(path).resolve().relative_to(folder))
    return RunConfig.model_validate(settings)


def config_digest(config: RunConfig, out: Path) -> str:
    """Of what a run must not change on its way. What stands at its default counts as not said: a new setting of a
    newer version changes nothing."""
    settings = portable(config, out).model_dump(mode="json", exclude_defaults=True)
    for name in MAY_CHANGE_ON_RESUME:
        settings.pop(name, None)
    settings.get("reward", {}).pop("sandbox", None)
    return checkpoint.digest(settings)


def forget_rollouts_after(folder: Path, step: int) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        found = re.fullmatch(r"(?:step|eval)-(\d{6,})\.(?:jsonl|safetensors)", path.name)
        if found is not None and int(found.group(1)) > step:
            path.unlink()


def sweep(out: Path) -> None:
    """Remove what a killed run was in the middle of writing."""
    beside = (".config.toml.*.tmp", ".summary.json.*.tmp", "metrics.jsonl.tmp", "report.*.tmp", "rollouts/.*.tmp")
    for path in [path for pattern in beside for path in out.glob(pattern)]:
        path.unlink()
    for path in out.glob("checkpoints/step-*.tmp-*"):
        shutil.rmtree(path)


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 if sys.platform != "darwin" else 1024 * 1024), 1)
