"""Reads checkpoints: the latest, the best, or one by path. Damaged ones are always reported.

A checkpoint's manifest lists its files and their hashes, and is written after all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from toolwise.errors import CheckpointError
from toolwise.serialization.files import STEP_FOLDER, newest_first, sync
from toolwise.serialization.state import decode
from toolwise.training.checkpoint.agent_manifest import AGENT_FILE, list_agent_files
from toolwise.training.checkpoint.file_entry import FileEntry, file_sha256

log = logging.getLogger("toolwise.training.checkpoint")

FORMAT = 2
MANIFEST = "manifest.json"
OVERSPEND = "budget/overspend"
"""Validation metric: how much it exceeded the router's budgets; 0 within them."""


class Manifest(BaseModel):
    """`seal` is a digest of all other fields."""

    format: int
    step: int
    parts: list[str]
    facts: dict[str, JsonValue] = {}
    """About the run: the policy's version, its settings, …"""
    figures: dict[str, float] = {}
    """Metrics of a validation at exactly this step; `best` compares them."""
    files: dict[str, FileEntry]
    seal: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"seal"}).encode()).hexdigest()


def settings_digest(settings: Mapping[str, Any]) -> str:
    """SHA-256 of settings as JSON, independent of their order."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, allow_nan=False).encode()).hexdigest()


def seal(folder: Path, manifest: Manifest, known: Mapping[str, FileEntry] | None = None) -> None:
    """Sync every file, and only then write the manifest with their hashes. An agent folder within gets the list of its
    files first. `known` are entries of files that need not be read."""
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file() and path.name != AGENT_FILE:
            name = path.relative_to(folder).as_posix()
            manifest.files[name] = (known or {}).get(name) or FileEntry.of(path)
    for path in sorted(folder.rglob(AGENT_FILE)):
        list_agent_files(path.parent, folder, manifest.files)
        sync(path.parent)
        manifest.files[path.relative_to(folder).as_posix()] = FileEntry.of(path)
    manifest.seal = manifest.digest()
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    sync(folder / MANIFEST)
    sync(folder)


def verify(path: Path, *, hashes: bool) -> Manifest:
    """Return the manifest; raise if a file is missing, changed, or not listed in it."""
    manifest = read_manifest(path)
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: use an earlier checkpoint")
        if (size := file.stat().st_size) != entry.size:
            raise CheckpointError(f"{file} has {size} bytes, not {entry.size}: use an earlier checkpoint")
        if hashes and file_sha256(file) != entry.sha256:
            raise CheckpointError(f"{file} is not what was saved (sha256): use an earlier checkpoint")
    for name in list_files(path):
        if name not in manifest.files:  # loading a model folder may use any file in it
            raise CheckpointError(f"{path / name} was added after the checkpoint was written: move it elsewhere")
    return manifest


def read_if_complete(path: Path) -> Manifest | None:
    """The manifest if every file exists with its recorded size, else None."""
    try:
        return verify(path, hashes=False)
    except CheckpointError:
        return None


def read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    if not file.is_file():
        if newest_first(path):
            raise CheckpointError(f"{path} is a folder of checkpoints: give one of its step-… folders")
        raise CheckpointError(f"{path} is not a complete checkpoint: {file} is missing")
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except (ValidationError, OSError):
        raise CheckpointError(f"{file} cannot be read or is incomplete: use an earlier checkpoint") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{file} has format {manifest.format}, this version of toolwise reads {FORMAT}")
    if manifest.seal != manifest.digest():
        raise CheckpointError(f"{file} was changed after it was written: use an earlier checkpoint")
    match = STEP_FOLDER.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise CheckpointError(f"{file} is for step {manifest.step}, but its folder is named {path.name}")
    return manifest


def list_files(folder: Path) -> Iterator[str]:
    """Names of all files except the manifest and hidden files, which desktops and network drives leave behind."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if not path.is_dir() and name.as_posix() != MANIFEST and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()


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

        file, packed = self.path / f"{name}.json", self.path / f"{name}.safetensors"
        try:
            return decode(json.loads(file.read_text("ascii")), load_file(packed) if packed.exists() else {})
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
    manifests = map(read_if_complete, newest_first(Path(folder)))
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
    within its budget precedes those over budget. Of validations at slightly different costs, those at the budget are
    compared (`budget/score`). None if the metric is missing."""
    name, sign = metric.removeprefix("-"), 1 if metric.startswith("-") else -1
    if name not in metrics:
        return None
    return metrics.get(OVERSPEND, 0.0), sign * metrics.get(f"budget/{name}", metrics[name])


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
