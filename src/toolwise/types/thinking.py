"""What the thinking stage adds to a rollout: thoughts at the other levels, and the action's scores after each.

    ParsedStep ─► Alternative (one per level) ─► LevelScore ─► ThinkingGroup ─► ThinkingStep ─► RolloutThinking

Three similar quantities: `action_logprob` and `action_entropy` belong to one level's context; the thinking advantage
belongs to the group and is computed by the estimator (advantages/rlvcr.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

LEVEL_COUNT = 4
"""Thinking levels, numbered from 1."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A thought at another level, cut before the action, or the reason why there is none."""

    level: int
    prompt_ids: Sequence[int] = ()
    """What the model saw when it wrote the thought: the history and the forced level, nothing else."""
    forced_tokens: int = 0
    """Number of tokens at the start of `head_ids` that were forced."""
    head_ids: Sequence[int] = ()
    """Tokens of the forced level and the thought."""
    logprobs: Sequence[float] = ()
    """Log-probs of `sampled_ids` at sampling time."""
    text: str = ""
    thought: str | None = None
    thinking_tokens: int = 0
    generated_tokens: int = 0
    """Number of tokens generated, including those cut off."""
    policy_version: int = -1
    failure: str | None = None

    @property
    def sampled_ids(self) -> Sequence[int]:
        return self.head_ids[self.forced_tokens :]


@dataclass(frozen=True, slots=True)
class LevelScore:
    """Log-probs and entropies of the step's action after one level's thought."""

    level: int
    thinking_tokens: int
    action_logprobs: Floats
    """One per token of the action."""
    action_entropies: Floats
    alternative: Alternative | None = None
    """None for the level that the policy used."""
    context_ids: Sequence[int] = ()
    """The tokens between the thought and the action."""

    @property
    def action_logprob(self) -> float:
        """Mean over the action's tokens."""
        return float(self.action_logprobs.mean(dtype="float64"))

    @property
    def action_entropy(self) -> float:
        """−Σ p log p, mean over the action's tokens."""
        return float(self.action_entropies.mean(dtype="float64"))


@dataclass(frozen=True, slots=True)
class ThinkingGroup:
    """Scores of one step's action under two to four levels, in level order, including the level used."""

    level: int
    scores: tuple[LevelScore, ...]
    action_ids: Sequence[int]
    """The action's tokens, scored under each level."""

    @property
    def used(self) -> LevelScore:
        return next(score for score in self.scores if score.level == self.level)


@dataclass(frozen=True, slots=True)
class ThinkingStep:
    """What an estimator needs to know about one step."""

    level: int | None
    """None if the reply names no valid level."""
    thinking_tokens: int
    head_tokens: int
    """Number of leading tokens that hold the level and the thought."""
    group: ThinkingGroup | None = None
    """None if the step was not selected, or fewer than two levels could be scored."""
    level_tokens: int | None = None
    """Number of leading tokens that name the level; None: not counted, treat the whole head as the level."""


@dataclass(frozen=True, slots=True)
class RolloutThinking:
    """One rollout's steps, and the current cost of thinking."""

    steps: tuple[ThinkingStep, ...]
    price: float = 0.0
    """λ: cost of one thinking token, in units of the score."""
    anneal: float = 1.0
    """Falls from 1 at the start of training to 0 at its end."""
    charged: bool = False
    """Whether the reward pays for thinking: see `step_costs`."""
    summed: bool = False
    """Whether it pays for the sum over the steps, as a router's cost does, instead of their mean."""

    @property
    def step_costs(self) -> tuple[float, ...]:
        """What each step pays: λ times its thinking tokens, divided by the number of steps unless `summed`."""
        price = (self.price if self.charged else 0.0) / (1 if self.summed else max(1, len(self.steps)))
        return tuple(price * step.thinking_tokens for step in self.steps)


ThinkingByRollout = Mapping[str, RolloutThinking]
"""By rollout id."""
