"""A parsed step of a rollout: its history, its sampled tokens and the reply they encode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolwise.thinking.reply import ParsedReply
from toolwise.thinking.token_spans import TokenSpans


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """One decision of a rollout."""

    rollout_id: str
    group_id: str
    index: int
    history: Sequence[int]
    """Prompt token ids."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    text: str
    reply: ParsedReply
    spans: TokenSpans
    kind: str | None = None
    """Kind of step, if the environment reports it: "easy", "hard", …"""

    @property
    def action_ids(self) -> Sequence[int]:
        return self.token_ids[self.spans.action.start : self.spans.action.stop]

    @property
    def tail_ids(self) -> Sequence[int]:
        """Tokens from the end of the head to the end of the action: its opening tag and the action."""
        return self.token_ids[len(self.spans.head) : self.spans.action.stop]

    @property
    def thinking_tokens(self) -> int:
        return len(self.spans.thought)

    @property
    def comparable(self) -> bool:
        """Whether the step has a level to compare and an action to score."""
        return self.reply.valid and len(self.spans.action) > 0
