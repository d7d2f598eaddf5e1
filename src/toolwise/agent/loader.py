"""Finds the run and the checkpoint that a path refers to, and loads a trained router from them or from an export."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.agent.inference import TrainedRouter, calibration_of
from toolwise.config.loader import apply_overrides, build_config
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, load_config
from toolwise.data.files import read_rows
from toolwise.errors import CheckpointError, ConfigError, DataError
from toolwise.routing.calibration import read_budget_calibration
from toolwise.routing.cost import build_cost
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.inference_router import Conditioning
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import build_tools, check_recorded_tools
from toolwise.training import checkpoint
from toolwise.training.checkpoint import Checkpoint
from toolwise.training.rollout_setup import local_policy
from toolwise.training.route_policies import build_conditioning

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

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
    from toolwise.routing.head.predictor import HeadPredictor

    head, metadata = load_head(model)
    policy = local_policy(config, str(model))
    multipliers = metadata.get("multipliers") or {}
    return TrainedRouter(
        config=config,
        policy=policy,
        predictor=HeadPredictor(policy.model, head),
        conditioning=_conditioning(config, built if config.multi_turn.enable else {}, policy, head.settings.routes),
        cost=build_cost(config.router, built),
        multipliers=tuple(float(multipliers.get(unit, 0.0)) for unit in head.settings.units),
        calibration=calibration_of(metadata),
        trained=read_budget_calibration(metadata, {budget.unit: budget.limit for budget in config.router.budgets}),
    )


def _conditioning(
    config: RunConfig, tools: Mapping[str, BaseTool], policy: LocalPolicy, names: tuple[str, ...]
) -> Conditioning:
    conditioning = build_conditioning(config, tools, policy, names=names)
    if tuple(map(str, conditioning.routes.names)) != names:
        raise CheckpointError(
            f"the router was trained with the routes {', '.join(names)}, but [router] has "
            f"{', '.join(conditioning.routes.names)}: leave router.routes as it was"
        )
    return conditioning


def find_router(source: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """The configuration and the folder with the model and its head."""
    # The router.json of a checkpoint is the router's training state, that of its model folder describes the head.
    if (source / ROUTER_METADATA_FILE).is_file() and not (source / checkpoint.MANIFEST).is_file():
        if not (source.parent / checkpoint.MANIFEST).is_file():
            return _exported_config(source, overrides), source
        source = source.parent  # from the model's folder to its checkpoint
    problem = f"is not a run, a checkpoint or an exported model with a router ({ROUTER_METADATA_FILE}): give one"
    return load_config(find_run(source, problem) / "config.toml", overrides), find_checkpoint(source).path / "model"


def find_run(source: Path, problem: str) -> Path:
    """The folder of the run; raises "SOURCE `problem`" if there is none."""
    run = source.resolve().parent.parent if _is_checkpoint(source) else source
    if not (run / "config.toml").is_file():
        raise CheckpointError(f"{run} {problem}")
    return run


def find_checkpoint(
    source: Path, *, best: str = "", command: str = "give", hint: str = "wait for the first one"
) -> Checkpoint:
    """The checkpoint itself; for a run its latest, or the best by the validation metric `best` ("-cost": the lowest).

    `command` and `hint` say in an error what to do with a single checkpoint, or without any.
    """
    if _is_checkpoint(source):
        if best:
            raise ConfigError(
                f"{source} is a single checkpoint: give its run, {source.resolve().parent.parent}, to choose one of "
                "its checkpoints with --best"
            )
        return checkpoint.load(source)
    folder, damaged = source / "checkpoints", list[str]()
    chosen = (
        checkpoint.best(folder, best, warnings_out=damaged) if best else checkpoint.latest(folder, warnings_out=damaged)
    )
    if damaged:  # do not silently use an older one
        raise CheckpointError(f"{damaged[0].removeprefix('passed over: ')}: {command} RUN/checkpoints/step-…")
    if chosen is None and best:
        latest = checkpoint.latest(folder, warnings_out=[])
        names = ", ".join(sorted(latest.figures)) if latest is not None else ""
        available = f"available: {names}" if names else "leave --best out to export the latest"
        raise CheckpointError(f"no checkpoint in {folder} was validated for {best.removeprefix('-')!r}: {available}")
    if chosen is None:
        raise CheckpointError(f"{source} has no complete checkpoint yet: {hint}")
    return chosen


def _is_checkpoint(source: Path) -> bool:
    return (source / checkpoint.MANIFEST).is_file()


def _exported_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    try:
        metadata = json.loads((folder / ROUTER_METADATA_FILE).read_text(encoding="utf-8"))
        # A model folder must not choose which code runs: no router or parser of its own. Older exports have no more.
        router = metadata.get("router") or {}
        chosen_by_user = ("name", "kwargs", "policies")
        settings = {"router": {name: value for name, value in router.items() if name not in chosen_by_user}}
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
    _require_policies(folder, settings["router"])
    if ":" in str(parser) and settings["rollout"]["tool_parser"] == parser:
        raise ConfigError(
            f"{folder} was trained with the tool parser {parser}, which its folder must not choose: give the parser "
            "with --set rollout.tool_parser=FILE.py:NAME"
        )
    return build_config(RunConfig, settings, source=str(folder / ROUTER_METADATA_FILE))


def _require_policies(folder: Path, router: Mapping[str, Any]) -> None:
    """Raises if a route is answered by another model, which the user has not named."""
    routes = router.get("routes")
    for route in routes if isinstance(routes, list) else ():
        name = route.get("policy") if isinstance(route, Mapping) else None
        if name and name not in (router.get("policies") or {}):
            raise ConfigError(
                f"{folder}: the route {route.get('name')!r} is answered by another model, which its folder must not "
                f"choose: give --set router.policies.{name}.base_url=URL and --set router.policies.{name}.model=NAME, "
                f"or --set router.policies.{name}.path=FOLDER"
            )


def _with_documents(entries: Sequence[Any], documents: Sequence[Any]) -> list[Any]:
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
