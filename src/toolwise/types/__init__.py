"""The types passed between stages: one per stage, complete when its stage returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolwise.lazy_imports import lazy_names

if TYPE_CHECKING:
    from toolwise.types.credit import AddedRollout, CreditedBatch, RewardSettings, TerminalScore
    from toolwise.types.events import CheckpointEvent, EndEvent, RunStart, StepEvent, Stop, ValidationEvent
    from toolwise.types.parts import AdvantageParts, UpdatedTokens
    from toolwise.types.results import EvaluateResult, EvaluationFault, MetricResult, StepOutput
    from toolwise.types.rollouts import (
        Action,
        AnnotatedRollout,
        CountUsage,
        CreditedRollout,
        PriceCalls,
        Rollout,
        RouteDecision,
        RouterCredit,
        ScoredRollout,
        StepData,
        StopReason,
        Task,
        Usage,
    )
    from toolwise.types.thinking import (
        LEVEL_COUNT,
        Alternative,
        LevelScore,
        RolloutThinking,
        ThinkingByRollout,
        ThinkingGroup,
        ThinkingStep,
    )
    from toolwise.types.thinking import Floats as Floats
    from toolwise.types.tokens import SampledTokens, TokenLogprobs
    from toolwise.types.turns import TurnRoute, TurnRouting

_NAMES = {
    "toolwise.types.credit": ["AddedRollout", "CreditedBatch", "RewardSettings", "TerminalScore"],
    "toolwise.types.events": ["CheckpointEvent", "EndEvent", "RunStart", "StepEvent", "Stop", "ValidationEvent"],
    "toolwise.types.parts": ["AdvantageParts", "UpdatedTokens"],
    "toolwise.types.results": ["EvaluateResult", "EvaluationFault", "MetricResult", "StepOutput"],
    "toolwise.types.rollouts": [
        "Action",
        "AnnotatedRollout",
        "CountUsage",
        "CreditedRollout",
        "PriceCalls",
        "Rollout",
        "RouteDecision",
        "RouterCredit",
        "ScoredRollout",
        "StepData",
        "StopReason",
        "Task",
        "Usage",
    ],
    "toolwise.types.thinking": [
        "LEVEL_COUNT",
        "Alternative",
        "LevelScore",
        "RolloutThinking",
        "ThinkingByRollout",
        "ThinkingGroup",
        "ThinkingStep",
    ],
    "toolwise.types.tokens": ["SampledTokens", "TokenLogprobs"],
    "toolwise.types.turns": ["TurnRoute", "TurnRouting"],
}
"""Imported on first use: sandbox workers start often and need only `results`."""

__getattr__ = lazy_names(__name__, _NAMES)

__all__ = [
    "LEVEL_COUNT",
    "Action",
    "AddedRollout",
    "AdvantageParts",
    "Alternative",
    "AnnotatedRollout",
    "CheckpointEvent",
    "CountUsage",
    "CreditedBatch",
    "CreditedRollout",
    "EndEvent",
    "EvaluateResult",
    "EvaluationFault",
    "LevelScore",
    "MetricResult",
    "PriceCalls",
    "RewardSettings",
    "Rollout",
    "RolloutThinking",
    "RouteDecision",
    "RouterCredit",
    "RunStart",
    "SampledTokens",
    "ScoredRollout",
    "StepData",
    "StepEvent",
    "StepOutput",
    "Stop",
    "StopReason",
    "Task",
    "TerminalScore",
    "ThinkingByRollout",
    "ThinkingGroup",
    "ThinkingStep",
    "TokenLogprobs",
    "TurnRoute",
    "TurnRouting",
    "UpdatedTokens",
    "Usage",
    "ValidationEvent",
]
