"""`agent.json`: what an agent folder holds besides its model, and a checksum of every file in it."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from toolwise import __version__
from toolwise.errors import CheckpointError
from toolwise.serialization.files import write_atomic
from toolwise.training.checkpoint.file_entry import FileEntry, file_sha256

AGENT_FILE = "agent.json"
AGENT_FORMAT = 2
_READABLE_FORMATS = (1, AGENT_FORMAT)
"""Format 1 had no checksums of hidden files and of Markdown documents: a folder that has any is refused."""
_LICENCES = ("LICENSE", "NOTICE")
_LEFT_BEHIND = ("._", ".DS_Store", ".nfs")
"""Starts of the names of hidden files that desktops and network drives leave anywhere."""
_LOOKED_UP = ("code/", "documents/", "wording.")
_OF_DOWNLOADS = (".git", ".gitattributes", ".gitignore", ".cache")
"""What git and the hub's client keep at the top of a folder."""


class AgentManifest(BaseModel):
    """`seal` is a digest of all other fields."""

    format: int = AGENT_FORMAT
    toolwise: str = __version__
    name: str = ""
    step: int = 0
    settings: dict[str, JsonValue] = {}
    """Sections of a configuration: sampling, limits, tools, environment and reward. References are relative to the
    folder."""
    files: dict[str, FileEntry] = {}
    seal: str = ""

    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"seal"}).encode()).hexdigest()


def write_manifest(folder: Path, name: str, step: int, settings: dict[str, Any]) -> None:
    """Write agent.json; call it last."""
    manifest = AgentManifest(name=name, step=step, settings=settings)
    manifest.files = {path: FileEntry.of(folder / path) for path in sorted(_sealed_files(folder))}
    _write(folder, manifest)


def write_unsealed(folder: Path, name: str, step: int, settings: dict[str, Any]) -> None:
    """Write agent.json without the list of files, which `list_agent_files` adds."""
    _write(folder, AgentManifest(name=name, step=step, settings=settings))


def list_agent_files(folder: Path, root: Path, entries: Mapping[str, FileEntry]) -> None:
    """Update the list of files of the agent in `folder`, from entries of all files in `root` by their names there."""
    prefix = folder.relative_to(root).as_posix() + "/" if folder != root else ""
    names = {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}
    manifest = read_manifest(folder)
    manifest.files = {name: entry for name, entry in sorted(names.items()) if _is_sealed(name)}
    _write(folder, manifest)


def verify_agent(folder: Path) -> AgentManifest:
    """Return the manifest; raise if a file is missing, changed, was added, or is a link to elsewhere."""
    _refuse_links(folder)
    manifest = read_manifest(folder)
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: copy or export the agent again")
        if file.stat().st_size != entry.size or file_sha256(file) != entry.sha256:
            raise CheckpointError(f"{file} is not what was exported (sha256): copy or export the agent again")
    for name in _sealed_files(folder):
        if name not in manifest.files:  # loading a model folder may use any file in it
            if manifest.format < AGENT_FORMAT:
                cure = (
                    f"no checksum in an agent of format {manifest.format}: export the agent again, or move it elsewhere"
                )
                raise CheckpointError(f"{folder / name} has {cure}")
            raise CheckpointError(f"{folder / name} was added after the agent was exported: move it elsewhere")
    return manifest


def update_file(folder: Path, name: str, data: bytes) -> None:
    """Replace one file of an agent folder and its checksum."""
    manifest = verify_agent(folder)
    write_atomic(folder / name, data)
    manifest.files[name] = FileEntry.of(folder / name)
    _write(folder, manifest)


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of an agent folder, whose other files are not verified."""
    return read_manifest(folder).settings


@cache
def without_links(folder: Path, seal: str) -> Path:
    """`folder`, or copies of its code, documents and wording if those are links, as in the hub's cache: modules and
    documents are looked up beside a file's real path. The copies last as long as the process; `seal` names their
    version."""
    links = [name for name in _sealed_files(folder) if (folder / name).is_symlink()]
    names = [name for name in links if name.startswith(_LOOKED_UP)]
    if not names:
        return folder
    copies, process = Path(tempfile.mkdtemp(prefix="toolwise-agent-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(copies, ignore_errors=True) if os.getpid() == process else None)
    for name in names:
        (copies / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, copies / name)
    return copies


def read_manifest(folder: Path) -> AgentManifest:
    file = folder / AGENT_FILE
    try:
        manifest = AgentManifest.model_validate_json(file.read_bytes())
    except (ValidationError, OSError):
        raise CheckpointError(f"{file} cannot be read: copy or export the agent again") from None
    if manifest.format not in _READABLE_FORMATS:
        raise CheckpointError(f"{file} has format {manifest.format}, this version of toolwise reads {AGENT_FORMAT}")
    if manifest.seal != manifest.digest():
        raise CheckpointError(f"{file} was changed after it was written: copy or export the agent again")
    return manifest


def _write(folder: Path, manifest: AgentManifest) -> None:
    manifest.seal = manifest.digest()
    write_atomic(folder / AGENT_FILE, (manifest.model_dump_json(indent=1) + "\n").encode())


def _refuse_links(folder: Path) -> None:
    """Raise for a link that leads out of the folder. In the hub's cache, the files of a folder are links to blobs."""
    inside = [folder.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parent.parent / "blobs")
    for path in folder.rglob("*"):
        if path.is_symlink():
            target = Path(os.path.realpath(path))  # of a loop too
            if not any(target.is_relative_to(place) for place in inside):
                raise CheckpointError(f"{path} is a link that leads out of the folder: remove it, or copy the file")


def _sealed_files(folder: Path) -> Iterator[str]:
    """Names of the files that have a checksum in a manifest."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and _is_sealed(name):
            yield name


def _is_sealed(name: str) -> bool:
    """Not the manifest itself, nor what a publisher writes (the model card and the licence), nor what other programs
    leave behind."""
    top, slash, _ = name.partition("/")
    if not slash and (name in (AGENT_FILE, "README.md") or name.upper().startswith(_LICENCES)):
        return False
    return top not in _OF_DOWNLOADS and not name.rpartition("/")[2].startswith(_LEFT_BEHIND)
