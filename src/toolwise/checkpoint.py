"""Checkpoints: all that must survive a crash, on disk whole or not at all. The training loop saves them
and resumes from the latest. Tensors are in safetensors files, the rest in JSON; nothing is pickled."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from toolwise.errors import CheckpointError
from toolwise.protocols import Stateful

if TYPE_CHECKING:
    import torch

FORMAT = 1
MANIFEST = "manifest.json"
logger = logging.getLogger(__name__)

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FOLDER = re.compile(r"step-(\d+)(?:\.(tmp|old)-.*)?")
_NATIVE = {"bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"}
_NATIVE |= {"float16", "bfloat16", "float32", "float64"}
"""Kinds of number that every safetensors reader knows; any other is kept as its bytes."""


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
    tensors = _Tensors()
    text = json.dumps(_encode(state, name, tensors), allow_nan=False)
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
        return _decode(json.loads(text), load_file(packed) if packed.exists() else {})
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"{file} cannot be restored ({reason}): take an earlier checkpoint") from error


class _Tensors:
    """The tensors of one part on their way into its safetensors file."""

    def __init__(self) -> None:
        self.by_name: dict[str, torch.Tensor] = {}
        self._storages: set[int] = set()

    def add(self, value: Any, path: str) -> dict[str, Any] | None:
        """What stands for `value` in the JSON; None where it is neither a tensor nor an array."""
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                raise TypeError(f"{path}: only dense tensors that hold data can be saved")
            dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            dtype = str(value.dtype).removeprefix("torch.")
            flat = dense if dtype in _NATIVE else dense.reshape(-1).view(torch.uint8)
            return {"$tensor": self._keep(flat, path), "dtype": dtype, "shape": list(value.shape)}
        if isinstance(value, np.ndarray | np.generic):
            array = np.array(value, order="C")
            dtype = array.dtype.str
            if array.dtype.hasobject or array.dtype.kind == "V":
                raise TypeError(f"{path}: an array of {array.dtype} cannot be saved")
            if not (array.dtype.isnative and array.dtype.name in _NATIVE):
                array = np.frombuffer(bytearray(array.tobytes()), np.uint8)
            tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
            name = self._keep(torch.from_numpy(array), path)
            return {tag: name, "dtype": dtype, "shape": list(value.shape)}
        return None

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name = path.encode("utf-8", "replace").decode()
        while name in self.by_name:
            name += "'"
        storage = tensor.untyped_storage().data_ptr()
        shared = storage in self._storages  # which safetensors refuses
        self.by_name[name] = tensor.clone() if shared else tensor
        self._storages.add(storage)
        return name


def _encode(value: Any, path: str, tensors: _Tensors) -> Any:
    """`value` as JSON. What JSON cannot say is a table whose first key begins with `$`."""
    if value is None or isinstance(value, bool):
        return value
    if reference := tensors.add(value, path):  # before the numbers: a numpy float is a float as well
        return reference
    if isinstance(value, int):  # in hex, where Python does not limit the number of digits
        return value if abs(value) < 2**63 else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, str):
        return value if _plain(value) else {"$text": [ord(letter) for letter in value]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise TypeError(f"{path}: a key must be a str or an int, got {key!r}")
        items = [[key, _encode(item, f"{path}.{key}", tensors)] for key, item in value.items()]
        if all(isinstance(key, str) and _plain(key) and not key.startswith("$") for key in value):
            return dict(items)
        return {"$dict": [[_encode(key, path, tensors), item] for key, item in items]}
    raise TypeError(f"{path}: a {type(value).__name__} cannot be saved, only plain values and tensors")


def _plain(text: str) -> bool:
    """False where `text` has half of a surrogate pair: JSON would join two of them into one letter."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    match tag:
        case "$tensor" | "$array" | "$scalar":
            return _unpack(tag, tensors[value[tag]], value["dtype"], tuple(value["shape"]))
        case "$int":
            return int(value[tag], 16)
        case "$float":
            return struct.unpack(">d", bytes.fromhex(value[tag]))[0]
        case "$text":
            return "".join(map(chr, value[tag]))
        case "$tuple":
            return tuple(_decode(value[tag], tensors))
        case "$dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in value[tag]}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _unpack(tag: str, stored: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy as np
    import torch

    owned = stored.clone()  # what was loaded is a view into the file, which is pruned sooner or later
    if tag == "$tensor":
        wanted = getattr(torch, dtype)
        return owned if owned.dtype == wanted else owned.view(wanted).reshape(shape)
    array = owned.numpy()
    if array.dtype != np.dtype(dtype):
        array = np.frombuffer(bytearray(array.tobytes()), dtype).reshape(shape)
    return array if tag == "$array" else array[()]
