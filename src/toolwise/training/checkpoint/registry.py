"""Registers by name everything whose state a checkpoint saves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolwise.errors import CheckpointError
from toolwise.protocols import Stateful
from toolwise.training.checkpoint.manifest import MANIFEST

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class StateRegistry:
    """Stateful parts by name; each part's state is saved in files of that name."""

    def __init__(self) -> None:
        self._parts: dict[str, Stateful] = {}

    def register(self, name: str, stateful: Stateful) -> None:
        check_name(name)
        if name in self._parts:
            raise ValueError(f"{name!r} is already registered")
        self._parts[name] = stateful

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Restore every part; raise before changing anything if the names do not match."""
        missing, unexpected = self._parts.keys() - state.keys(), state.keys() - self._parts.keys()
        if missing or unexpected:
            problems = [f"lacks {', '.join(sorted(missing))}"] if missing else []
            problems += [f"has {', '.join(sorted(unexpected))}, unknown to this run"] if unexpected else []
            raise CheckpointError(f"the checkpoint {'; it '.join(problems)}: resume with the settings it was made with")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def check_name(name: str) -> None:
    if not _PART.fullmatch(name) or f"{name}.json" == MANIFEST:
        raise ValueError(f"{name!r} cannot name a part: use letters, digits, '_', '.', '-', not 'manifest'")
