"""`Run`: the parts of a training run, and how they are built from a configuration and Python objects."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from toolwise.advantages import build_estimator, min_group_size
from toolwise.concurrency.limits import Gate, Limits
from toolwise.concurrency.threads import configure_threads, set_thread_count
from toolwise.config.schema import RunConfig
from toolwise.data import Batches
from toolwise.envs.base import BaseEnv
from toolwise.envs.catalog import build_env_factory
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, AgentPolicy, Sampling
from toolwise.rollout.queue import RolloutQueue
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.direct_router import DirectRouter
from toolwise.thinking.stage import ThinkingStage
from toolwise.tools import isolation
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import as_entries, build_tools
from toolwise.training.checkpoint import RngState, StateRegistry
from toolwise.training.diagnosis import Diagnosis, Finding, check_routable, startup_findings
from toolwise.training.fault_rates import FaultRates
from toolwise.training.scoring import RewardSources, Scoring, build_scoring
from toolwise.training.startup import announce
from toolwise.training.tasks import attach_labels, check_task_tools, load_split, without_held_out_tools
from toolwise.training.thinking import build_rlvcr, build_thinking_stage, check_thinking, with_rlvcr_metrics
from toolwise.types import Rollout, RouteDecision, Task

if TYPE_CHECKING:
    from toolwise.learner.actor import Actor
    from toolwise.policies.local import LocalPolicy
    from toolwise.rollout.chat_tokenizer import ChatTokenizer
    from toolwise.routing.head.head import RouterHead
    from toolwise.routing.learned_router import LearnedRouter

log = logging.getLogger("toolwise")


@dataclass(slots=True)
class Progress:
    """The progress of a run; saved in checkpoints."""

    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    """The latest validation."""
    last_step: int | None = None
    """Its step; None before the first validation, or if an older version wrote the checkpoint."""
    best: float | None = None
    """`trainer.best_metric` of the best validation; higher is better."""
    best_overspend: float = 0.0
    """How much the best validation exceeds the router's budget: see routing/overspend.py."""
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    faults: FaultRates = field(default_factory=FaultRates)

    @property
    def best_rank(self) -> tuple[float, float] | None:
        """`checkpoint.ranking_key` of the best validation."""
        return None if self.best is None else (self.best_overspend, -self.best)

    @best_rank.setter
    def best_rank(self, rank: tuple[float, float] | None) -> None:
        self.best_overspend, self.best = (0.0, None) if rank is None else (rank[0], -rank[1])

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        self.before, self.last, self.best = state["before"], state["last"], state["best"]
        self.best_overspend = state.get("best_overspend", 0.0)  # older checkpoints have none of these
        self.last_step = state.get("last_step")
        self.diagnosis.load_state_dict(state.get("diagnosis", {}))
        self.faults.load_state_dict(state.get("faults", {}))


@dataclass(frozen=True, slots=True)
class Run:
    """Every part that the training loop uses."""

    config: RunConfig
    batches: Batches
    validation_tasks: Sequence[Task]
    router: DirectRouter | LearnedRouter
    scheduler: RolloutScheduler
    policy: LocalPolicy
    scoring: Scoring
    learner: Actor
    estimator: AdvantageEstimator
    chat: ChatTokenizer
    queue: RolloutQueue[list[Rollout]]
    progress: Progress = field(default_factory=Progress)
    thinking: ThinkingStage | None = None
    """Writes thoughts at the other levels; None unless `algorithm.rlvcr.enable` is set."""

    def startup_findings(self) -> list[Finding]:
        """Problems, known before the first step, that would keep the run from learning."""
        tasks, held_out = self.batches.tasks, self.validation_tasks
        return startup_findings(self.config, self.scoring.rewards, self.scheduler.tools, train=tasks, held_out=held_out)

    def close(self) -> None:
        """Stop the worker processes of rewards and tools, and the generation server if we started one."""
        self.policy.close()
        self.scoring.close()
        isolation.close()

    def registry(self) -> StateRegistry:
        """All state that must survive a crash."""
        registry = StateRegistry()
        registry.register("actor", self.learner)
        registry.register("batches", self.batches)
        registry.register("router", self.router)
        registry.register("progress", self.progress)
        registry.register("queue", self.queue)
        registry.register("randomness", RngState())
        if self.thinking is not None:
            registry.register("thinking", self.thinking)
        return registry


