"""What is wrong with a run: one finding, for the console, the report and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a run does not learn as it was meant to."""

    kind: str
    """A short name: constant_reward, replies_cut, prompt_too_long, …"""
    cause: str
    cure: str
    step: int
    """The training step at which it was found; 0: before the first."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause}. {self.cure}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Finding:
        """What another version wrote beside the fields of this one is left out."""
        return cls(**{part.name: written[part.name] for part in fields(cls)})
