"""What passes between an advantage estimator and the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from toolwise.errors import ConfigError
from toolwise.types.rollouts import CreditedRollout, ScoredRollout

if TYPE_CHECKING:
    from toolwise.types.thinking import Floats

TerminalScore = Literal["remainder", "add", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSettings:
    """How score and step rewards are combined: advantages/step_rewards.py."""

    terminal_score: TerminalScore = "remainder"
    default_step_reward: float = 0.0
    invalid_action_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.terminal_score not in get_args(TerminalScore):
            known = ", ".join(get_args(TerminalScore))
            raise ConfigError(f"terminal_score is {self.terminal_score!r}; choose one of {known}")


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
