"""Reading checkpoints: the latest, the best, or one by its path, and never a damaged one without a word."""

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
"""The figure of a validation that says by how much it exceeded the router's budgets; 0 within them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk; nothing but its manifest has been read into memory."""

    path: Path
    step: int
    parts: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_manifest(cls, path: Path, manifest: Manifest) -> Checkpoint:
        return cls(path, manifest.step, tuple(manifest.parts), manifest.facts, manifest.figures)

    def state(self) -> dict[str, Any]:
        """What was given to `save`, tensors on the CPU and independent of the files."""
        return {name: self.part(name) for name in self.parts}

    def part(self, name: str) -> Any:
        """One part of it; the files of the others stay closed."""
        from safetensors.torch import load_file

        file = self.path / f"{name}.json"
        try:
            text = file.read_text(encoding="ascii")
            packed = self.path / f"{name}.safetensors"
            return decode(json.loads(text), load_file(packed) if packed.exists() else {})
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CheckpointError(f"{file} cannot be restored ({reason}): take an earlier checkpoint") from error


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked against the manifest."""
    path = Path(path)
    return Checkpoint.from_manifest(path, verify(path, hashes=True))


def latest(folder: str | os.PathLike[str], *, warnings_out: list[str] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`; one torn or tampered with is passed over with a warning."""
    return _first_valid(newest_first(Path(folder)), warnings_out)


def best(folder: str | os.PathLike[str], figure: str, *, warnings_out: list[str] | None = None) -> Checkpoint | None:
    """The whole checkpoint in `folder` whose validation had the highest `figure`, or the lowest where it is "-name";
    with a router, among those within the budget where there is one."""
    found = []
    for path in newest_first(Path(folder)):
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError as error:
            _warn_skipped(error, warnings_out)
    return _first_valid((path for path, _ in best_first(found, figure)), warnings_out)


def checkpoint_figures(folder: str | os.PathLike[str], step: int) -> list[Mapping[str, float]]:
    """The validation figures of every checkpoint in `folder` up to `step` whose files are all there."""
    found = [read_if_complete(path) for path in newest_first(Path(folder))]
    return [manifest.figures for manifest in found if manifest is not None and manifest.step <= step]


def best_first(found: Iterable[tuple[Path, Manifest]], figure: str) -> list[tuple[Path, Manifest]]:
    """Those that have the figure. The earlier of two equals comes first: it took less training."""
    ranked = [
        (place, manifest.step, path, manifest)
        for path, manifest in found
        if (place := ranking_key(manifest.figures, figure)) is not None
    ]
    return [(path, manifest) for _, _, path, manifest in sorted(ranked, key=lambda entry: entry[:2])]


def ranking_key(figures: Mapping[str, float], figure: str) -> tuple[float, float] | None:
    """What validations are compared by, the lowest being the best: overspending first, then `figure` (or "-name"), so
    that one within its budget comes before all that exceed theirs. None where the figure is not there."""
    name, sign = figure.removeprefix("-"), 1 if figure.startswith("-") else -1
    return (figures.get(OVERSPEND, 0.0), sign * figures[name]) if name in figures else None


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
