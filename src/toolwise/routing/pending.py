"""What a learning router remembers of prompts until it learns from their rollouts: checkpoints hold it beside those."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.protocols import Router


class RemembersPrompts(Router):
    """A router that learns from rollouts by what it remembers of their prompts."""

    @abstractmethod
    def pending_of(self, groups: Sequence[str]) -> dict[str, Any]:
        """group id -> what it remembers of the group's prompt."""

    @abstractmethod
    def add_pending(self, pending: Mapping[str, Any]) -> None:
        """Remember again what `pending_of` returned; replaces what it knows of these prompts."""

    @abstractmethod
    def forget(self, groups: Sequence[str]) -> None:
        """These groups are not rolled out."""
