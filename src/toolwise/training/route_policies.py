"""The policies of a user's routes: other models, on a server or in this process, and the trained one with another limit
on its replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from toolwise.config.rollout import GrammarConfig
from toolwise.config.routes import RoutePolicyConfig
from toolwise.config.schema import RunConfig
from toolwise.errors import ModelError
from toolwise.protocols import AgentPolicy, Sampling
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.routes import Route, RouteSet, build_routes
from toolwise.thinking.levels import load_levels
from toolwise.thinking.step_selection import count_thinking_tokens
from toolwise.tools.base import BaseTool

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy


def build_conditioning(
    config: RunConfig, tools: Mapping[str, BaseTool], policy: LocalPolicy, *, names: tuple[str, ...] = ()
) -> Conditioning:
    """The routes of a configuration, ready to be rolled out. `policy` is the trained one; `names` are the routes that a
    stored head was trained with."""
    routes = with_thinking(config, build_routes(config.router, names[1:] or tools))
    return Conditioning(
        config.router,
        tools,
        routes=routes,
        policies=_policies(config, routes, policy),
        count_thinking=partial(count_thinking_tokens, codec=policy.chat),
    )


def with_thinking(config: RunConfig, routes: RouteSet) -> RouteSet:
    """The routes with what the prompt says about their thinking level."""
    if all(route.options.thinking is None for route in routes):
        return routes
    levels = load_levels(config.algorithm.rlvcr.levels) if config.algorithm.rlvcr.levels else load_levels()

    def noted(route: Route) -> Route:
        options = route.options
        if options.thinking is None:
            return route
        level = levels.by_number(options.thinking)
        text = f"Think at level {level.number} ({level.name}): {level.instruction}."
        note = f"{options.note}\n{text}" if options.note else text
        return replace(route, options=options.model_copy(update={"note": note}))

    return replace(routes, routes=tuple(noted(route) for route in routes))


def _policies(config: RunConfig, routes: RouteSet, policy: LocalPolicy) -> dict[str, AgentPolicy]:
    """route -> the policy that acts on it; without those that the trained policy answers as usual."""
    loaded: dict[str, LocalPolicy] = {}
    policies: dict[str, AgentPolicy] = {}
    for route in routes:
        name = route.options.policy
        options = config.router.policies.get(name)
        limit = route.options.max_new_tokens or (None if options is None else options.max_new_tokens)
        if options is not None and options.base_url:
            policies[route.name] = _server_policy(config, options, limit)
            continue
        local = policy
        if options is not None:
            if name not in loaded:
                loaded[name] = _other_model(config, name, options.path)
            local = loaded[name]
        if options is not None or limit is not None:
            policies[route.name] = local if limit is None else local.limited(limit)
    return policies


def _server_policy(config: RunConfig, options: RoutePolicyConfig, limit: int | None) -> AgentPolicy:
    from toolwise.policies.openai.policy import OpenAIAgentPolicy
    from toolwise.remote.endpoint import read_api_key

    rollout = config.rollout
    return OpenAIAgentPolicy(
        options.base_url,
        options.model,
        api_key=read_api_key(options.api_key_env, "router.policies: api_key_env"),
        sampling=Sampling(
            temperature=rollout.temperature,
            max_new_tokens=limit or rollout.max_new_tokens,
            stop_strings=tuple(rollout.stop),
        ),
        timeout_s=options.timeout_s,
        deadline_s=max(600.0, options.timeout_s),
        max_concurrent=options.max_concurrent,
        # Nothing is learned from its tokens, and not every server can send them.
        logprobs=False,
        return_token_ids=False,
        # The other routes go on without it, and should not wait for it at every step.
        retries_when_down=False,
    )


def _other_model(config: RunConfig, name: str, path: str) -> LocalPolicy:
    """Another model in this process, generating as the run's does."""
    from toolwise.training.rollout_setup import local_policy

    changes = {"engine": "toolwise", "tool_parser": "auto", "grammar": GrammarConfig()}
    rollout = config.rollout.model_copy(update=changes)
    try:
        return local_policy(config.model_copy(update={"rollout": rollout}), path)
    except ModelError as fault:
        raise ModelError(f"router.policies.{name}.path: {str(fault).removeprefix('model.path: ')}") from None