def assemble(
    config: RunConfig,
    *,
    tasks: Sequence[Task] | None = None,
    validation_tasks: Sequence[Task] | None = None,
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: RewardSources | None = None,
) -> Run:
    """Build a run from its configuration; Python arguments override what the file names.

    All errors in the input are found here, before any work is done.
    """
    announce("starting the tools")
    tool_objects = build_tools([*config.tools, *as_entries(tools)])
    announce("starting the reward sandbox")
    scoring = build_scoring(config.reward, reward)
    try:
        announce("reading the tasks")
        train = tasks if tasks is not None else load_split(config, "train", config.data.limit)
        held_out = (
            validation_tasks if validation_tasks is not None else load_split(config, "val", config.data.val_limit)
        )
        train, held_out = attach_labels(config, train), attach_labels(config, held_out)
        for task in (*train, *held_out):
            check_task_tools(task, tool_objects, env=config.env.name)
        check_routable(config, tool_objects, train)
        scoring.check([*train, *held_out])
        batches = Batches(
            without_held_out_tools(train, tool_objects, config.multi_turn.held_out_tools),
            config.data.batch_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            drop_last=config.data.drop_last,
        )
        return _assemble_with_model(config, batches, held_out, tool_objects, scoring)
    except BaseException:
        scoring.close()
        raise


def _assemble_with_model(
    config: RunConfig, batches: Batches, held_out: Sequence[Task], tools: dict[str, BaseTool], scoring: Scoring
) -> Run:
    policy = local_policy(config, config.model.path)
    prompt = policy.chat.tool_prompt
    if config.multi_turn.enable and tools:
        check_tool_prompt(config, policy.chat)
    elif config.env.name != "tools" and (prompt.where == "nowhere" or not prompt.usable):
        log.warning("%s", prompt.describe())
    from toolwise.learner.builder import build_learner
    from toolwise.routing.head.builder import build_head

    announce("building the learner")
    head = build_head(config, policy.model) if config.router.enable else None
    learner, estimator = build_learner(
        config,
        policy.model,
        estimator_from_config(config),
        load_critic=partial(_critic_model, config),
        extra_parameters=[*head.parameters()] if head is not None and config.router.optimizer == "actor" else [],
    )
    return Run(
        config=config,
        batches=batches,
        validation_tasks=held_out,
        router=_router(config, head, learner, policy, tools, batches.tasks),
        scheduler=build_scheduler(config, policy, tools),
        policy=policy,
        scoring=scoring,
        learner=learner,
        estimator=with_rlvcr_metrics(config, estimator),
        chat=policy.chat,
        queue=RolloutQueue(per_update=config.data.batch_size),
        thinking=build_thinking_stage(config, policy, policy.model, policy.chat, learner.settings.micro_batch),
    )


def check_tool_prompt(config: RunConfig, chat: ChatTokenizer) -> None:
    """Log how tools are presented to the model; raise if its template cannot show tools, calls or results."""
    prompt = chat.tool_prompt
    if prompt.where == "nowhere":
        raise ConfigError(
            f"the chat template of {chat.name} {prompt.reason}, and rollout.tool_prompt = "
            f'"{config.rollout.tool_prompt}" with rollout.tool_parser = "{config.rollout.tool_parser}" does not show '
            'them either: use tool_prompt = "auto" and a parser that reads calls, such as hermes'
        )
    if not prompt.usable:
        raise ConfigError(
            f"the chat template of {chat.name} {prompt.reason}: "
            + (
                'use rollout.tool_prompt = "auto", which writes them as text if it can'
                if config.rollout.tool_prompt == "template"
                else "they are lost even when written as text, so tools cannot be used: use another chat template"
            )
        )
    log.info("%s", prompt.describe())


def _router(
    config: RunConfig,
    head: RouterHead | None,
    learner: Actor,
    policy: Any,
    tools: dict[str, BaseTool],
    tasks: Sequence[Task],
) -> DirectRouter | LearnedRouter:
    if head is None:
        return DirectRouter(config.seed)
    from toolwise.routing.head.builder import build_router, build_router_learner

    trainable = build_router_learner(config, learner.model, head, learner.optimizer)
    offered = tools if config.multi_turn.enable else {}
    return build_router(config, trainable, policy.chat, offered, tasks, getattr(policy, "engine", None))


def _critic_model(config: RunConfig, path: str) -> Any:
    from toolwise.models import load_model

    return load_model(path, **_load_options(config))[0]


