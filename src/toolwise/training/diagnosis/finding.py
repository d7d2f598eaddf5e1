"""One finding about a run, for the console, the report and summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a run does not learn as intended."""

    kind: str
    """A short name: constant_reward, replies_cut, prompt_too_long, …"""
    cause: str
    cure: str
    step: int
    """The training step at which it was found; 0: before the first step."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.cause}. {self.cure}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Ignores fields written by other versions."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})
