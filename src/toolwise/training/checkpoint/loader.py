"""Reads checkpoints: the latest, the best, or one by path. Damaged ones are always reported."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolwise.errors import CheckpointError
from toolwise.serialization.files import newest_first
from toolwise.serialization.state import decode
from toolwise.training.checkpoint.manifest import Manifest, read_if_complete, read_manifest, verify

log = logging.getLogger("toolwise.training.checkpoint")

OVERSPEND = "budget/overspend"
"""Validation metric: how much it exceeded the router's budgets; 0 within them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk; only its manifest has been read into memory."""

    path: Path
    step: int
    parts: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, path: Path, manifest: Manifest) -> Checkpoint:
        return cls(path, manifest.step, tuple(manifest.parts), manifest.facts, manifest.figures)

    def state(self) -> dict[str, Any]:
        """The state passed to `save`, with tensors on the CPU and independent of the files."""
        return {name: self.part(name) for name in self.parts}

    def part(self, name: str) -> Any:
        """One part of the state; the files of other parts are not read."""
        from safetensors.torch import load_file

        file = self.path / f"{name}.json"
        try:
            text = file.read_text(encoding="ascii")
            packed = self.path / f"{name}.safetensors"
            return decode(json.loads(text), load_file(packed) if packed.exists() else {})
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"{file} cannot be restored ({reason}): use an earlier checkpoint") from error


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at `path`, with every byte verified against the manifest."""
    path = Path(path)
    return Checkpoint.from_manifest(path, verify(path, hashes=True))


def latest(folder: str | os.PathLike[str], *, warnings_out: list[str] | None = None) -> Checkpoint | None:
    """The newest valid checkpoint in `folder`; damaged or modified ones are skipped with a warning."""
    return _first_valid(newest_first(Path(folder)), warnings_out)


def best(folder: str | os.PathLike[str], metric: str, *, warnings_out: list[str] | None = None) -> Checkpoint | None:
    """The valid checkpoint in `folder` whose validation has the highest `metric`, or the lowest for "-name". With a
    router, checkpoints within the budget take precedence."""
    manifests = []
    for path in newest_first(Path(folder)):
        try:
            manifests.append((path, read_manifest(path)))
        except CheckpointError as error:
            _warn_skipped(error, warnings_out)
    return _first_valid((path for path, _ in best_first(manifests, metric)), warnings_out)


def checkpoint_metrics(folder: str | os.PathLike[str], step: int) -> list[Mapping[str, float]]:
    """The validation metrics of every complete checkpoint in `folder` up to `step`."""
    manifests = [read_if_complete(path) for path in newest_first(Path(folder))]
    return [manifest.figures for manifest in manifests if manifest is not None and manifest.step <= step]


def best_first(manifests: Iterable[tuple[Path, Manifest]], metric: str) -> list[tuple[Path, Manifest]]:
    """The checkpoints that have the metric, best first. Of equals the earlier comes first: it took less training."""
    ranked = [
        (key, manifest.step, path, manifest)
        for path, manifest in manifests
        if (key := ranking_key(manifest.figures, metric)) is not None
    ]
    return [(path, manifest) for _, _, path, manifest in sorted(ranked, key=lambda entry: entry[:2])]


def ranking_key(metrics: Mapping[str, float], metric: str) -> tuple[float, float] | None:
    """Sort key of validations, lowest is best: overspending first, then `metric` (or "-name"), so that any validation
    within its budget precedes those over budget. None if the metric is missing."""
    name, sign = metric.removeprefix("-"), 1 if metric.startswith("-") else -1
    return (metrics.get(OVERSPEND, 0.0), sign * metrics[name]) if name in metrics else None


def _first_valid(paths: Iterable[Path], warnings_out: list[str] | None) -> Checkpoint | None:
    for path in paths:
        try:
            return load(path)
        except CheckpointError as error:
            _warn_skipped(error, warnings_out)
    return None


def _warn_skipped(error: CheckpointError, warnings_out: list[str] | None) -> None:
    if warnings_out is None:
        log.warning("passed over: %s", error)
    else:
        warnings_out.append(f"passed over: {error}")
