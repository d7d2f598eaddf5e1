"""`Run`: the parts of a training run, and how they are built from a configuration and Python objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from toolwise.config.schema import RunConfig
from toolwise.data import Batches
from toolwise.data.sampled_batches import SampledBatches, build_sampler
from toolwise.data.task_set import distinct_tasks
from toolwise.envs.catalog import EnvSpec
from toolwise.errors import ConfigError
from toolwise.protocols import AdvantageEstimator, Learner, PolicyLoss, Stateful
from toolwise.rollout.agents.agent_request import OutsideAgent
from toolwise.rollout.call_format import ParserSpec
from toolwise.rollout.queue import Order, RolloutQueue
from toolwise.routing.inference_router import InferenceRouter
from toolwise.routing.routers import RouterSpec
from toolwise.thinking.stage import ThinkingStage
from toolwise.training.async_check import check_async
from toolwise.training.calibration import TaskSplit, split_tasks
from toolwise.training.checkpoint import RngState, StateRegistry
from toolwise.training.components import (
    EstimatorSpec,
    LossSpec,
    build_thinking_stage,
    check_thinking,
    load_estimator,
    load_loss,
    with_rlvcr,
)
from toolwise.training.diagnosis import Diagnosis, Finding, check_family_names, check_routable, startup_findings
from toolwise.training.evaluate import RewardSources
from toolwise.training.metrics import FaultRates
from toolwise.training.model_check import require_model
from toolwise.training.rollout_setup import RolloutSetup, check_tasks, load_options, setup_rollouts, tools_and_scoring
from toolwise.training.startup import announce
from toolwise.training.tasks import attach_labels, load_split, without_held_out_tools
from toolwise.training.ticket_book import TicketBook
from toolwise.types import Task

if TYPE_CHECKING:
    from toolwise.training.cache_memory import CacheMemory
    from toolwise.training.weight_copies import WeightCopies


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
    validating: bool = False
    """Whether an error prevented the validation of the current step, so that a resumed run begins with it."""
    best: float | None = None
    """`trainer.best_metric` of the best validation; higher is better."""
    best_overspend: float = 0.0
    """How much the best validation exceeds the router's budget: see routing/budget.py."""
    without_best: int = 0
    """Validations since the best one."""
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    faults: FaultRates = field(default_factory=FaultRates)

    @property
    def best_rank(self) -> tuple[float, float] | None:
        """`checkpoint.ranking_key` of the best validation."""
        return None if self.best is None else (self.best_overspend, -self.best)

    @best_rank.setter
    def best_rank(self, rank: tuple[float, float] | None) -> None:
        self.best_overspend, self.best = (0.0, None) if rank is None else (rank[0], -rank[1])

    def compare(self, rank: tuple[float, float]) -> None:
        """Count a validation: is it the best one?"""
        better = self.best_rank is None or rank < self.best_rank
        self.best_rank, self.without_best = (rank, 0) if better else (self.best_rank, self.without_best + 1)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"diagnosis": self.diagnosis.state_dict()}

    def validation_state(self) -> dict[str, Any]:
        """What a validation changes."""
        names = ("last", "last_step", "validating", "best", "best_overspend", "without_best")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        self.before, self.last, self.best = state["before"], state["last"], state["best"]
        self.best_overspend = state.get("best_overspend", 0.0)  # older checkpoints have none of these
        self.without_best = state.get("without_best", 0)
        self.last_step, self.validating = state.get("last_step"), state.get("validating", False)
        self.diagnosis.load_state_dict(state.get("diagnosis", {}))
        self.faults.load_state_dict(state.get("faults", {}))


@dataclass(frozen=True, slots=True)
class Run(RolloutSetup):
    """Every part that the training loop uses."""

    batches: Batches | SampledBatches
    calibration: TaskSplit
    """The tasks that the router's budgets are calibrated on; not among the batches."""
    learner: Learner
    estimator: AdvantageEstimator
    queue: RolloutQueue[Any]
    """Of the rollouts of a prompt; in asynchronous training with their rewards."""
    progress: Progress = field(default_factory=Progress)
    thinking: ThinkingStage | None = None
    """Writes thoughts at the other levels; None unless `algorithm.rlvcr.enable` is set."""
    cache_memory: CacheMemory | None = None
    """Frees the engine's cache for updates that need its memory; None without a GPU."""
    weights: WeightCopies | None = None
    """The engine's weights and the learner's, in asynchronous training; None where they share them."""
    tickets: TicketBook | None = None
    """The groups under way in asynchronous training."""

    def startup_findings(self) -> list[Finding]:
        """Problems, known before the first step, that would keep the run from learning."""
        tasks, held_out = self.batches.tasks, self.validation_tasks
        return startup_findings(self.config, self.scoring.rewards, self.scheduler.tools, train=tasks, held_out=held_out)

    def snapshot(self) -> dict[str, Any]:
        """A copy of all state but the learner's, as checkpoints save it."""
        return {name: copy.deepcopy(part.state_dict()) for name, part in self.state_parts().items()}

    def registry(self) -> StateRegistry:
        """All state that must survive a crash."""
        return StateRegistry({"actor": self.learner, **self.state_parts()})

    def state_parts(self) -> dict[str, Stateful]:
        """All of it but the learner's, which is too large to copy before each step."""
        parts: dict[str, Stateful] = {
            "batches": self.batches,
            "router": self.router,
            "progress": self.progress,
            "queue": self.queue,
            "randomness": RngState(),
        }
        optional: dict[str, Stateful | None] = {"thinking": self.thinking, "tickets": self.tickets}
        return parts | {name: part for name, part in optional.items() if part is not None}


