"""Digests of what a run reads beside its settings: the files of its rewards and its validation rows. A resumed run
reports those that have changed."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from toolwise.config.sibling_imports import imported_siblings
from toolwise.rewards.function import Reward
from toolwise.training.changes import Change
from toolwise.training.run import Run
from toolwise.types import Task


def input_digests(run: Run) -> dict[str, str]:
    """By what they are of. Rewards that have no file, such as `env`, are left out."""
    digests = {"contents of data.val": _digest_of_rows(run.validation_tasks)} if run.validation_tasks else {}
    for part in run.scoring.rewards.parts:
        if (file := _file_of(part.reward)) is not None:
            digests[f"source of the reward {part.label.rpartition('/')[2]}"] = _digest_of_files(file)
    return digests


def changed_inputs(before: object, now: Mapping[str, str]) -> list[Change]:
    """Compared with the digests of a checkpoint, which earlier versions did not store. What only one of the two has is
    a change of settings."""
    known = before if isinstance(before, Mapping) else {}
    return [Change(name, known[name], new) for name, new in now.items() if name in known and known[name] != new]


def _file_of(reward: Reward) -> Path | None:
    """The Python file of a reward that is given by its path, or as a function."""
    path = None
    if reward.reference is not None:
        path = reward.reference.rpartition(":")[0] or reward.reference
    elif reward.function is not None:
        with suppress(TypeError, OSError):  # a callable object; no file
            path = inspect.getsourcefile(inspect.unwrap(reward.function))
    return Path(path) if path is not None and path.endswith(".py") and Path(path).is_file() else None


def _digest_of_files(file: Path) -> str:
    """Of a file and of the modules beside it that it imports."""
    digest = hashlib.sha256()
    for path in (file, *sorted(imported_siblings(file))):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(file.parent).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:12]


def _digest_of_rows(tasks: Iterable[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(repr(_stable(task.model_dump())).encode("utf-8", "backslashreplace") + b"\n")
    return digest.hexdigest()[:12]


def _stable(value: object) -> object:
    """A value whose `repr` is the same in every process: sets are ordered, other objects are only named."""
    if isinstance(value, Mapping):
        return sorted((repr(_stable(key)), repr(_stable(item))) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_stable(item)) for item in value)
    return value if isinstance(value, str | bytes | int | float | None) else type(value).__name__
