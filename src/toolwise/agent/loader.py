"""Finds what a path refers to (an agent folder, a run, a checkpoint, a plain model) and loads the agent's parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.agent.bundle import OWN_AGENT, is_inside, known_settings, read_bundle
from toolwise.agent.documents import with_documents
from toolwise.agent.inference import TrainedRouter, calibration_of
from toolwise.agent.manifest import AGENT_FILE, read_settings, verify_agent
from toolwise.agent.turn_inference import TrainedTurnRouter
from toolwise.config.loader import apply_overrides, build_config
from toolwise.config.schema import INFERENCE_FIELDS, RunConfig, load_config
from toolwise.errors import CheckpointError, ConfigError
from toolwise.models import locate
from toolwise.routing.budget_bins import BINS_KEY, BudgetBins
from toolwise.routing.calibration import read_budget_calibration
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import build_cost
from toolwise.routing.head import ROUTER_METADATA_FILE
from toolwise.routing.turn_calibration import read_turn_calibration
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import build_tools, check_recorded_tools
from toolwise.training import checkpoint
from toolwise.training.checkpoint import Checkpoint
from toolwise.training.rollout_setup import local_policy
from toolwise.training.route_policies import build_conditioning

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

log = logging.getLogger("toolwise")

MISSING_TOOLS_HINT = (
    "give each with --tools NAME or FILE.py:NAME (eval: --set 'tools=[\"NAME\"]'; Python: tools=[…]), or --tools none "
    "(tools=[]) to answer without tools on purpose"
)


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What an agent consists of."""

    config: RunConfig
    policy: LocalPolicy
    tools: Mapping[str, BaseTool]
    routing: TrainedRouter | None = None
    """None: every question goes to the model with all its tools."""


def load_parts(
    source: str | Path,
    *,
    config: RunConfig | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    overrides: Sequence[str] = (),
    trust_code: bool = False,
) -> AgentParts:
    """Loads an agent folder, a run (its latest checkpoint), a checkpoint or a plain model.

    `tools` replace its own tools, `documents` are what its search tool searches. A folder whose tools are not part of
    it cannot be loaded without them unless `tools` is explicitly empty. `config` replaces the stored configuration.
    `trust_code` allows an agent folder to bring code.
    """
    stored, model = find_agent(source, overrides, trust_code=trust_code, use_tools=tools is None)
    config = stored if config is None else config
    if stored.agent.enabled or (is_agent_folder(source) and read_settings(Path(source)).get(OWN_AGENT)):
        log.warning("%s was trained inside an agent of its own, whose loop and tools are not part of it", source)
    entries = list(tools) if tools is not None else list(config.tools)
    built = build_tools(with_documents(entries, documents) if documents is not None else entries)
    if config.multi_turn.enable and (tools is None or entries):
        check_recorded_tools(Path(locate(model)), built, MISSING_TOOLS_HINT)
    policy, offered = local_policy(config, model), built if config.multi_turn.enable else {}
    if not has_router(model):
        if config.router.name:
            log.warning("%s is not used: questions go to the model with all its tools", config.router.name)
        return AgentParts(config, policy, offered)
    return AgentParts(config, policy, offered, _build_routing(config, policy, built, Path(model)))


def load_router(source: str | Path, **options: Any) -> TrainedRouter:
    """The router of what `load_parts` loads; raises if it has none."""
    _, model = find_router(Path(source))
    if not has_router(model):
        from toolwise.routing.head.head import load_head

        load_head(model)  # which says what is missing
    routing = load_parts(source, **options).routing
    assert routing is not None
    if isinstance(routing, TrainedTurnRouter):
        raise ConfigError(
            f"{source} has a router that chooses at every turn, which has no routes of whole prompts to compare: use "
            'toolwise eval without --budgets, or a router with router.every = "prompt"'
        )
    return routing


def has_router(model: str | Path) -> bool:
    return (Path(model) / ROUTER_METADATA_FILE).is_file()


def _build_routing(config: RunConfig, policy: LocalPolicy, tools: dict[str, BaseTool], model: Path) -> TrainedRouter:
    from toolwise.routing.head.head import load_head
    from toolwise.routing.head.predictor import HeadPredictor

    head, metadata = load_head(model)
    multipliers = metadata.get("multipliers") or {}
    limits = {budget.unit: budget.limit for budget in config.router.budgets}
    routing = TrainedRouter(
        config=config,
        policy=policy,
        predictor=HeadPredictor(policy.model, head),
        conditioning=_conditioning(config, tools if config.multi_turn.enable else {}, policy, head.settings.routes),
        cost=build_cost(config.router, tools),
        multipliers=tuple(float(multipliers.get(unit, 0.0)) for unit in head.settings.units),
        calibration=calibration_of(metadata),
        trained=read_budget_calibration(metadata, limits),
        bins=_bins(config, metadata, head.settings.bins),
    )
    if config.router.every == "turn":
        from toolwise.routing.head.builder import turn_engine

        shift = read_turn_calibration(metadata, limits)
        return TrainedTurnRouter(**vars(routing), engine=turn_engine(config, policy), shift=shift)
    return routing


