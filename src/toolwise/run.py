"""What a run is made of, and how it is put together from a configuration or from Python objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.advantages import ESTIMATORS
from toolwise.checkpoint import Registry
from toolwise.config import RunConfig
from toolwise.data import Batches, load_tasks
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, Executor, Sampling
from toolwise.rewards.combine import Rewards, Weighted
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.function import Reward
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.routing.direct import DirectRouter
from toolwise.tools.base import BaseTool
from toolwise.tools.catalog import build_tools
from toolwise.types import Task

if TYPE_CHECKING:
    from toolwise.learner.actor import Actor
    from toolwise.policies.local import LocalPolicy
    from toolwise.rollout.chat import ChatTokenizer

log = logging.getLogger("toolwise")


@dataclass(slots=True)
class Progress:
    """How far a run has come; survives a crash with the rest of its state."""

    step: int = 0
    seconds: float = 0.0
    before: dict[str, Any] | None = None
    last: dict[str, Any] | None = None
    """The latest validation."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "seconds": self.seconds, "before": self.before, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        self.before, self.last = state["before"], state["last"]


@dataclass(frozen=True, slots=True)
class Run:
    """Every stage of the loop, ready to work."""

    config: RunConfig
    batches: Batches
    validation_tasks: Sequence[Task]
    router: DirectRouter
    scheduler: RolloutScheduler
    policy: LocalPolicy
    executor: Executor
    rewards: Rewards
    learner: Actor
    estimator: AdvantageEstimator
    chat: ChatTokenizer
    progress: Progress = field(default_factory=Progress)

    def registry(self) -> Registry:
        """Everything that must survive a crash, registered in this one place."""
        registry = Registry()
        registry.register("actor", self.learner)
        registry.register("batches", self.batches)
        registry.register("router", self.router)
        registry.register("progress", self.progress)
        return registry


def assemble(
    config: RunConfig,
    *,
    tasks: Sequence[Task] | None = None,
    validation_tasks: Sequence[Task] | None = None,
    tools: Sequence[Any] | None = None,
    reward: str | Callable[..., Any] | Reward | None = None,
) -> Run:
    """A run from its configuration; what is given in Python takes the place of what the file names.

    Everything that can be wrong with the input is found here, before any work is done.
    """
    found_tools = build_tools([*config.tools, *(tools or ())])
    rewards = _rewards(config, reward)
    train = tasks if tasks is not None else _load(config, "train", config.data.limit)
    held_out = validation_tasks if validation_tasks is not None else _load(config, "val", config.data.val_limit)
    for task in (*train, *held_out):
        _check_tools(task, found_tools)
    batches = Batches(
        train,
        config.data.batch_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
    )
    return _with_model(config, batches, held_out, found_tools, rewards)


def _with_model(
    config: RunConfig, batches: Batches, held_out: Sequence[Task], tools: dict[str, BaseTool], rewards: Rewards
) -> Run:
    from toolwise.models import load_model, locate

    locate(config.model.path)
    settle_threads(config)  # not before now: a fault in the input is told without waiting for torch
    from toolwise.learner.actor import Actor
    from toolwise.policies.local import LocalPolicy

    model, chat = load_model(config.model.path, device=config.model.device, dtype=config.model.dtype)
    if model.device.type == "cpu" and config.model.dtype == "bfloat16":
        raise ConfigError("model.dtype is bfloat16 on a CPU: many cannot multiply it, some crash; use float32")
    rollout = config.rollout
    sampling = Sampling(
        temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens, do_sample=rollout.do_sample
    )
    policy = LocalPolicy(model, chat, sampling, parser=rollout.tool_parser, max_batch=rollout.max_batch)
    scheduler = RolloutScheduler(
        policy,
        tools if config.multi_turn.enable else {},
        max_episode_steps=config.multi_turn.max_turns if config.multi_turn.enable else 1,
        max_concurrent=rollout.max_concurrent,
        deadline_s=rollout.deadline_s,
        tool_timeout_s=config.multi_turn.tool_timeout_s,
        lock_step=config.deterministic,
    )
    return Run(
        config=config,
        batches=batches,
        validation_tasks=held_out,
        router=DirectRouter(config.seed),
        scheduler=scheduler,
        policy=policy,
        executor=InProcessExecutor(),
        rewards=rewards,
        learner=Actor(model, actor_settings(config), pad_id=chat.pad_id),
        estimator=ESTIMATORS[config.algorithm.adv_estimator](norm_by_std=config.algorithm.norm_adv_by_std),
        chat=chat,
    )


def actor_settings(config: RunConfig) -> Any:
    from toolwise.learner.actor import ActorSettings

    actor = config.actor
    return ActorSettings(
        lr=actor.lr,
        warmup_steps=actor.warmup_steps,
        weight_decay=actor.weight_decay,
        max_grad_norm=actor.max_grad_norm,
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        entropy_coef=actor.entropy_coef,
        ppo_epochs=actor.ppo_epochs,
        mini_batches=actor.mini_batches,
        micro_batch_tokens=actor.micro_batch_tokens,
        temperature=config.rollout.temperature,
        seed=config.seed,
    )


def settle_threads(config: RunConfig) -> None:
    """On a shared machine idle threads must sleep, not spin; a deterministic run has one."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU computes the same twice only with this
    import torch

    if config.deterministic:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)


def check_learnable(config: RunConfig) -> None:
    """Settings under which nothing could ever be learned."""
    if config.rollout.n < 2:
        raise ConfigError(
            f"rollout.n is {config.rollout.n}: {config.algorithm.adv_estimator} compares the rollouts of one task with "
            "each other; use 2 or more"
        )
    if not config.rollout.do_sample:
        raise ConfigError("rollout.do_sample is false: rollouts of one task would all be the same; set it to true")


def _rewards(config: RunConfig, given: str | Callable[..., Any] | Reward | None) -> Rewards:
    """The reward given in Python, or the parts, or the one function that the configuration names."""
    named = config.reward
    if given is None and named.parts:
        if named.function:
            raise ConfigError("reward.function and reward.parts are both given: make the function one of the parts")
        parts = tuple(Weighted(Reward.of(part.function, part.kwargs), part.weight) for part in named.parts)
        return Rewards(parts, named.combine)
    if given is None and not named.function:
        raise ConfigError("reward.function is missing: name one as package.module:function or path/to/file.py:function")
    found = Reward.of(given if given is not None else named.function, named.kwargs)
    return Rewards((Weighted(found),), named.combine)


def _load(config: RunConfig, which: str, limit: int | None) -> list[Task]:
    path = getattr(config.data, which)
    if path is None:
        if which == "val":
            return []
        raise ConfigError("data.train is missing: name a Parquet or JSONL file of tasks")
    return load_tasks(path, limit=limit)


def _check_tools(task: Task, tools: dict[str, BaseTool]) -> None:
    for name in task.tools or ():
        if name not in tools:
            known = ", ".join(tools) or "none"
            raise ConfigError(
                f"task {task.task_id} wants the tool {name!r}, and the run has: {known}; add it to `tools`"
            )
