"""The manifest of a checkpoint: its files and their hashes, written after all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from toolwise.errors import CheckpointError
from toolwise.serialization.files import STEP_FOLDER, newest_first, sync

FORMAT = 2
MANIFEST = "manifest.json"


class FileEntry(BaseModel):
    size: int
    sha256: str


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


def seal(folder: Path, manifest: Manifest) -> None:
    """Sync every file, and only then write the manifest with their hashes."""
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file():
            entry = FileEntry(size=path.stat().st_size, sha256=_sha256(path))
            manifest.files[path.relative_to(folder).as_posix()] = entry
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
        if hashes and _sha256(file) != entry.sha256:
            raise CheckpointError(f"{file} is not what was saved (sha256): use an earlier checkpoint")
    for name in _list_files(path):
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


def _list_files(folder: Path) -> Iterator[str]:
    """Names of all files except the manifest and hidden files, which desktops and network drives leave behind."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if not path.is_dir() and name.as_posix() != MANIFEST and not any(part.startswith(".") for part in name.parts):
            yield name.as_posix()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): use an earlier checkpoint") from error
