"""Checkpoints: all that must survive a crash, on disk whole or not at all. The training loop saves them
and resumes from the latest. Tensors are in safetensors files, the rest in JSON; nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from toolwise.errors import CheckpointError
from toolwise.protocols import Stateful
from toolwise.serialization import Tensors, decode, encode

FORMAT = 1
MANIFEST = "manifest.json"
logger = logging.getLogger(__name__)

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FOLDER = re.compile(r"step-(\d+)(?:\.(tmp|old)-.*)?")


class Registry:
    """The one place where whatever must survive a crash is known by name."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def register(self, name: str, stateful: Stateful) -> None:
        _check_name(name)
        if name in self._parts:
            raise ValueError(f"{name!r} is registered already")
        self._parts[name] = stateful

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Restore every part; nothing is touched where the names do not agree."""
        missing, unexpected = self._parts.keys() - state.keys(), state.keys() - self._parts.keys()
        if missing or unexpected:
            said = [f"lacks {', '.join(sorted(missing))}"] if missing else []
            said += [f"has {', '.join(sorted(unexpected))}, unknown to this run"] if unexpected else []
            raise CheckpointError(f"the checkpoint {'; it '.join(said)}: resume with the settings it was made with")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


class _File(BaseModel):
    size: int
    sha256: str


class _Manifest(BaseModel):
    """Written last: what a whole checkpoint consists of."""

    format: int
    step: int
    parts: list[str]
    files: dict[str, _File]
    seal: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"seal"}).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk; nothing but its manifest has been read into memory."""

    path: Path
    step: int
    parts: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """What was given to `save`, tensors on the CPU and independent of the files."""
        return {part: _read_part(self.path, part) for part in self.parts}


def save(
    folder: str | os.PathLike[str],
    step: int,
    registry_state: Mapping[str, Any],
    *,
    extra_files: Mapping[str, Callable[[Path], None]] | None = None,
    keep_last: int = 3,
) -> Checkpoint:
    """Write `folder/step-NNNNNN`, then drop what is older than the newest `keep_last`. One writer a folder.

    `extra_files` maps the name of a sub-folder to whoever fills it, such as a model's `save_pretrained`.
    """
    if step < 0 or keep_last < 1:
        raise ValueError(f"step must be 0 or more and keep_last 1 or more, got {step} and {keep_last}")
    final = Path(folder) / f"step-{step:06d}"
    new = final.with_name(f"{final.name}.tmp-{os.getpid()}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if new.exists():
            shutil.rmtree(new)
        new.mkdir()
        for name, state in registry_state.items():
            _write_part(new, name, state)
        for name, write in (extra_files or {}).items():
            _check_name(name)
            (new / name).mkdir()
            write(new / name)
        _seal(new, step, list(registry_state))
        if final.exists():  # no swap in one go: until it is done, `latest` takes what was moved aside
            final.rename(_aside(final, "old"))
        new.rename(final)
        _sync(final.parent)
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"cannot write {final}: {reason}; earlier ones are untouched") from error
        raise
    try:
        _prune(final, keep_last)
    except OSError as error:
        logger.warning("old checkpoints in %s could not be removed: %s", final.parent, error)
    return Checkpoint(final, step, tuple(registry_state))


def _check_name(name: str) -> None:
    if not _PART.fullmatch(name) or f"{name}.json" == MANIFEST:
        raise ValueError(f"{name!r} cannot name a part: use letters, digits, '_', '.', '-', not 'manifest'")


def _aside(path: Path, why: str) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}.{why}-{os.getpid()}-{uuid4().hex[:8]}")


def _write_part(folder: Path, name: str, state: Any) -> None:
    from safetensors.torch import save_file

    _check_name(name)
    tensors = Tensors()
    text = json.dumps(encode(state, name, tensors), allow_nan=False)
    (folder / f"{name}.json").write_text(text, encoding="ascii")
    if tensors.by_name:
        save_file(tensors.by_name, folder / f"{name}.safetensors")


