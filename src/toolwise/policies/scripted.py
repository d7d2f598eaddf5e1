"""A policy that follows a script, to test rollouts without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolwise.errors import PolicyError
from toolwise.messages import Message
from toolwise.rollout.call_format import ParserSpec, find_format
from toolwise.rollout.parsers import to_action

Script = Sequence[str] | Callable[[Sequence[Message]], str]


class ScriptedPolicy:
    """Replies with the script's next line, counted by the assistant messages it sees, or with the result of a function
    of the messages. Lines go through a tool-call parser like any model's text."""

    def __init__(self, script: Script, *, parser: ParserSpec = "hermes") -> None:
        self.script = script
        self.parse = find_format(parser).parse

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        text = self.script(observation) if callable(self.script) else self._line(observation)
        return to_action(*self.parse(text)), text, None, None

    def _line(self, observation: Sequence[Message]) -> str:
        assert not callable(self.script)
        turn = sum(m.role == "assistant" for m in observation)
        if turn >= len(self.script):
            raise PolicyError(f"the script has {len(self.script)} lines, but line {turn + 1} was requested")
        return self.script[turn]
