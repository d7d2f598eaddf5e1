"""Loads the parts of an agent: its model, tools and router."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.agent.documents import with_documents
from toolwise.agent.inference import TrainedRouter, calibration_of
from toolwise.agent.sources import find_agent, find_router, has_router, is_agent_folder, local_source
from toolwise.agent.turn_inference import TrainedTurnRouter
from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError
from toolwise.models import locate
from toolwise.routing.budget_bins import BINS_KEY, BudgetBins
from toolwise.routing.calibration import read_budget_calibration
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import build_cost
from toolwise.routing.turn_calibration import read_turn_calibration
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import build_tools, check_recorded_tools
from toolwise.training.agent_bundle import OWN_AGENT
from toolwise.training.checkpoint.agent_manifest import read_settings
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
    """Loads an agent folder, a run (its latest checkpoint), a checkpoint or a plain model, or what a hub has by name.

    `tools` replace its own tools, `documents` are what its search tool searches. A folder whose tools are not part of
    it cannot be loaded without them unless `tools` is explicitly empty. `config` replaces the stored configuration.
    `trust_code` allows an agent folder to bring code.
    """
    source = local_source(source, overrides)
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
    source = local_source(source, options.get("overrides", ()))
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