def _seal(folder: Path, step: int, parts: list[str]) -> None:
    """Bring every file to the disk, and only then the manifest that vouches for them."""
    files = {}
    for path in sorted(folder.rglob("*")):
        _sync(path)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = _File(size=path.stat().st_size, sha256=_sha256(path))
    manifest = _Manifest(format=FORMAT, step=step, parts=parts, files=files)
    manifest.seal = manifest.digest()
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _prune(written: Path, keep_last: int) -> None:
    """Keep the newest whole ones and always the one just written; sweep up what crashes left behind."""
    whole = [path for path in _newest_first(written.parent) if "." not in path.name and _is_whole(path)]
    kept = {written, *whole[:keep_last]}
    for path in list(written.parent.iterdir()):
        found = _FOLDER.fullmatch(path.name)
        if not found or path in kept:
            continue
        if found[2] != "tmp":  # a folder that is half deleted never bears the name of a checkpoint
            path = path.rename(_aside(path, "tmp"))
        shutil.rmtree(path)


def latest(folder: str | os.PathLike[str], *, warnings_out: list[str] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint in `folder`; one torn or tampered with is passed over with a warning."""
    for path in _newest_first(Path(folder)):
        try:
            return load(path)
        except CheckpointError as error:
            if warnings_out is None:
                logger.warning("passed over: %s", error)
            else:
                warnings_out.append(f"passed over: {error}")
    return None


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint at `path`, every byte of it checked against the manifest."""
    path = Path(path)
    manifest = _verify(path, hashes=True)
    return Checkpoint(path, manifest.step, tuple(manifest.parts))


def _newest_first(folder: Path) -> Iterator[Path]:
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    found = [(match, path) for path in paths if (match := _FOLDER.fullmatch(path.name)) and match[2] != "tmp"]
    ranked = sorted(((int(match[1]), match[2] is None, path) for match, path in found), reverse=True)
    return (path for _, _, path in ranked)


def _is_whole(path: Path) -> bool:
    try:
        _verify(path, hashes=False)
    except CheckpointError:
        return False
    return True


def _verify(path: Path, *, hashes: bool) -> _Manifest:
    manifest = _read_manifest(path)
    for name, entry in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: take an earlier checkpoint")
        if (size := file.stat().st_size) != entry.size:
            raise CheckpointError(f"{file} has {size} bytes, not {entry.size}: take an earlier checkpoint")
        if hashes and _sha256(file) != entry.sha256:
            raise CheckpointError(f"{file} is not what was saved (sha256): take an earlier checkpoint")
    return manifest


def _read_manifest(path: Path) -> _Manifest:
    file = path / MANIFEST
    if not file.is_file():
        if next(_newest_first(path), None):
            raise CheckpointError(f"{path} is a folder of checkpoints: name one of its step-… folders")
        raise CheckpointError(f"{path} is no whole checkpoint: {file} is missing")
    try:
        manifest = _Manifest.model_validate_json(file.read_bytes())
    except (ValidationError, OSError):
        raise CheckpointError(f"{file} cannot be read or is torn: take an earlier checkpoint") from None
    if manifest.format != FORMAT:
        raise CheckpointError(f"{file} has format {manifest.format}, this version of toolwise reads {FORMAT}")
    if manifest.seal != manifest.digest():
        raise CheckpointError(f"{file} was changed after it was written: take an earlier checkpoint")
    named = _FOLDER.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"{file} is of step {manifest.step}, but its folder is called {path.name}")
    return manifest


def _read_part(folder: Path, name: str) -> Any:
    from safetensors.torch import load_file

    file = folder / f"{name}.json"
    try:
        text = file.read_text(encoding="ascii")
        packed = folder / f"{name}.safetensors"
        return decode(json.loads(text), load_file(packed) if packed.exists() else {})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"{file} cannot be restored ({reason}): take an earlier checkpoint") from error
