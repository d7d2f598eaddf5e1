"""Builds routers from a configuration: the head on the policy's model, and a router that learns or does not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from toolwise.config.schema import RunConfig, inference_settings
from toolwise.errors import ConfigError
from toolwise.learner.optimizer import Optimizer
from toolwise.protocols import ModelPolicy, PrefixEngine
from toolwise.routing.budget import Budgets
from toolwise.routing.budget_bins import BudgetBins
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import PricesCost, build_cost
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.learner import RouterLearner
from toolwise.routing.head.predictor import HeadPredictor, engine_encoder, feature_width
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.learned_router import LearnedRouter, target_of
from toolwise.routing.routes import DEFAULT_ROUTES, RouteSet
from toolwise.routing.turn_router import LearnedTurnRouter, TurnRouter
from toolwise.types import Task


def build_head(config: RunConfig, model: Any, routes: RouteSet = DEFAULT_ROUTES) -> RouterHead:
    router = config.router
    depth = len(model.get_decoder().layers)
    for layer in router.layers:
        if not -depth <= layer < depth:
            raise ConfigError(
                f"router.layers has layer {layer}, but the model has layers 0 to {depth - 1} (-1: the last)"
            )
    return RouterHead(
        HeadSettings(
            width=feature_width(model, router.layers),
            routes=tuple(str(name) for name in routes.names),
            units=tuple(budget.unit for budget in router.budgets),
            seed=config.seed,
            bins=len(router.random_budgets.values(router.budgets[0].limit)) if router.random_budgets else 0,
            **router.model_dump(include={*HeadSettings.model_fields} - {"routes"}),
        )
    )


def build_inference_router(
    config: RunConfig, policy: ModelPolicy, head: RouterHead, conditioning: Conditioning
) -> InferenceRouter:
    """A router that routes with `head` and does not learn."""
    router = config.router
    build: Any = InferenceRouter
    cost = build_cost(router, conditioning.tools)
    if router.every == "turn":
        if isinstance(cost, PricesCost) and cost.meters:
            raise ConfigError(
                f'router.every is "turn", but router.prices has {cost.meters[0]}, which are counted per episode: '
                'remove it, or set router.every = "prompt"'
            )
        build = partial(TurnRouter, engine=turn_engine(config, policy))
    built: InferenceRouter = build(
        HeadPredictor(
            policy.model,
            head,
            micro_batch_tokens=config.actor.pass_tokens,
            encode=engine_encoder(router, policy.engine),
        ),
        prompt_of=lambda task: conditioning.original_prompt(policy.chat, task),
        budgets=Budgets(router.budgets),
        cost=cost,
        conditioning=conditioning,
        seed=config.seed,
        bins=BudgetBins(router) if router.random_budgets else None,
    )
    return built


def turn_engine(config: RunConfig, policy: ModelPolicy) -> PrefixEngine:
    """The engine that reads conversations for a router of turns; raises if the policy's cannot."""
    engine = policy.engine
    if not isinstance(engine, PrefixEngine):
        raise ConfigError(
            f'router.every is "turn", but {type(engine).__name__} does not read conversations for a router: use '
            'rollout.engine = "toolwise" with a model that it supports, or router.every = "prompt"'
        )
    if config.router.turn_mask == "decode" and getattr(policy, "call_ban", None) is None:
        raise ConfigError(
            'router.turn_mask is "decode", but calls of this model do not begin with one token of their own, or '
            'rollout.grammar is set: use router.turn_mask = "refuse"'
        )
    return engine


def build_learned_router(
    config: RunConfig,
    router: InferenceRouter,
    policy: ModelPolicy,
    head: RouterHead,
    actor_optimizer: Optimizer,
    tasks: Sequence[Task],
    trained: Any = None,
) -> LearnedRouter | LearnedTurnRouter:
    """`router` with a head that learns; `tasks` are the training tasks. `trained` is the learner's model, if it is not
    the policy's."""
    encode = engine_encoder(config.router, policy.engine)
    learner = RouterLearner(policy.model, head, config, actor_optimizer=actor_optimizer, encode=encode, trained=trained)
    check_router(config, tasks, router.routes)
    # A model folder must not choose which servers are asked, or which other models are loaded.
    stored = config.router.model_dump(mode="json", exclude={"labels", "policies"})
    metadata = {"router": stored, **inference_settings(config)}
    parts = {name: value for name, value in vars(router).items() if not name.startswith("_")} | {"model": learner}
    if isinstance(router, TurnRouter):
        return LearnedTurnRouter(**parts, metadata=metadata, stale=learner.stale)
    return LearnedRouter(**parts, tasks=tasks, metadata=metadata, stale=learner.stale)


def check_router(config: RunConfig, tasks: Sequence[Task], routes: RouteSet = DEFAULT_ROUTES) -> None:
    """Raises if settings contradict each other, before any work is done."""
    router, n, count = config.router, config.rollout.n, len(routes)
    if router.sampling_of(count) == "stratified" and n < count:
        raise ConfigError(
            f"router.sampling is stratified over {count} routes but rollout.n is {n}: use {2 * count} or more"
        )
    if not router.train_actor and router.backbone != "frozen":
        raise ConfigError(
            f"router.train_actor is false but router.backbone is {router.backbone}: use frozen, or train the actor"
        )
    if router.mode == "value" and (router.label_coef or router.warm_start_epochs):
        raise ConfigError("router.mode is value, which does not use labels: set label_coef and warm_start_epochs to 0")
    if (router.label_coef or router.warm_start_epochs) and not any(target_of(t, routes) is not None for t in tasks):
        raise ConfigError("router.label_coef or warm_start_epochs is set but no task has a label: set router.labels")
