"""What the thinking stage adds to a rollout: the thoughts of other levels, and the scores of its actions under each.

    ParsedStep ─► Alternative (one per level) ─► LevelScore ─► ThinkingGroup ─► ThinkingStep ─► RolloutThinking

Three quantities that look alike are kept apart: `action_logprob` and `action_entropy` belong to one level's context;
the thinking advantage belongs to the group, and the estimator computes it (advantages/rlvcr.py).
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
    """A thought of another level, cut before the action; or why there is none."""

    level: int
    prompt_ids: Sequence[int] = ()
    """What its writer saw: the history and the forced level, nothing else."""
    forced_tokens: int = 0
    """Tokens of `head_ids` that were forced."""
    head_ids: Sequence[int] = ()
    """The forced level and the thought."""
    logprobs: Sequence[float] = ()
    """Of the head's sampled tokens, as they were drawn."""
    text: str = ""
    thought: str | None = None
    thinking_tokens: int = 0
    generated_tokens: int = 0
    """Tokens that its writing took, those that were cut off included."""
    policy_version: int = -1
    failure: str | None = None

    @property
    def sampled_ids(self) -> Sequence[int]:
        return self.head_ids[self.forced_tokens :]


@dataclass(frozen=True, slots=True)
class LevelScore:
    """What the step's own action looks like after one level's thought."""

    level: int
    thinking_tokens: int
    action_logprobs: Floats
    """Of each token of the action."""
    action_entropies: Floats
    alternative: Alternative | None = None
    """None for the level that the policy used."""
    context_ids: Sequence[int] = ()
    """What stands between the thought and the action in this context."""

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
    """Two to four levels scored on one step's action, by level; the one that was used among them."""

    level: int
    scores: tuple[LevelScore, ...]
    action_ids: Sequence[int]
    """The tokens that were scored under each of them."""

    @property
    def used(self) -> LevelScore:
        return next(score for score in self.scores if score.level == self.level)


@dataclass(frozen=True, slots=True)
class ThinkingStep:
    """What an estimator needs to know of one step."""

    level: int | None
    """None where the reply names none that is one."""
    thinking_tokens: int
    head_tokens: int
    """So many of its first tokens are the level and the thought."""
    group: ThinkingGroup | None = None
    """None where the step was not chosen, or fewer than two levels could be scored."""
    level_tokens: int | None = None
    """So many of its first tokens say the level; where nobody counted them, all of the head."""


@dataclass(frozen=True, slots=True)
class RolloutThinking:
    """One rollout's steps, and what thinking costs at this point of the run."""

    steps: tuple[ThinkingStep, ...]
    price: float = 0.0
    """λ: what a thinking token costs in the unit of the score."""
    anneal: float = 1.0
    """From 1 at the beginning of training to 0 at its end."""


ThinkingByRollout = Mapping[str, RolloutThinking]
"""By rollout id."""
