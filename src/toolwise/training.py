"""A run from beginning to end: its folder, validation, checkpoints, interruption and resumption."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolwise import __version__, checkpoint
from toolwise.config import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.evaluation import validate
from toolwise.loop import Turn, train_step
from toolwise.records import record_of, write_records, write_whole
from toolwise.run import Run
from toolwise.settings import build, read_settings, to_toml
from toolwise.summary import summarize_validation, validation_metrics
from toolwise.trackers.console import ConsoleTracker
from toolwise.trackers.jsonl import JsonlTracker, truncate_after

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
        self._open_folder(resume)
        self.metrics = JsonlTracker(out / "metrics.jsonl")
        self.console: ConsoleTracker | None = None
        if run.config.trainer.console:
            self.console = ConsoleTracker(run.config.trainer.total_steps, title=run.config.name)
        self._began = time.monotonic() - run.progress.seconds

    async def go(self) -> RunResult:
        run, total = self.run, self.run.config.trainer.total_steps
        try:
            with self._stop_on_signal():
                if run.progress.step == 0 and run.progress.before is None and run.config.validation.before:
                    run.progress.before = await self._validate()
                    self._save()
                while run.progress.step < total and not self.interrupted:
                    self._note(await train_step(run))
                    step = run.progress.step
                    last = step == total
                    if last or (run.config.validation.every and step % run.config.validation.every == 0):
                        await self._validate()
                    if last or self.interrupted or step % run.config.trainer.save_every == 0:
                        self._save()
        finally:
            self.metrics.close()
            if self.console is not None:
                self.console.close()
        return RunResult(self.out, self._summarize())

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
        figures = summarize_validation(scored)
        self.run.progress.last = figures
        metrics = validation_metrics(figures)
        self.metrics.log(step, metrics)
        write_records(self.out / "rollouts", f"eval-{step:06d}", scored, [])
        if self.console is not None:
            self.console.log(step, metrics)
        return figures

    def _save(self) -> None:
        progress = self.run.progress
        progress.seconds = time.monotonic() - self._began
        checkpoint.save(
            self.out / "checkpoints",
            progress.step,
            self.run.registry().state_dict(),
            extra_files={"model": self._save_model},
            keep_last=self.run.config.trainer.keep_checkpoints,
        )

    def _save_model(self, folder: Path) -> None:
        self.run.learner.save_model(folder)
        self.run.chat.tokenizer.save_pretrained(folder)

    def _summarize(self) -> dict[str, Any]:
        run = self.run
        summary = {
            "name": run.config.name,
            "before": run.progress.before,
            "after": run.progress.last if run.progress.step else None,
            "steps": run.progress.step,
            "total_steps": run.config.trainer.total_steps,
            "interrupted": self.interrupted,
            "seed": run.config.seed,
            "seconds": round(time.monotonic() - self._began, 3),
            "peak_rss_mb": peak_rss_mb(),
            "model": run.config.model.path,
            "version": __version__,
        }
        write_whole(self.out / "summary.json", json.dumps(summary, indent=2).encode())
        from toolwise.view.report import write_report

        write_report(self.out)
        return summary

    def _open_folder(self, resume: bool) -> None:
        """A fresh folder, or an old one brought back to its last whole checkpoint: what came after it is undone."""
        config_file = self.out / "config.toml"
        if config_file.exists() and not resume:
            raise ConfigError(f"{self.out} already holds a run: add --resume to go on with it, or choose another --out")
        self.out.mkdir(parents=True, exist_ok=True)
        found = None
        if config_file.exists():
            check_same_run(self.run.config, config_file)
            found = checkpoint.latest(self.out / "checkpoints")
        if found is not None:
            self.run.registry().load_state_dict(found.state())
            self.run.learner.load_weights(found.path / "model")
            self.run.policy.version = self.run.learner.version
        step = found.step if found is not None else -1
        truncate_after(self.out / "metrics.jsonl", step)
        forget_rollouts_after(self.out / "rollouts", step)
        (self.out / "summary.json").unlink(missing_ok=True)
        write_whole(config_file, to_toml(self.run.config).encode())

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) lets the step end and saves; a second one stops at once."""

        def stop(name: str) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            print(f"\n{name}: finishing this step and saving; once more to stop at once", file=sys.stderr)

        loop = asyncio.get_running_loop()
        caught = []
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, stop, number.name)
                caught.append(number)
            except (ValueError, RuntimeError, NotImplementedError):
                continue  # not the main thread, or no such signals here: the host decides
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)


def check_same_run(config: RunConfig, config_file: Path) -> None:
    """Resuming under another configuration would mix two runs in one folder."""
    try:
        before = build(RunConfig, read_settings(config_file), source=str(config_file)).model_dump(mode="json")
    except ConfigError as fault:
        raise CheckpointError(f"cannot resume: {fault}") from fault
    now = config.model_dump(mode="json")
    for section, value in now.items():
        if section not in MAY_CHANGE_ON_RESUME and before[section] != value:
            where = section
            if isinstance(value, dict):
                where = next(f"{section}.{key}" for key in value if before[section].get(key) != value[key])
            raise ConfigError(
                f"cannot resume {config_file.parent}: {where} is not what the run began with; use a new --out"
            )


def forget_rollouts_after(folder: Path, step: int) -> None:
    for path in folder.glob("*") if folder.is_dir() else ():
        found = re.fullmatch(r"(?:step|eval)-(\d{6,})\.(?:jsonl|safetensors)", path.name)
        if found is None or int(found.group(1)) > step:
            path.unlink()


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 if sys.platform != "darwin" else 1024 * 1024), 1)
