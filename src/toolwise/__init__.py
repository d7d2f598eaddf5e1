"""Toolwise trains language-model agents to use tools well. The public names and nothing else, imported on use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "toolwise.messages": ["Message", "ToolCall"],
    "toolwise.types": [
        "Action",
        "AnnotatedRollout",
        "CreditedRollout",
        "EvaluateResult",
        "EvaluationFault",
        "MetricResult",
        "Rollout",
        "RouteDecision",
        "ScoredRollout",
        "StepData",
        "StepOutput",
        "StopReason",
        "Task",
        "TokenLogprobs",
        "Usage",
    ],
    "toolwise.protocols": [
        "AdvantageEstimator",
        "AgentPolicy",
        "Executor",
        "Generation",
        "Sampling",
        "Stateful",
        "TokenGenerator",
        "Tracker",
    ],
    "toolwise.errors": ["ToolwiseError"],
    "toolwise.tools.base": ["BaseTool", "OpenAIFunctionToolSchema"],
    "toolwise.tools.function": ["tool"],
    "toolwise.envs.base": ["BaseEnv"],
    "toolwise.rewards.function": ["reward_function"],
    "toolwise.rollout.worker": ["RLRolloutWorker"],
    "toolwise.config": ["RunConfig", "load_config"],
    "toolwise.api": ["evaluate", "sft", "train"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'toolwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:  # so that type checkers and editors see what __getattr__ gives
    from toolwise.api import evaluate, sft, train
    from toolwise.config import RunConfig, load_config
    from toolwise.envs.base import BaseEnv
    from toolwise.errors import ToolwiseError
    from toolwise.messages import Message, ToolCall
    from toolwise.protocols import (
        AdvantageEstimator,
        AgentPolicy,
        Executor,
        Generation,
        Sampling,
        Stateful,
        TokenGenerator,
        Tracker,
    )
    from toolwise.rewards.function import reward_function
    from toolwise.rollout.worker import RLRolloutWorker
    from toolwise.tools.base import BaseTool, OpenAIFunctionToolSchema
    from toolwise.tools.function import tool
    from toolwise.types import (
        Action,
        AnnotatedRollout,
        CreditedRollout,
        EvaluateResult,
        EvaluationFault,
        MetricResult,
        Rollout,
        RouteDecision,
        ScoredRollout,
        StepData,
        StepOutput,
        StopReason,
        Task,
        TokenLogprobs,
        Usage,
    )