def _load_options(config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {"device": model.device, "dtype": model.dtype, "trust_remote_code": model.trust_remote_code}


def local_policy(config: RunConfig, path: str) -> LocalPolicy:
    """Load the model at `path` in this process, on the configured device and with the configured dtype."""
    from toolwise.models import load_model, locate

    folder = locate(path)
    announce("importing PyTorch")
    configure_threads(config)  # only now, so that input errors are reported without importing torch
    from toolwise.engine.grammar import grammar_from_config
    from toolwise.policies.local import LocalPolicy

    grammar = grammar_from_config(config.rollout.grammar)
    if grammar is not None and config.rollout.engine != "toolwise":
        raise ConfigError(f'rollout.grammar needs rollout.engine = "toolwise", got "{config.rollout.engine}"')
    announce(f"loading the model {path}")
    model, chat = load_model(path, **_load_options(config))
    set_thread_count(config, model)
    if model.device.type == "cpu" and config.model.dtype == "bfloat16":
        raise ConfigError("model.dtype is bfloat16 on a CPU: many do not support it and some crash; use float32")
    rollout = config.rollout
    engine: Any = rollout.engine
    if engine == "vllm":
        from toolwise.policies.vllm.builder import build_vllm

        engine = build_vllm(config, model, folder)
    return LocalPolicy(
        model,
        chat,
        sampling_from_config(config),
        parser=rollout.tool_parser,
        max_batch=rollout.max_batch,
        on_change=rollout.on_template_change,
        engine=engine,
        deterministic=config.deterministic,
        cache_mb=rollout.cache_mb,
        grammar=grammar,
        tool_prompt=rollout.tool_prompt,
    )


def sampling_from_config(config: RunConfig) -> Sampling:
    rollout = config.rollout
    return Sampling(temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens, do_sample=rollout.do_sample)


def build_scheduler(config: RunConfig, policy: AgentPolicy, tools: dict[str, BaseTool]) -> RolloutScheduler:
    """The configured rollout scheduler, with any policy."""
    rollout, turns, limits = config.rollout, config.multi_turn, _limits(config, tools)
    return RolloutScheduler(
        policy,
        tools if turns.enable else {},
        max_episode_steps=turns.max_turns if turns.enable else 1,
        max_concurrent=rollout.max_concurrent,
        deadline_s=rollout.deadline_s,
        tool_timeout_s=turns.tool_timeout_s,
        max_tokens=rollout.max_episode_tokens,
        max_invalid_in_a_row=turns.max_invalid_in_a_row,
        max_result_chars=turns.max_result_chars,
        limits=limits,
        make_env=_env_factory(config, tools, limits),
        lock_step=config.deterministic,
    )


def _env_factory(
    config: RunConfig, tools: dict[str, BaseTool], limits: Limits
) -> Callable[[RouteDecision], BaseEnv] | None:
    """None if the environment consists of the tools alone, which the scheduler builds itself."""
    env, turns = config.env, config.multi_turn
    if env.name == "tools" and not env.interaction:
        return None
    make = build_env_factory(
        env.name,
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
        routed = (
            decision.task.model_copy(update={"tools": list(decision.tools)}) if decision.tools is not None else None
        )
        return make(routed or decision.task)

    return make_env


def _limits(config: RunConfig, tools: dict[str, BaseTool]) -> Limits:
    limits = {name: tool.max_concurrent or config.multi_turn.max_concurrent_calls for name, tool in tools.items()}
    return Limits(
        model=Gate(config.rollout.max_concurrent_requests),
        env=Gate(config.rollout.max_concurrent_envs),
        tools={name: Gate(limit) for name, limit in limits.items() if limit is not None},
    )


def estimator_from_config(config: RunConfig) -> AdvantageEstimator:
    algorithm = config.algorithm
    settings = {**algorithm.model_dump(), "norm_by_std": algorithm.norm_adv_by_std, "per": algorithm.gae_per}
    if algorithm.adv_estimator == "rlvcr":
        return build_rlvcr(config, build_estimator(algorithm.rlvcr.base, **settings))
    return build_estimator(algorithm.adv_estimator, **settings)


def check_learnable(config: RunConfig) -> None:
    """Raise for settings under which nothing could be learned."""
    check_thinking(config)
    if config.rollout.n < min_group_size(estimator_from_config(config)):
        raise ConfigError(
            f"rollout.n is {config.rollout.n}: {config.algorithm.adv_estimator} compares the rollouts of one task with "
            "each other; use 2 or more"
        )
    if not config.rollout.do_sample:
        raise ConfigError("rollout.do_sample is false: all rollouts of a task would be identical; set it to true")
