"""How a tool says that a call came to nothing, and whose fault that was."""

from __future__ import annotations

from toolwise.errors import ToolwiseError

SERVER_DOWN = "server_down"


class ToolCallError(ToolwiseError):
    """Raised by `execute`: the message is what the model reads, `failure` the kind that is counted.

    `tool_error`: the tool itself refused, and the model may do better. `timeout`: it took too long. `server_down`:
    what stands behind the tool is gone; that is nobody's mistake but the infrastructure's.
    """

    def __init__(self, text: str, failure: str = "tool_error") -> None:
        super().__init__(text)
        self.failure = failure

    @property
    def infrastructure(self) -> bool:
        """True where a rollout should not be learned from: the policy could not have helped it."""
        return self.failure == SERVER_DOWN
