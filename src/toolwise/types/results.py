"""Results of reward functions: a score, with optional metrics, step rewards and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator


def unwrap_scalar(value: Any) -> Any:
    """`value.item()` for a numpy scalar or an array or tensor with one element; any other value unchanged.

    Recognizes them by their methods, without importing numpy or torch.
    """
    if isinstance(value, bool | int | float | str | dict | list | None) or not hasattr(type(value), "item"):
        return value
    try:
        number = value.item()
    except (TypeError, ValueError, RuntimeError):  # not exactly one element
        return value
    return number if isinstance(number, bool | int | float) else value


Number = Annotated[float, BeforeValidator(unwrap_scalar)]
"""A float; also accepts a bool, a numpy scalar, or an array or tensor with one element."""


class StepOutput(BaseModel):
    """The reward of one step. `step_index` counts the assistant's actions from 0."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    step_index: int | str
    base_reward: Number
    metrics: dict[str, Annotated[Any, BeforeValidator(unwrap_scalar)]] = Field(default_factory=dict)
    reason: str | None = None


class MetricResult(BaseModel):
    """One named part of a score."""

    model_config = ConfigDict(extra="forbid")

    score: Number
    reason: str = ""
    is_score_valid: bool = True


class EvaluationFault(BaseModel):
    """Why a reward could not be computed."""

    model_config = ConfigDict(extra="forbid")

    kind: str
    message: str
    traceback: str = ""


class EvaluateResult(BaseModel):
    """A reward function's result for one rollout."""

    model_config = ConfigDict(extra="forbid")

    score: Number | None = None
    """Defaults to the sum of the step rewards in `step_outputs`, plus the environment's rewards for the other steps."""
    is_score_valid: bool = True
    reason: str | None = None
    metrics: dict[str, MetricResult] = Field(default_factory=dict)
    """Plain numbers are accepted too: {"correct": 1.0}."""
    step_outputs: list[StepOutput] | None = None
    error: EvaluationFault | None = None

    @field_validator("metrics", mode="before")
    @classmethod
    def _wrap_plain_numbers(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            name: {"score": number} if isinstance(number := unwrap_scalar(metric), bool | int | float) else number
            for name, metric in value.items()
        }

    @field_validator("score")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"score must be finite, got {value}")
        return value

    @model_validator(mode="after")
    def _sum_of_steps(self) -> EvaluateResult:
        if self.score is None and self.step_outputs and self.is_score_valid and self.error is None:
            rewards: dict[str, float] = {}
            for output in self.step_outputs:  # the first entry per index counts, as in alignment
                rewards.setdefault(str(output.step_index), output.base_reward)
            total = sum(rewards.values())
            self.score = total if math.isfinite(total) else None
            self.model_fields_set.discard("score")
        return self

    @property
    def correctness(self) -> float:
        """The "correct" metric if there is a valid one, else the score; 0 without either."""
        metric = self.metrics.get("correct")
        return metric.score if metric is not None and metric.is_score_valid else self.score or 0.0

    @property
    def is_sum_of_steps(self) -> bool:
        """Whether `score` is a sum of step rewards because the function returned none. `rewards/align.py` then adds
        the environment's rewards for the other steps."""
        return self.has_valid_score and "score" not in self.model_fields_set

    @property
    def has_valid_score(self) -> bool:
        """Whether there is a score to train on."""
        return self.is_score_valid and self.score is not None and self.error is None
