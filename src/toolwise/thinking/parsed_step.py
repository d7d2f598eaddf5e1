"""One step of a rollout as the thinking stage reads it: its history, its tokens and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolwise.thinking.reply import ParsedReply
from toolwise.thinking.token_spans import TokenSpans


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
