"""A policy that plays a script: what makes rollouts testable without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolwise.errors import PolicyError
from toolwise.messages import Message
from toolwise.rollout.parsers import PARSERS, to_action

Script = Sequence[str] | Callable[[Sequence[Message]], str]


class ScriptedPolicy:
    """Says the script's next line each turn, by the number of assistant messages it sees, or what a function of the
    messages gives. Lines are read by a tool-call parser like any model's text."""

    def __init__(self, script: Script, *, parser: str = "hermes") -> None:
        self.script = script
        self.parse = PARSERS[parser]

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        text = self.script(observation) if callable(self.script) else self._line(observation)
        return to_action(*self.parse(text)), text, None, None

    def _line(self, observation: Sequence[Message]) -> str:
        assert not callable(self.script)
        turn = sum(m.role == "assistant" for m in observation)
        if turn >= len(self.script):
            raise PolicyError(f"the script has {len(self.script)} lines and was asked for line {turn + 1}")
        return self.script[turn]
