"""`RolloutSetup`: what rolling out and scoring needs, and nothing that only training needs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from toolwise.concurrency.limits import Gate, Limits
from toolwise.concurrency.threads import configure_threads, set_thread_count
from toolwise.config.schema import RunConfig
from toolwise.data.task_set import TaskSet, change_tasks, distinct_tasks
from toolwise.envs.base import BaseEnv
from toolwise.envs.catalog import EnvSpec, build_env_factory
from toolwise.errors import ConfigError
from toolwise.protocols import AgentPolicy, ModelPolicy, ReloadingEngine, Router, Sampling
from toolwise.rollout.adaptive_gate import AdaptiveGate
from toolwise.rollout.agents.agent_request import AgentScheduler, OutsideAgent
from toolwise.rollout.call_format import ParserSpec, find_format
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.routers import DirectRouter, RouterSpec, build_user_router
from toolwise.tools import isolation
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import as_entries, build_tools
from toolwise.training.chat_check import check_tool_prompt
from toolwise.training.diagnosis import check_routable
from toolwise.training.evaluate import RewardSources, Scoring, build_scoring
from toolwise.training.model_check import check_dtype, check_weights
from toolwise.training.startup import announce
from toolwise.training.tasks import attach_labels, check_held_out_tools, check_task_tools
from toolwise.types import RouteDecision, Task
from toolwise.types.findings import Finding

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy
    from toolwise.rollout.chat_tokenizer import ChatTokenizer
    from toolwise.routing.head.head import RouterHead

log = logging.getLogger("toolwise")


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """The parts that roll out and score tasks."""

    config: RunConfig
    validation_tasks: Sequence[Task]
    router: Router
    head: RouterHead | None
    """The head of the router; None without a router."""
    scheduler: RolloutScheduler
    policy: ModelPolicy
    scoring: Scoring
    agent: OutsideAgent | None
    """The agent that rolls out instead of our own loop."""

    @property
    def chat(self) -> ChatTokenizer:
        return cast("ChatTokenizer", self.policy.chat)

    def close(self) -> None:
        """Stop the worker processes of rewards, tools and agents, and the generation server if we started one."""
        if self.agent is not None:
            self.agent.close()
        self.policy.close()
        self.scoring.close()
        isolation.close()


def setup_evaluation(
    config: RunConfig,
    tasks: Sequence[Task],
    *,
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: RewardSources | None = None,
    env: EnvSpec | None = None,
    router: RouterSpec | None = None,
    parser: ParserSpec | None = None,
    agent: OutsideAgent | None = None,
) -> RolloutSetup:
    """Build what evaluating `tasks` needs; Python arguments override what the configuration names."""
    with tools_and_scoring(config, tools, reward, agent) as (tool_objects, scoring):
        tasks = attach_labels(config, tasks)
        tasks = check_tasks(config, tasks, tool_objects)
        check_routable(config, tool_objects, tasks, learns=False)
        scoring.check(list(distinct_tasks(tasks)))
        check_held_out_tools(tool_objects, config.multi_turn.held_out_tools)
        return setup_rollouts(config, tasks, tool_objects, scoring, env=env, router=router, parser=parser, agent=agent)


@contextmanager
def tools_and_scoring(
    config: RunConfig,
    tools: Sequence[Any] | Callable[..., Any] | None,
    reward: RewardSources | None,
    agent: OutsideAgent | None = None,
) -> Iterator[tuple[dict[str, BaseTool], Scoring]]:
    """Start the tools, the rewards and an outside agent; if the block raises, stop their worker processes."""
    check_agent(config)
    announce("starting the tools")
    tool_objects = build_tools([*config.tools, *as_entries(tools)])
    if config.agent.enabled and reward is None and not config.reward.function and not config.reward.parts:
        reward = "agent"
    announce("starting the reward sandbox")
    scoring = build_scoring(config.reward, reward)
    try:
        if agent is not None:
            announce("loading the agent")
            agent.pool.check()
        yield tool_objects, scoring
    except BaseException:
        scoring.close()
        if agent is not None:
            agent.close()
        raise


def check_agent(config: RunConfig) -> None:
    """Raise for settings that mean nothing where an outside agent rolls out."""
    if not config.agent.enabled:
        return
    unused = {
        "tools": bool(config.tools),
        "env.name": config.env.name != "tools",
        "env.interaction": bool(config.env.interaction),
        "router.enable": config.router.enable,
        "router.name": bool(config.router.name),
        "algorithm.rlvcr.enable": config.algorithm.rlvcr.enable,
        "deterministic": config.deterministic,
    }
    for name in (name for name, is_set in unused.items() if is_set):
        raise ConfigError(f"{name} does not apply to an agent of your own (agent.run, agent.command): remove it")


def check_tasks(config: RunConfig, tasks: Sequence[Task], tools: dict[str, BaseTool]) -> Sequence[Task]:
    """The tasks, checked against the run's tools. Of tasks in converted files, the values of arguments are checked when
    a task is read, everything else now."""
    if config.agent.enabled:  # the tools are the agent's
        return tasks

    def checked(task: Task) -> Task:
        check_task_tools(task, tools, env=config.env.name)
        return task

    for task in distinct_tasks(tasks):
        checked(task)
    return change_tasks(tasks, checked, keeps_profiles=True) if isinstance(tasks, TaskSet) else tasks


def setup_rollouts(
    config: RunConfig,
    validation_tasks: Sequence[Task],
    tools: dict[str, BaseTool],
    scoring: Scoring,
    *,
    env: EnvSpec | None = None,
    router: RouterSpec | None = None,
    parser: ParserSpec | None = None,
    agent: OutsideAgent | None = None,
) -> RolloutSetup:
    """Load the model and build the policy, the router and the scheduler."""
    if config.agent.enabled and agent is None:
        raise ConfigError("this command cannot run an agent of your own (agent.run, agent.command)")
    policy = local_policy(config, config.model.path, parser)
    check_weights(policy)
    prompt = policy.chat.tool_prompt
    if config.multi_turn.enable and tools:
        check_tool_prompt(config, policy.chat)
    elif config.env.name != "tools" and (prompt.where == "nowhere" or not prompt.usable):
        log.warning("%s", prompt.describe())
    built_router, head = _build_router(config, policy, tools if config.multi_turn.enable else {}, router)
    return RolloutSetup(
        config=config,
        validation_tasks=validation_tasks,
        router=built_router,
        head=head,
        scheduler=build_scheduler(config, policy, tools, env)
        if agent is None
        else build_agent_scheduler(config, policy, agent, scoring),
        policy=policy,
        scoring=scoring,
        agent=agent,
    )


def _build_router(
    config: RunConfig, policy: LocalPolicy, tools: dict[str, BaseTool], given: RouterSpec | None
) -> tuple[Router, RouterHead | None]:
    """The router given in Python or named in the configuration, or the learned one with its head, or none."""
    source = given if given is not None else config.router.name
    if source and config.router.enable:
        raise ConfigError("router.enable is true: set it to false to use another router than the learned one")
    if source:
        router = build_user_router(
            source,
            config.router.kwargs if source == config.router.name else {},
            provided={"tools": tools, "seed": config.seed, "policy": policy},
            tools=tools if config.env.name == "tools" else None,
            limit_s=config.router.timeout_s,
        )
        return router, None
    if not config.router.enable:
        priced = config.router.prices or config.router.cost != "tools"
        return DirectRouter(config.seed, Conditioning(config.router, tools).price_calls if priced else None), None
    from toolwise.routing.head.builder import build_head, build_inference_router
    from toolwise.training.route_policies import build_conditioning

    conditioning = build_conditioning(config, tools, policy)
    head = build_head(config, policy.model, conditioning.routes)
    return build_inference_router(config, policy, head, conditioning), head


def load_options(config: RunConfig, path: str) -> dict[str, Any]:
    """How to load the model at `path`. A checkpoint has no revision, and contains its chat template."""
    model, own = config.model, path == config.model.path
    return {
        "device": model.device,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "revision": model.revision if own else "",
        "base": model.base,
        "chat_template": model.chat_template if own else None,
        "template_kwargs": model.template_kwargs,
    }


def local_policy(config: RunConfig, path: str, parser: ParserSpec | None = None) -> LocalPolicy:
    """Load the model at `path` in this process, on the configured device and with the configured dtype."""
    parser = config.rollout.tool_parser if parser is None else parser
    if parser != "auto":  # which depends on the model
        parser = find_format(parser)
    from toolwise.models import load_model, locate

    folder = locate(path, config.model.revision if path == config.model.path else "")
    announce("importing PyTorch")
    configure_threads(config)  # only now, so that input errors are reported without importing torch
    from toolwise.engine.grammar import grammar_from_config
    from toolwise.policies.local import LocalPolicy

    grammar = grammar_from_config(config.rollout.grammar)
    announce(f"loading the model {path}")
    model, chat = load_model(path, **load_options(config, path))
    set_thread_count(config, model)
    check_dtype(config, model.device.type)
    rollout = config.rollout
    engine: Any = rollout.engine
    if engine == "vllm":
        from toolwise.policies.vllm.builder import build_vllm

        engine = build_vllm(config, model, folder)
    return LocalPolicy(
        model,
        chat,
        sampling_from_config(config),
        parser=parser,
        max_batch=rollout.max_batch,
        on_change=rollout.on_template_change,
        engine=engine,
        deterministic=config.deterministic,
        cache_mb=rollout.cache_mb,
        grammar=grammar,
        tool_prompt=rollout.tool_prompt,
    )


def try_weights(config: RunConfig) -> Finding:
    """Load the model as a run would; raises what a run would."""
    policy = local_policy(config, config.model.path)
    try:
        check_weights(policy)
        return Finding("weights", "ok", f"loaded on {policy.model.device}; generated by {type(policy.engine).__name__}")
    finally:
        policy.close()


def sampling_from_config(config: RunConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        do_sample=rollout.do_sample,
        stop_strings=tuple(rollout.stop),
    )


def build_scheduler(
    config: RunConfig, policy: AgentPolicy, tools: dict[str, BaseTool], env: EnvSpec | None = None
) -> RolloutScheduler:
    """The configured rollout scheduler, with any policy; `env` replaces `env.name`."""
    rollout, turns = config.rollout, config.multi_turn
    per_tool = {name: tool.max_concurrent or turns.max_concurrent_calls for name, tool in tools.items()}
    limits = Limits(
        model=Gate(rollout.max_concurrent_requests),
        env=Gate(rollout.max_concurrent_envs),
        tools={name: Gate(limit) for name, limit in per_tool.items() if limit is not None},
    )
    return RolloutScheduler(
        policy,
        tools if turns.enable else {},
        max_episode_steps=turns.max_turns if turns.enable else 1,
        max_concurrent=rollout.most_concurrent,
        gate=_adaptive_gate(config, policy) if rollout.max_concurrent == "auto" else None,
        deadline_s=rollout.deadline_s,
        tool_timeout_s=turns.tool_timeout_s,
        max_tokens=rollout.max_episode_tokens,
        max_invalid_in_a_row=turns.max_invalid_in_a_row,
        max_result_chars=turns.max_result_chars,
        limits=limits,
        make_env=_env_factory(config, tools, limits, env),
        lock_step=config.deterministic,
    )


def _adaptive_gate(config: RunConfig, policy: AgentPolicy) -> AdaptiveGate:
    from toolwise.engine import Engine
    from toolwise.policies.local import LocalPolicy

    assert isinstance(policy, LocalPolicy)
    engine = policy.engine

    def cache_tokens() -> int:
        if isinstance(engine, Engine):
            return engine.blocks.count * engine.blocks.size
        return engine.cache_tokens if isinstance(engine, ReloadingEngine) else 0

    if not cache_tokens():
        raise ConfigError(
            'rollout.max_concurrent = "auto" needs an engine that says what its KV cache holds, such as rollout.engine '
            '= "toolwise": give a number'
        )
    return AdaptiveGate(
        slots=config.rollout.max_batch,
        cache_tokens=cache_tokens,
        generating_s=lambda: policy.generating_s,
        busy_s=lambda: engine.busy_s,
        n=config.rollout.n,
    )


def build_agent_scheduler(
    config: RunConfig, policy: LocalPolicy, agent: OutsideAgent, scoring: Scoring
) -> AgentScheduler:
    rollout = config.rollout
    return AgentScheduler(
        policy,
        {},
        max_concurrent=min(rollout.most_concurrent, config.agent.max_concurrent),
        deadline_s=rollout.deadline_s,
        max_tokens=rollout.max_episode_tokens,
        limits=Limits(model=Gate(rollout.max_concurrent_requests)),
        agent=agent,
        session_policy=policy,
        max_calls=config.agent.max_calls,
        uses_reward=any(part.reward.reference == "agent" for part in scoring.rewards.parts),
    )


def _env_factory(
    config: RunConfig, tools: dict[str, BaseTool], limits: Limits, source: EnvSpec | None
) -> Callable[[RouteDecision], BaseEnv] | None:
    """None if the environment consists of the tools alone, which the scheduler builds itself."""
    env, turns = config.env, config.multi_turn
    source = env.name if source is None else source
    if source == "tools" and not env.interaction:
        return None
    make = build_env_factory(
        source,
        env.kwargs,
        tools=tools,
        interaction=env.interaction or None,
        interaction_kwargs=env.interaction_kwargs,
        max_user_turns=env.max_user_turns,
        defaults={
            "tool_timeout_s": turns.tool_timeout_s,
            "max_result_chars": turns.max_result_chars,
            "gates": limits.tools,
        },
    )

    def make_env(decision: RouteDecision) -> BaseEnv:
        task = decision.task
        return make(task if decision.tools is None else task.model_copy(update={"tools": list(decision.tools)}))

    return make_env
