"""Loads a trained router from a run, a checkpoint or an exported model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.agent.calibration import calibration_of
from toolwise.agent.inference import TrainedRouter
from toolwise.agent.source import find_checkpoint, find_run
from toolwise.config.loader import apply_overrides, build_config
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, load_config
from toolwise.data.files import read_rows
from toolwise.errors import CheckpointError, ConfigError, DataError
from toolwise.routing.cost import build_cost
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.options import Conditioning
from toolwise.tools.catalog import build_tools
from toolwise.tools.tool_record import check_recorded_tools
from toolwise.training import checkpoint
from toolwise.training.rollout_setup import local_policy

MISSING_TOOLS_HINT = (
    "give each with --tools NAME or FILE.py:NAME (eval: --set 'tools=[\"NAME\"]'; Python: tools=[…]), or --tools none "
    "(tools=[]) to answer without tools on purpose"
)


def load_router(
    source: str | Path,
    *,
    config: RunConfig | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    overrides: Sequence[str] = (),
) -> TrainedRouter:
    """Loads the router of a run (its latest checkpoint), a checkpoint or an exported folder.

    `tools` replace the run's tools, `documents` are what its search tool searches. An exported folder has neither, only
    the names of the tools it was trained with, and cannot be loaded without them unless `tools` is explicitly empty.
    `config` replaces the stored configuration.
    """
    stored, model = find_router(Path(source), overrides)
    config = stored if config is None else config
    entries = list(tools) if tools is not None else list(config.tools)
    built = build_tools(_with_documents(entries, documents) if documents is not None else entries)
    if config.multi_turn.enable and (tools is None or entries):
        check_recorded_tools(model, built, MISSING_TOOLS_HINT)
    from toolwise.routing.head.head import load_head

    head, metadata = load_head(model)
    policy = local_policy(config, str(model))
    multipliers = metadata.get("multipliers") or {}
    return TrainedRouter(
        config=config,
        policy=policy,
        head=head.to(policy.model.device),
        tools=built if config.multi_turn.enable else {},
        conditioning=Conditioning(config.router),
        cost=build_cost(config.router, built),
        multipliers=tuple(float(multipliers.get(unit, 0.0)) for unit in head.settings.units),
        calibration=calibration_of(metadata),
    )


def find_router(source: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """The configuration and the folder with the model and its head."""
    # The router.json of a checkpoint is the router's training state, that of its model folder describes the head.
    if (source / ROUTER_METADATA_FILE).is_file() and not (source / checkpoint.MANIFEST).is_file():
        if not (source.parent / checkpoint.MANIFEST).is_file():
            return _exported_config(source, overrides), source
        source = source.parent  # from the model's folder to its checkpoint
    problem = f"is not a run, a checkpoint or an exported model with a router ({ROUTER_METADATA_FILE}): give one"
    config = load_config(find_run(source, problem) / "config.toml", overrides)
    return config, find_checkpoint(source).path / "model"


def _exported_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    try:
        metadata = json.loads((folder / ROUTER_METADATA_FILE).read_text(encoding="utf-8"))
        # A model folder must not choose which code runs: no router or parser of its own. Older exports have no more.
        router = metadata.get("router") or {}
        settings = {"router": {name: value for name, value in router.items() if name not in ("name", "kwargs")}}
        # Only known inference fields: a model folder must not choose, for example, which program is started.
        settings |= {
            section: {name: value for name, value in (metadata.get(section) or {}).items() if name in known}
            for section, known in INFERENCE_FIELDS.items()
        }
    except (OSError, ValueError, AttributeError) as fault:
        raise CheckpointError(
            f"{folder / ROUTER_METADATA_FILE} cannot be read ({fault}): export the model again"
        ) from None
    parser = settings.get("rollout", {}).get("tool_parser", "")
    settings = apply_overrides(settings, overrides)
    if ":" in str(parser) and settings["rollout"]["tool_parser"] == parser:
        raise ConfigError(
            f"{folder} was trained with the tool parser {parser}, which its folder must not choose: give the parser "
            "with --set rollout.tool_parser=FILE.py:NAME"
        )
    return build_config(RunConfig, settings, source=str(folder / ROUTER_METADATA_FILE))


def _with_documents(entries: Sequence[Any], documents: Sequence[Any]) -> list[Any]:
    """The same tools, with a search tool over `documents`."""
    if not any(_tool_name(entry) == "search" for entry in entries):
        raise ConfigError("documents need the search tool, which is not among the tools: add --tools search")
    return [
        {**(entry if isinstance(entry, Mapping) else {"name": entry}), "documents": list(documents)}
        if _tool_name(entry) == "search"
        else entry
        for entry in entries
    ]


def _tool_name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else entry


def read_documents(path: str | Path) -> list[Any]:
    """Documents to search: the lines of a text file, or rows with `text` (and optionally `title`)."""
    path = Path(path)
    if path.suffix.lower() in (".txt", ".md"):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"{path}: cannot be read ({fault}); give a text file, .jsonl, .json or .parquet") from fault
        documents: list[Any] = [line.strip() for line in lines if line.strip()]
    else:
        documents = [{key: row[key] for key in ("title", "text") if key in row} for row in read_rows(path)]
        if any("text" not in row for row in documents):
            raise DataError(f"{path}: a row has no `text`; write objects with `text` and optionally `title`")
    if not documents:
        raise DataError(f"{path}: contains no documents; write one per line")
    return documents
