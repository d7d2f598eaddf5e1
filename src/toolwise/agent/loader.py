"""From a run, a checkpoint or an exported model to a router at work."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolwise.agent.calibration import ROUTER_METADATA_FILE, calibration_of
from toolwise.agent.inference import TrainedRouter
from toolwise.config.loader import apply_overrides, build_config
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, load_config
from toolwise.data.files import read_rows
from toolwise.errors import CheckpointError, ConfigError, DataError
from toolwise.tools.catalog import build_tools
from toolwise.tools.tool_record import check_recorded_tools
from toolwise.training import checkpoint
from toolwise.training.run import local_policy

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
    """The router of a run's latest checkpoint, of a checkpoint, or of an exported folder.

    `tools` take the place of the run's own, `documents` are what its search tool searches; an exported folder has
    neither, and only knows which tools it was trained with. It refuses to do without them unless `tools` is empty, on
    purpose. `config` takes the place of the one found beside the checkpoint.
    """
    found, model = find_router(Path(source), overrides)
    config = found if config is None else config
    entries = list(tools) if tools is not None else list(config.tools)
    built = build_tools(_with_documents(entries, documents) if documents is not None else entries)
    if config.multi_turn.enable and (tools is None or entries):
        check_recorded_tools(model, built, MISSING_TOOLS_HINT)
    from toolwise.routing.head.builder import conditioning_from_config, cost_from_config
    from toolwise.routing.head.head import load_head

    head, metadata = load_head(model)
    policy = local_policy(config, str(model))
    multipliers = metadata.get("multipliers") or {}
    return TrainedRouter(
        config=config,
        policy=policy,
        head=head.to(policy.model.device),
        tools=built if config.multi_turn.enable else {},
        conditioning=conditioning_from_config(config),
        cost=cost_from_config(config, built),
        multipliers=tuple(float(multipliers.get(unit, 0.0)) for unit in head.settings.units),
        calibration=calibration_of(metadata),
    )


def find_router(source: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """The configuration, and the folder with the model and its head."""
    named = (source / checkpoint.MANIFEST).is_file()  # a checkpoint, whose own router.json is the router's state
    if (source / ROUTER_METADATA_FILE).is_file() and not named:
        if not (source.parent / checkpoint.MANIFEST).is_file():
            return _exported_config(source, overrides), source
        source, named = source.parent, True  # from the model's folder within a checkpoint
    run = source.resolve().parent.parent if named else source
    if not (run / "config.toml").is_file():
        raise CheckpointError(
            f"{source} is no run, no checkpoint of one, and no exported model with a router "
            f"({ROUTER_METADATA_FILE}): name one"
        )
    config = load_config(run / "config.toml", overrides)
    damaged: list[str] = []
    found = checkpoint.load(source) if named else checkpoint.latest(run / "checkpoints", warnings_out=damaged)
    if damaged:  # an older one would pass for the one that was asked for
        raise CheckpointError(f"{damaged[0].removeprefix('passed over: ')}: name RUN/checkpoints/step-…")
    if found is None:
        raise CheckpointError(f"{source} has no whole checkpoint yet: wait for its first one")
    return config, found.path / "model"


def _exported_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    try:
        metadata = json.loads((folder / ROUTER_METADATA_FILE).read_text(encoding="utf-8"))
        settings = {"router": metadata.get("router") or {}}  # all that older exports have
        # Nothing else of these sections: a model's folder must not say, for instance, which program is started.
        settings |= {
            section: {name: value for name, value in (metadata.get(section) or {}).items() if name in known}
            for section, known in INFERENCE_FIELDS.items()
        }
    except (OSError, ValueError, AttributeError) as fault:
        raise CheckpointError(
            f"{folder / ROUTER_METADATA_FILE} cannot be read ({fault}): export the model again"
        ) from None
    return build_config(RunConfig, apply_overrides(settings, overrides), source=str(folder / ROUTER_METADATA_FILE))


def _with_documents(entries: Sequence[Any], documents: Sequence[Any]) -> list[Any]:
    """The same tools, with a search that searches `documents`."""
    if not any(_tool_name(entry) == "search" for entry in entries):
        raise ConfigError("documents are for the tool search, which is not among the tools: add --tools search")
    return [
        {**(entry if isinstance(entry, Mapping) else {"name": entry}), "documents": list(documents)}
        if _tool_name(entry) == "search"
        else entry
        for entry in entries
    ]


def _tool_name(entry: Any) -> Any:
    return entry.get("name") if isinstance(entry, Mapping) else entry


def read_documents(path: str | Path) -> list[Any]:
    """What to search: the lines of a text, or rows that are strings or have `text` (and `title`)."""
    path = Path(path)
    if path.suffix.lower() in (".txt", ".md"):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise DataError(f"{path}: cannot be read ({fault}); give a text, or .jsonl, .json or .parquet") from fault
        found: list[Any] = [line.strip() for line in lines if line.strip()]
    else:
        found = [{key: row[key] for key in ("title", "text") if key in row} for row in read_rows(path)]
        if any("text" not in row for row in found):
            raise DataError(f"{path}: a row has no `text`; write objects with text, and title where there is one")
    if not found:
        raise DataError(f"{path}: holds no documents; write one a line")
    return found
