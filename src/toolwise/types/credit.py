"""What passes between an advantage estimator and the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import NonNegativeFloat

from toolwise.errors import ConfigError
from toolwise.types.rollouts import CreditedRollout, ScoredRollout

if TYPE_CHECKING:
    from toolwise.types.thinking import Floats

TerminalScore = Literal["remainder", "add", "never"]


@dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """How score and step rewards are combined: advantages/step_rewards.py. Also part of `[algorithm]`."""

    terminal_score: TerminalScore = "remainder"
    """Reward of the last step. "remainder": the score minus the step rewards, so that a rollout's rewards sum to its
    score. "add": the full score, for scores that do not include the step rewards; every estimator then sees the score
    plus the step rewards. "never": nothing, returns consist of step rewards only. The old names "auto" ("remainder")
    and "always" ("add") are still accepted."""
    default_step_reward: float = 0.0
    """Reward of a step that received none; also added to the rollout's total."""
    invalid_action_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of a step with an invalid action, and from the rollout's total."""

    def __post_init__(self) -> None:
        if self.terminal_score not in (known := get_args(TerminalScore)):
            raise ConfigError(f"terminal_score is {self.terminal_score!r}; choose one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class AddedRollout:
    """A rollout that an estimator adds to the update; the learner annotates it like the others."""

    scored: ScoredRollout
    advantages: tuple[Floats, ...]
    """One array per step, with one entry per sampled token."""


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    """The result of an estimator."""

    rollouts: Sequence[CreditedRollout]
    metrics: Mapping[str, float] = field(default_factory=dict)
    added: Sequence[AddedRollout] = ()
