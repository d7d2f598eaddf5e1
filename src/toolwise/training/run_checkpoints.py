"""The checkpoints of a run: what they hold, and where their files come from. Written beside the training if
`trainer.async_checkpoints` is set."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from toolwise import __version__
from toolwise.protocols import Metrics
from toolwise.tools.catalog import write_tools
from toolwise.training import checkpoint
from toolwise.training.agent_files import AgentFiles
from toolwise.training.changes import saved_settings
from toolwise.training.checkpoint.background import BackgroundSaver
from toolwise.training.run import Run
from toolwise.training.ticket_book import packed_state


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    step: int
    path: Path
    figures: Mapping[str, float]
    """Metrics of the validation at this step; empty if there was none."""


class RunCheckpoints:
    """Saves a run's checkpoints, one at a time."""

    def __init__(self, run: Run, out: Path, digests: Mapping[str, str] | None = None) -> None:
        """`digests`: the `input_digests` of this process, which may have begun before a file was edited."""
        self.run, self.out = run, out
        self._digests = dict(digests or {})
        self.folder = out / "checkpoints"
        self._agent = AgentFiles(run.config, out)
        self._saver = BackgroundSaver(background=run.config.trainer.async_checkpoints)
        self._figures: Mapping[str, float] = {}

    def save(self, figures: Mapping[str, float], state: Mapping[str, Any] | None = None) -> None:
        """Begin a checkpoint of the current step, or write it if that is to happen at once. `figures` are metrics of
        the validation at this step; `state` replaces what the parts of the run have now. Earlier saves must have been
        taken with `take_finished`."""
        run, trainer = self.run, self.run.config.trainer
        self._figures = dict(figures)
        step, weights = run.progress.step, run.learner.weights_to_save()
        parts = {"actor": run.learner.state_dict(), **run.snapshot(), **(state or {})}
        if "tickets" in parts:
            parts["tickets"] = packed_state(parts["tickets"])
        # made only now: nothing of it stays behind if a part's state cannot be had
        staged = self.folder / f"{checkpoint.STAGED}{uuid4().hex[:8]}"
        with checkpoint.cleaning_up(staged, self.folder / f"step-{step:06d}"):
            checkpoint.make_folder(self.folder)
            staged.mkdir()
            self._write_small_files(staged, step)
            if weights is None:
                run.learner.save_model(staged)
        write = partial(
            self._write,
            step,
            staged,
            facts={
                "policy_version": run.learner.version,
                "settings": saved_settings(run.config, self.out),
                "inputs": self._digests,
                "toolwise": __version__,
            },
            figures=self._figures,
            keep_last=trainer.keep_checkpoints,
            keep_best=trainer.best_metric if trainer.keep_best else "",
        )
        self._saver.start({"parts": parts, "weights": weights}, write)

    def _write_small_files(self, folder: Path, step: int) -> None:
        """What is small and may change while the run goes on, or is not safe to use from two threads."""
        self.run.chat.tokenizer.save_pretrained(folder)
        self.run.router.save(folder)
        write_tools(folder, self.run.scheduler.tools)
        self._agent.write(folder, step)

    def _write(
        self, step: int, staged: Path, state: Mapping[str, Any], abandoned: Callable[[], bool], **details: Any
    ) -> checkpoint.Checkpoint:
        weights = state["weights"]

        def fill(folder: Path) -> None:
            staged.rename(folder)
            if weights is not None:
                self.run.learner.save_model(folder, dict(weights))

        try:
            return checkpoint.save(
                self.folder,
                step,
                state["parts"],
                extra_files={"model": fill},
                known_files=self._agent.entries("model"),
                extra_bytes=checkpoint.tensor_bytes(weights or {}),
                abandoned=abandoned,
                **details,
            )
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def wait_for_copy(self) -> None:
        """Call before a weight changes."""
        self._saver.wait_for_copy()

    def take_finished(self, *, wait: bool = False) -> SavedCheckpoint | None:
        """The checkpoint that was saved last, once, when it is on the disk; raises the error if it could not be
        written. None if there is none, or without `wait` not yet."""
        saved = self._saver.take_result(wait=wait)
        return None if saved is None else SavedCheckpoint(saved.step, saved.path, self._figures)

    def finish_with(self, figures: Mapping[str, float], progress: Mapping[str, Any]) -> SavedCheckpoint:
        """Wait for the checkpoint that was saved last and add what a validation of its weights has found since:
        `figures`, and what `progress` says of it."""
        saved = self._saver.take_result(wait=True)
        assert saved is not None, "its result was taken"
        part = {**saved.part("progress"), **progress}
        checkpoint.amend(saved.path, parts={"progress": part}, figures=figures)
        return SavedCheckpoint(saved.step, saved.path, dict(figures))

    def take_metrics(self) -> Metrics:
        return self._saver.take_metrics()

    def abandon(self) -> bool:
        """Stop writing; return whether that has happened."""
        return self._saver.abandon()
