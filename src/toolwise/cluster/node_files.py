"""What a process on another node needs from this one: the settings of the run, and the files that they name. Processes
share no disk: the files travel as bytes, once for all of them, and each process writes its own copies."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from toolwise.cluster.interface import Payload
from toolwise.cluster.node_report import code_hash
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError

LOCAL_SECTIONS = ("data", "validation", "faults")
"""Settings that no other process reads."""
TRAINER_FIELDS = ("total_steps", "mode", "max_staleness", "several_stale_updates", "keep_cache")
"""Those of `trainer` that other processes read: the schedule's length, how old tokens may be, and the fate of caches.
Its trackers, callbacks and checkpoints are this process' own."""
MAX_OTHER_BYTES = 256 << 20
"""Of all files that are not the model's."""
SENT_FOLDERS = (
    "model.path",
    "model.base",
    "critic.path",
    "router.policies.*.path",
    "tools.search.folder",
    "tools.search.wordnet",
)
"""Settings whose folders travel: models, and the documents of the search tool. Any other folder may hold anything."""
PROGRAMS = ("agent.python", "agent.command.0", "rollout.vllm.command.0", "tools.*.command", "tools.*.command.0")
"""Settings that name a program, which needs more than its file."""
FILE = "file:"

log = logging.getLogger("toolwise.cluster")


def pack_settings(config: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings as a small payload, and the files that they name as another one, to be stored."""
    from toolwise.models import locate
    from toolwise.models.adapters import find_base
    from toolwise.models.folder import is_adapters

    settings = _shared_settings(config)
    settings["trainer"] = {name: settings["trainer"][name] for name in TRAINER_FIELDS}
    if not config.model.path.startswith("builtin:"):  # which every installation has
        settings["model"] |= {"path": locate(config.model.path, config.model.revision), "revision": ""}
    if is_adapters(path := Path(settings["model"]["path"])):
        settings["model"]["base"] = str(find_base(path, config.model.base))
    models = {settings["model"]["path"], settings["model"]["base"], settings["critic"]["path"]}
    files: dict[str, Any] = {}
    sent: set[str] = set()
    other = 0
    for setting, text, path, travels in _named_paths(settings):
        if not travels:
            log.warning("%s: %s is not sent to other nodes: each must have it there", setting, path)
            continue
        sent.add(text)
        for file in _files_of(path, text):
            name = f"{FILE}{file}"
            if name not in files:
                files[name] = file.read_bytes()
                other += 0 if text in models else len(files[name])
                if other > MAX_OTHER_BYTES:
                    raise ConfigError(
                        f"{text}: the files of the settings, without the model's, take more than "
                        f"{MAX_OTHER_BYTES >> 20} MB, which is too much to send to every worker: put it on each node "
                        "and name it in an environment variable that your code reads"
                    )
    texts = {"settings": json.dumps(settings, allow_nan=False), "sent": json.dumps(sorted(sent)), "code": code_hash()}
    return {name: text.encode() for name, text in texts.items()}, files


def unpack_settings(payload: Payload, folder: Path) -> RunConfig:
    """Write the files below `folder`; the settings, with their paths there. Raises if this node has another version of
    this package, which may compute other numbers or read the settings in another way."""
    if payload["code"] != code_hash().encode():
        raise ConfigError(
            f"{socket.gethostname()} has other source code of toolwise than the process of the run: install the same "
            "version on each node; toolwise doctor --cluster lists what differs"
        )
    text, sent = payload["settings"], payload["sent"]
    assert isinstance(text, bytes)
    assert isinstance(sent, bytes)
    for name, data in payload.items():
        if name.startswith(FILE):
            assert isinstance(data, bytes)
            file = _moved(name.removeprefix(FILE), folder)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    return RunConfig.model_validate(_rewritten(json.loads(text), folder, set(json.loads(sent))))


def unsent_paths(config: RunConfig) -> dict[str, str]:
    """What each node must have itself: the paths of programs and other folders, each with the setting that names it."""
    named = _named_paths(_shared_settings(config))
    return {str(path): setting for setting, _, path, travels in named if not travels}


def _shared_settings(config: RunConfig) -> dict[str, Any]:
    settings = config.model_dump(mode="json")
    for section in LOCAL_SECTIONS:
        del settings[section]
    return settings


def _named_paths(settings: dict[str, Any]) -> Iterator[tuple[str, str, Path, bool]]:
    """Each setting that names a file or folder of this node, with its text, the path, and whether this is sent."""
    for setting, text in _strings(settings):
        if (path := _named_path(text)) is not None:
            stays = _matches(setting, PROGRAMS) or (path.is_dir() and not _matches(setting, SENT_FOLDERS))
            yield setting, text, path, not stays


def _matches(setting: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(setting, pattern) for pattern in patterns)


def _moved(path: str, folder: Path) -> Path:
    """The place below `folder` for an absolute path; raises if it would be elsewhere."""
    moved = Path(os.path.normpath(folder / path.lstrip("/")))
    if not moved.is_relative_to(folder):
        raise ConfigError(f"{path} is outside of the folder for files")
    return moved


def _rewritten(value: Any, folder: Path, sent: set[str]) -> Any:
    """The settings with what was sent at its place below `folder`."""
    if isinstance(value, dict):
        return {key: _rewritten(item, folder, sent) for key, item in value.items()}
    if isinstance(value, list):
        return [_rewritten(item, folder, sent) for item in value]
    if isinstance(value, str) and value in sent:
        file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
        moved = _moved(file, folder)
        return f"{moved}{colon}{name}" if moved.exists() else value
    return value


def _strings(value: Any, setting: str = "") -> Iterator[tuple[str, str]]:
    """All texts, each after its setting, such as env.kwargs.root; in a list tables go by their names."""
    if isinstance(value, str):
        yield setting, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(item, f"{setting}.{key}" if setting else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name", index) if isinstance(item, dict) else index
            yield from _strings(item, f"{setting}.{name}")


def _named_path(text: str) -> Path | None:
    """The file or folder that a setting names; None if it is none, or one that every node has."""
    path = Path(text.rpartition(":")[0] if ".py:" in text else text)
    if not path.is_absolute() or len(path.parts) < 3 or not path.exists():
        return None
    return path


def _files_of(path: Path, text: str) -> Iterator[Path]:
    """A folder's files, without hidden ones; of a Python file, also the modules beside it, which it may import."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
                yield file
    elif path.suffix == ".py" and ".py:" in text:
        yield from sorted(file for file in path.parent.glob("*.py") if file.is_file())
        for package in sorted(path.parent.glob("*/__init__.py")):
            yield from sorted(package.parent.rglob("*.py"))
    else:
        yield path
