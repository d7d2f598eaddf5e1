"""A supervised fine-tuning run from its inputs to its result: what `toolwise sft`, `toolwise.sft` and `resume` do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from toolwise.config.sft import SftConfig, build_sft_config, load_sft_config
from toolwise.data.files import row_error
from toolwise.errors import ConfigError
from toolwise.messages import Message
from toolwise.protocols import Callback
from toolwise.serialization.json_text import json_line
from toolwise.training.run_folder import RunResult
from toolwise.training.sft import SftTraining
from toolwise.training.sft_data import Rows
from toolwise.training.sft_folder import check_output, finished_sft
from toolwise.training.sft_run import assemble_sft, check_sft
from toolwise.training.startup import show_startup
from toolwise.training.trackers.observers import CallbackSpec, Observers, TrackerSpec, load_observers

log = logging.getLogger("toolwise")

SPLITS = {"data": "train", "val": "val"}
"""Arguments that may be rows, and the setting that names them when they are stored in the run's folder."""


def read_sft_config(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    val: str | Path | None = None,
    overrides: Sequence[str] = (),
    settings: Mapping[str, Any],
) -> SftConfig:
    """The configuration in a file or mapping, changed by the other arguments."""
    changes: dict[str, Any] = {"model": {"path": str(model)}} if model is not None else {}
    files = {name: path for name, path in (("train", data), ("val", val)) if path is not None}
    changes |= {"data": files} if files else {}
    changes |= settings
    if isinstance(config, str | Path):
        return load_sft_config(config, overrides, changes)
    return build_sft_config(config or {}, changes, overrides, source="sft")


def run_sft(
    config: SftConfig,
    out: Path,
    *,
    rows: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
    resume: bool = False,
    trackers: Sequence[TrackerSpec] | TrackerSpec | None = None,
    callbacks: Sequence[CallbackSpec] | CallbackSpec | None = None,
    own_callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train, or resume; `rows` are conversations given in Python ("data", "val"), which the folder stores.

    `trackers` and `callbacks` given as objects are not recorded: give them again to resume with them.
    """
    given = {name: _list_rows(name, value) for name, value in (rows or {}).items()}
    if "val" in given and config.validates:
        raise ConfigError("val: the configuration has data.val or data.val_fraction too; keep one")
    check_sft(config, has_val=config.validates or "val" in given)
    recorded = _record_rows(config, out, given)
    check_output(out, recorded, resume=resume)
    files = {f"data/{SPLITS[name]}.jsonl": b"".join(map(_row_line, value)) for name, value in given.items()}
    for name, content in files.items() if resume else ():
        if (out / name).exists() and (out / name).read_bytes() != content:
            raise ConfigError(
                f"cannot resume {out}: the data differs from {out / name}; use a new out, or continue with what the "
                "folder has: toolwise.resume(folder)"
            )
    sources = load_observers(config.trainer, trackers, callbacks)
    observers = Observers(limit_s=config.trainer.observer_timeout_s)
    with ExitStack() as undo:  # if the run cannot start
        undo.callback(observers.close)
        with show_startup(enabled=config.trainer.console):
            run = assemble_sft(config, given.get("data"), given.get("val"))
        if resume and (finished := finished_sft(out, run.config.steps)) is not None:
            log.info("%s", finished.note)
            return finished
        observers.create(sources)
        training = SftTraining(
            run, recorded, out, resume=resume, files=files, callbacks=own_callbacks, observers=observers
        )
        undo.pop_all()
    return training.run_training()


def _list_rows(name: str, rows: Iterable[Any]) -> Rows:
    """As a list, since rows are read more than once and may come from a generator."""
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise ConfigError(f"{name}: expected a file or a list of rows, got a {type(rows).__name__}")
    found = list(rows)
    for number, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise row_error(Path(name), number, "messages", f"the row is a {type(row).__name__}, not a dict of columns")
    return found


def _record_rows(config: SftConfig, out: Path, rows: Mapping[str, Rows]) -> SftConfig:
    """The configuration for config.toml: rows given in Python are named as the files that will hold them."""
    update = {SPLITS[name]: out / "data" / f"{SPLITS[name]}.jsonl" for name in rows}
    return config.model_copy(update={"data": config.data.model_copy(update=update)}) if update else config


def _row_line(row: Mapping[str, Any]) -> bytes:
    """A row as a line of JSON; its messages may be `Message` objects."""
    return json_line({name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return value.model_dump(mode="json", exclude_none=True)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
