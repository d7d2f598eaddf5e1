"""When an episode ends, and why: rules checked before and after the environment acts, each with its `StopReason`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from toolwise.rollout.decision import PolicyDecision
from toolwise.types import StopReason
from toolwise.types.tokens import NO_TOKENS
from toolwise.untrusted.patterns import Pattern


@dataclass(slots=True)
class Termination:
    """Termination rules and counters of one episode. The request itself handles the deadline and faults."""

    max_steps: int = 10
    max_tokens: int | None = None
    """Sampled tokens over the whole episode."""
    regex: Pattern | re.Pattern[str] | None = None
    """A task's regex is a `Pattern`, matched in linear time: it comes from the data and reads model output."""
    max_invalid_in_a_row: int = 3
    _steps: int = field(default=0, init=False)
    _tokens: int = field(default=0, init=False)
    _invalid_in_a_row: int = field(default=0, init=False)

    def stop_before_step(self, decision: PolicyDecision) -> StopReason | None:
        """Endings caused by the decision itself: the environment does not see it."""
        tokens = NO_TOKENS if decision.tokens is None else decision.tokens
        self._tokens += len(tokens.token_ids)
        if decision.action["type"] == "terminate":
            return StopReason.TERMINATED
        if tokens.finish_reason == "length":
            return StopReason.MAX_TOKENS
        if self.regex is not None and self.regex.search(decision.raw or decision.message.content or ""):
            return StopReason.REGEX
        return None

    def stop_after_step(
        self, decision: PolicyDecision, env_done: bool, info: dict[str, Any], *, structured: bool
    ) -> StopReason | None:
        """Endings caused by the environment."""
        self._invalid_in_a_row = 0 if info.get("is_action_valid", True) else self._invalid_in_a_row + 1
        if info.get("critical_error"):
            return StopReason.CRITICAL_ERROR
        if info.get("truncated"):
            return StopReason.ENV_TRUNCATED
        if env_done:
            answered = decision.action["type"] == "text" and structured
            return StopReason.ANSWERED if answered else StopReason.ENV_DONE
        if self._invalid_in_a_row >= self.max_invalid_in_a_row:
            return StopReason.REPEATED_INVALID
        return None

    def count_step(self) -> StopReason | None:
        """Count a step; ends an episode that could continue but has reached a limit."""
        self._steps += 1
        if self._steps >= self.max_steps:
            return StopReason.MAX_STEPS
        if self.max_tokens is not None and self._tokens >= self.max_tokens:
            return StopReason.MAX_TOKENS
        return None