def assemble(
    config: RunConfig,
    *,
    tasks: Sequence[Task] | None = None,
    validation_tasks: Sequence[Task] | None = None,
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: RewardSources | None = None,
    env: EnvSpec | None = None,
    router: RouterSpec | None = None,
    parser: ParserSpec | None = None,
    estimator: EstimatorSpec | None = None,
    loss: LossSpec | None = None,
    agent: OutsideAgent | None = None,
    sampler: Any = None,
) -> Run:
    """Build a training run from its configuration; Python arguments override what the file names.

    All errors in the input are found here, before any work is done.
    """
    with tools_and_scoring(config, tools, reward, agent) as (tool_objects, scoring):
        announce("checking the model")
        require_model(config, tool_objects, parser)
        announce("reading the tasks")
        train = attach_labels(config, load_split(config, "train") if tasks is None else tasks)
        held_out = attach_labels(config, load_split(config, "val") if validation_tasks is None else validation_tasks)
        train, held_out = (check_tasks(config, tasks, tool_objects) for tasks in (train, held_out))
        check_family_names(config, tool_objects, train)
        check_routable(config, tool_objects, train)
        check_routable(config, tool_objects, held_out, learns=False)
        scoring.check([*distinct_tasks(train), *distinct_tasks(held_out)])
        split = split_tasks(config, without_held_out_tools(train, tool_objects, config.multi_turn.held_out_tools))
        batches = build_batches(config, split.train, sampler)
        parts: dict[str, Any] = {"env": env, "router": router, "parser": parser, "agent": agent}
        setup = setup_rollouts(config, held_out, tool_objects, scoring, **parts)
        return add_training(setup, batches, load_estimator(config, estimator), load_loss(config, loss), split)


def build_batches(config: RunConfig, tasks: Sequence[Task], sampler: Any = None) -> Batches | SampledBatches:
    """The batches of the training tasks; `sampler` replaces the configured one."""
    data = config.data
    if sampler is not None or data.sampler:
        chosen = build_sampler(data.sampler if sampler is None else sampler, data.sampler_kwargs, tasks, config.seed)
        return SampledBatches(tasks, data.batch_size, chosen)
    if data.sampler_kwargs:
        raise ConfigError("data.sampler_kwargs are for a sampler: set data.sampler")
    return Batches(tasks, data.batch_size, seed=config.seed, shuffle=data.shuffle, drop_last=data.drop_last)


def add_training(
    setup: RolloutSetup,
    batches: Batches | SampledBatches,
    estimator: AdvantageEstimator,
    loss: PolicyLoss | None = None,
    split: TaskSplit | None = None,
) -> Run:
    """Add what training needs: learner, estimator, batches, queue, thinking stage, and a router that learns."""
    from toolwise.learner.builder import build_learner
    from toolwise.training.async_setup import copy_weights
    from toolwise.training.cache_memory import build_cache_memory

    announce("building the learner")
    config, policy, head, router = setup.config, setup.policy, setup.head, setup.router
    weights = copy_weights(config, policy)
    learner = build_learner(
        config,
        policy.model if weights is None else weights.learner_model,
        estimator,
        load_critic=partial(_critic_model, config),
        extra_parameters=[*head.parameters()] if head is not None and config.router.optimizer == "actor" else [],
        loss=loss,
    )
    if head is not None and isinstance(router, InferenceRouter):  # replaced by one that trains the head
        from toolwise.routing.head.builder import build_learned_router

        trained = None if weights is None else weights.learner_model
        router = build_learned_router(config, router, policy, head, learner.optimizer, batches.tasks, trained)
    return Run(
        config=config,
        validation_tasks=setup.validation_tasks,
        router=router,
        head=head,
        scheduler=setup.scheduler,
        policy=policy,
        scoring=setup.scoring,
        agent=setup.agent,
        batches=batches,
        calibration=split or TaskSplit(batches.tasks, ()),
        learner=learner,
        estimator=with_rlvcr(config, estimator),
        queue=_build_queue(config),
        thinking=build_thinking_stage(config, policy, router),
        cache_memory=build_cache_memory(
            policy.engine,
            learner,
            sized_by_user=config.rollout.cache_mb is not None,
            second_copy=None if weights is None else weights.bytes,
        ),
        weights=weights,
        tickets=None if weights is None else TicketBook(config.trainer.max_staleness),
    )


def _build_queue(config: RunConfig) -> RolloutQueue[Any]:
    """Groups come in the order of their tasks without staleness, or where no step may depend on timing."""
    staleness = config.trainer.allowed_staleness
    order: Order = "finished" if staleness and not config.deterministic else "admitted"
    return RolloutQueue(per_update=config.data.batch_size, max_staleness=staleness, order=order)


def _critic_model(config: RunConfig, path: str) -> Any:
    from toolwise.models import load_model

    return load_model(path, **load_options(config, path))[0]


def check_learnable(config: RunConfig, estimator: AdvantageEstimator | None = None) -> None:
    """Raise for settings under which nothing could be learned. `estimator` replaces the configured one."""
    check_thinking(config)
    check_async(config)
    if config.rollout.n < (estimator or load_estimator(config)).min_group_size:
        raise ConfigError(
            f"rollout.n is {config.rollout.n}: {config.algorithm.adv_estimator} compares the rollouts of one task with "
            "each other; use 2 or more"
        )
    if config.trainer.early_stopping is not None and not config.validation.every:
        raise ConfigError("trainer.early_stopping needs validations during training: set validation.every")
    if not config.rollout.do_sample:
        raise ConfigError("rollout.do_sample is false: all rollouts of a task would be identical; set it to true")
