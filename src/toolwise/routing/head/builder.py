"""Builds routers from a configuration: the head on the policy's model, and a router that learns or does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.config.schema import RunConfig, inference_settings
from toolwise.errors import ConfigError
from toolwise.learner.optimizer import Optimizer
from toolwise.protocols import ModelPolicy
from toolwise.routing.budget import Budgets
from toolwise.routing.budget_bins import BudgetBins
from toolwise.routing.cost import build_cost
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.learner import RouterLearner
from toolwise.routing.head.predictor import HeadPredictor, engine_encoder, feature_width
from toolwise.routing.inference_router import Conditioning, InferenceRouter
from toolwise.routing.learned_router import LearnedRouter, target_of
from toolwise.routing.routes import DEFAULT_ROUTES, RouteSet
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
    return InferenceRouter(
        HeadPredictor(
            policy.model,
            head,
            micro_batch_tokens=config.actor.pass_tokens,
            encode=engine_encoder(router, policy.engine),
        ),
        prompt_of=lambda task: conditioning.original_prompt(policy.chat, task),
        budgets=Budgets(router.budgets),
        cost=build_cost(router, conditioning.tools),
        conditioning=conditioning,
        seed=config.seed,
        bins=BudgetBins(router) if router.random_budgets else None,
    )


def build_learned_router(
    config: RunConfig,
    router: InferenceRouter,
    policy: ModelPolicy,
    head: RouterHead,
    actor_optimizer: Optimizer,
    tasks: Sequence[Task],
) -> LearnedRouter:
    """`router` with a head that learns; `tasks` are the training tasks."""
    encode = engine_encoder(config.router, policy.engine)
    learner = RouterLearner(policy.model, head, config, actor_optimizer=actor_optimizer, encode=encode)
    check_router(config, tasks, router.routes)
    # A model folder must not choose which servers are asked, or which other models are loaded.
    stored = config.router.model_dump(mode="json", exclude={"labels", "policies"})
    metadata = {"router": stored, **inference_settings(config)}
    return LearnedRouter(**{**vars(router), "model": learner}, tasks=tasks, metadata=metadata)


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
