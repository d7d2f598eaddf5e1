"""What makes the checkpoints of a run agent folders: settings, code and documents. Code and documents are copied once,
to `agent/` in the run's folder. From there code is copied into each checkpoint, and documents are linked: there may be
many thousands."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.serialization.files import link_or_copy
from toolwise.training.agent_bundle import DOCUMENTS, record_settings, write_bundle
from toolwise.training.checkpoint.agent_manifest import write_unsealed
from toolwise.training.checkpoint.file_entry import FileEntry

log = logging.getLogger("toolwise.training.checkpoint")

FOLDER = "agent"


class AgentFiles:
    """Collected once per process, when it first saves: code and settings may have changed since the run began."""

    def __init__(self, config: RunConfig, out: Path) -> None:
        self.config, self.folder = config, out / FOLDER
        self._settings: dict[str, Any] | None = None
        self._files: dict[str, FileEntry] = {}

    def write(self, model: Path, step: int) -> None:
        """Make the folder of a checkpoint's model an agent folder; the list of its files is added when it is sealed."""
        if self._settings is None:
            self._settings = self._collect()
        for name in self._files:
            (model / name).parent.mkdir(parents=True, exist_ok=True)
            put = link_or_copy if _is_shared(name) else shutil.copyfile
            put(str(self.folder / name), str(model / name))
        record_settings(model, self.config)
        write_unsealed(model, self.config.name, step, self._settings)

    def entries(self, prefix: str) -> Mapping[str, FileEntry]:
        """Name in a checkpoint -> entry, of the files that it shares with others."""
        return {f"{prefix}/{name}": entry for name, entry in self._files.items() if _is_shared(name)}

    def _collect(self) -> dict[str, Any]:
        """Copies the files to a new folder first: earlier checkpoints keep theirs."""
        new = self.folder.with_name(f".{FOLDER}.new")
        for folder in (new, self.folder):
            shutil.rmtree(folder, ignore_errors=True)
        new.mkdir(parents=True)
        settings = write_bundle(self.config, new, notify=log.info)
        files = [path for path in sorted(new.rglob("*")) if path.is_file()]
        self._files = {path.relative_to(new).as_posix(): FileEntry.of(path) for path in files}
        if files:
            new.rename(self.folder)
        else:
            new.rmdir()
        return settings


def _is_shared(name: str) -> bool:
    """Code is not: an edit in one checkpoint must not change the others."""
    return name.startswith(f"{DOCUMENTS}/")