def _bins(config: RunConfig, metadata: Mapping[str, Any], count: int) -> BudgetBins | None:
    """The random budgets of a stored head, with their thresholds."""
    if config.router.random_budgets is None:
        return None
    bins = BudgetBins(config.router)
    if len(bins) != count:
        raise CheckpointError(
            f"the router was trained with {count} random budgets, but [router] has {len(bins)}: leave "
            "router.random_budgets and the first budget as they were"
        )
    bins.load_calibrations(metadata.get(BINS_KEY) or ())
    return bins


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


def find_agent(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    trust_code: bool = False,
    use_tools: bool = True,
    use_reward: bool = False,
) -> tuple[RunConfig, str]:
    """The configuration of an agent, and the folder or name of its model."""
    path = Path(source)
    if (path / AGENT_FILE).is_file():
        manifest = verify_agent(path)
        _refuse_adapters(path)
        settings = read_bundle(
            manifest.settings, path, overrides, trust_code=trust_code, use_tools=use_tools, use_reward=use_reward
        )
        if has_router(path):
            settings["router"] = apply_overrides(_stored_router(path, overrides), _of_router(overrides))["router"]
            _require_policies(path, settings["router"])
        return build_config(RunConfig, settings, source=str(path / AGENT_FILE)), str(path)
    if _is_checkpoint(path) or _is_checkpoint(path.parent) or has_router(path) or _is_run(path):
        config, model = find_router(path, overrides)
        return config, str(model)
    if path.is_dir() and not (path / "config.json").is_file():
        _refuse_adapters(path)
        raise CheckpointError(f"{path} is not an agent, a run, a checkpoint or a model folder: give one")
    name = str(source)
    locate(name)
    settings = apply_overrides({"model": {"path": name}}, overrides)
    return build_config(RunConfig, settings, source=name), name


def is_agent_folder(path: str | Path) -> bool:
    return (Path(path) / AGENT_FILE).is_file()


def is_model(path: Path) -> bool:
    """Whether it is an agent folder, a plain model folder or the name of one that ships."""
    is_folder = (path / "config.json").is_file() and not (path / "config.toml").is_file()
    is_folder = is_folder and not _is_checkpoint(path.parent)
    return is_agent_folder(path) or is_folder or str(path).startswith("builtin:")


def _is_run(path: Path) -> bool:
    """An SFT run's folder is a plain model folder in the end, a training run's is not."""
    return (path / "config.toml").is_file() and not (path / "config.json").is_file()


def _refuse_adapters(path: Path) -> None:
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds only LoRA adapters: export the agent without --adapters to use it here")


def find_router(source: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Path]:
    """The configuration and the folder with the model and its head."""
    if is_agent_folder(source) and has_router(source):
        config, model = find_agent(source, overrides, use_tools=False)
        return config, Path(model)
    # The router.json of a checkpoint is the router's training state, that of its model folder describes the head.
    if has_router(source) and not _is_checkpoint(source) and not _is_checkpoint(source.parent):
        return _exported_config(source, overrides), source
    if (source / "config.json").is_file() and _is_checkpoint(source.parent):
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


def _stored_router(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """`router` as router.json has it. A model folder must not choose which code runs, which server is asked, or which
    files outside it are read."""
    chosen_by_user = ("name", "kwargs", "policies", "labels")
    stored = _read_metadata(folder).get("router") or {}
    router = {name: value for name, value in stored.items() if name not in chosen_by_user}
    wording = str(router.get("wording") or "")
    if wording not in ("", "silent") and not any(each.startswith("router.wording=") for each in overrides):
        if not is_inside(wording, folder) or not (folder / wording).is_file():
            raise ConfigError(
                f"{folder}: its router was trained with the wording {Path(wording).name}, which is not in the folder: "
                "give it with --set router.wording=FILE"
            )
        router["wording"] = str(folder / wording)
    return {"router": router}


def _of_router(overrides: Sequence[str]) -> list[str]:
    return [override for override in overrides if override.startswith("router.")]


def _read_metadata(folder: Path) -> dict[str, Any]:
    file = folder / ROUTER_METADATA_FILE
    try:
        metadata: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not all(isinstance(metadata.get(name) or {}, dict) for name in ("router", *INFERENCE_FIELDS)):
            raise ValueError("a section is not a table")
    except (OSError, ValueError, AttributeError, RecursionError) as fault:
        raise CheckpointError(f"{file} cannot be read ({fault}): export the model again") from None
    return metadata


def _exported_config(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """Of an export without agent.json, as earlier versions wrote it."""
    metadata = _read_metadata(folder)
    # Only known inference fields: a model folder must not choose, for example, which program is started.
    settings = _stored_router(folder, overrides) | {
        section: known_settings(metadata.get(section) or {}, known) for section, known in INFERENCE_FIELDS.items()
    }
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
