"""What crosses the borders of the thinking stage: a step as it was read, thoughts of the other levels, their scores.

    ScoredRollout ─► ReadStep ─► Alternative (one a level) ─► LevelScore ─► ThinkingGroup ─► Deliberation

Three quantities that look alike are kept apart: `action_logprob` and `action_entropy` belong to one level's context,
the thinking advantage to the group, and is the estimator's (advantages/rlvcr.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toolwise.thinking.reading import ParsedReply
from toolwise.thinking.tokens import TokenSpans

if TYPE_CHECKING:
    from toolwise.types import Floats


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """One decision of a rollout: the history the policy saw, the tokens it sampled, and what they say."""

    rollout_id: str
    group_id: str
    index: int
    history: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    reading: ParsedReply
    spans: TokenSpans
    kind: str | None = None
    """Of step, where the world says it: "easy", "hard", …"""

    @property
    def action_ids(self) -> Sequence[int]:
        return self.token_ids[self.spans.action.start : self.spans.action.stop]

    @property
    def tail_ids(self) -> Sequence[int]:
        """All that follows the head up to the action's end: its opening tag and its tokens."""
        return self.token_ids[len(self.spans.head) : self.spans.action.stop]

    @property
    def thinking_tokens(self) -> int:
        return len(self.spans.thought)

    @property
    def comparable(self) -> bool:
        """Whether there is a level to compare with others, and an action to score."""
        return self.reading.valid and len(self.spans.action) > 0


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
        return float(np.mean(self.action_logprobs, dtype=np.float64))

    @property
    def action_entropy(self) -> float:
        """−Σ p log p, mean over the action's tokens."""
        return float(np.mean(self.action_entropies, dtype=np.float64))


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
