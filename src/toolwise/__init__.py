"""Toolwise trains language-model agents to use tools well.

This module holds only the public names; each is imported on first use, so `import toolwise` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolwise.lazy_imports import lazy_names

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "toolwise.messages": ["Message", "ToolCall"],
    "toolwise.types": [
        "Action",
        "AnnotatedRollout",
        "CheckpointEvent",
        "CreditedBatch",
        "CreditedRollout",
        "EndEvent",
        "EvaluateResult",
        "EvaluationFault",
        "MetricResult",
        "RewardSettings",
        "Rollout",
        "RouteDecision",
        "RunStart",
        "ScoredRollout",
        "StepData",
        "StepEvent",
        "StepOutput",
        "Stop",
        "StopReason",
        "Task",
        "TokenLogprobs",
        "Usage",
        "ValidationEvent",
    ],
    "toolwise.protocols": [
        "AdvantageEstimator",
        "AgentPolicy",
        "Callback",
        "Generation",
        "PolicyLoss",
        "Router",
        "Sampler",
        "Sampling",
        "Stateful",
        "TokenGenerator",
        "ToolCallParser",
        "Tracker",
    ],
    "toolwise.errors": ["ToolwiseError"],
    "toolwise.tools.base": ["BaseTool", "OpenAIFunctionToolSchema"],
    "toolwise.tools.function": ["tool"],
    "toolwise.envs.base": ["BaseEnv"],
    "toolwise.rewards.executor": ["Executor"],
    "toolwise.rewards.function": ["reward_function"],
    "toolwise.rollout.worker": ["RLRolloutWorker"],
    "toolwise.config.schema": ["RunConfig", "load_config"],
    "toolwise.api": ["evaluate", "load", "resume", "sft", "train"],
    "toolwise.agent.agent": ["Agent", "RoutedAgent"],
}

__all__ = sorted(["__version__", *(name for names in _NAMES_BY_MODULE.values() for name in names)])

__getattr__ = lazy_names(__name__, _NAMES_BY_MODULE)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:  # shows type checkers and editors what __getattr__ returns; `as` marks a re-export
    from toolwise.api import evaluate as evaluate, load as load, resume as resume, sft as sft, train as train  # noqa: I001
    from toolwise.config.schema import RunConfig as RunConfig, load_config as load_config
    from toolwise.envs.base import BaseEnv as BaseEnv
    from toolwise.errors import ToolwiseError as ToolwiseError
    from toolwise.messages import Message as Message, ToolCall as ToolCall
    from toolwise.protocols import (
        AdvantageEstimator as AdvantageEstimator,
        AgentPolicy as AgentPolicy,
        Callback as Callback,
        Generation as Generation,
        PolicyLoss as PolicyLoss,
        Router as Router,
        Sampler as Sampler,
        Sampling as Sampling,
        Stateful as Stateful,
        TokenGenerator as TokenGenerator,
        ToolCallParser as ToolCallParser,
        Tracker as Tracker,
    )
    from toolwise.rewards.executor import Executor as Executor
    from toolwise.rewards.function import reward_function as reward_function
    from toolwise.rollout.worker import RLRolloutWorker as RLRolloutWorker
    from toolwise.agent.agent import Agent as Agent, RoutedAgent as RoutedAgent
    from toolwise.tools.base import BaseTool as BaseTool, OpenAIFunctionToolSchema as OpenAIFunctionToolSchema
    from toolwise.tools.function import tool as tool
    from toolwise.types import (
        Action as Action,
        AnnotatedRollout as AnnotatedRollout,
        CheckpointEvent as CheckpointEvent,
        CreditedBatch as CreditedBatch,
        CreditedRollout as CreditedRollout,
        EndEvent as EndEvent,
        EvaluateResult as EvaluateResult,
        EvaluationFault as EvaluationFault,
        MetricResult as MetricResult,
        RewardSettings as RewardSettings,
        Rollout as Rollout,
        RouteDecision as RouteDecision,
        RunStart as RunStart,
        ScoredRollout as ScoredRollout,
        StepData as StepData,
        StepEvent as StepEvent,
        StepOutput as StepOutput,
        Stop as Stop,
        StopReason as StopReason,
        Task as Task,
        TokenLogprobs as TokenLogprobs,
        Usage as Usage,
        ValidationEvent as ValidationEvent,
    )
