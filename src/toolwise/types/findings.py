"""What a check found, of a reward, a tool, an environment or a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "warning", "wrong", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    name: str
    """Short: `determinism` of a check, `constant_reward` of a run."""
    verdict: Verdict
    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    """The first few failures and tracebacks."""
    cure: str = ""
    """What to do about it."""
    step: int = 0
    """The training step at which it was found; 0: before the first step."""
    steps: tuple[int, ...] = ()
    """First and last training step that show it."""
    rollouts: tuple[str, ...] = ()
    """Ids of some rollouts that show it."""
    settings: tuple[str, ...] = ()
    """Settings to try, such as actor.lr."""

    @property
    def severity(self) -> Literal["critical", "warning"]:
        """Of a run: critical if going on is a waste of time."""
        return "critical" if self.verdict == "wrong" else "warning"

    def __str__(self) -> str:
        return f"{self.name}: {self.says}. {self.cure}."
