"""The exception by which a tool reports a failed call, and the kind of failure."""

from __future__ import annotations

from toolwise.errors import ToolwiseError

SERVER_DOWN, DIED = "server_down", "died"


class ToolCallError(ToolwiseError):
    """Raised by `execute`: the model reads the message, and `failure` is the kind counted in the metrics.

    `tool_error`: the tool rejected the call, and the model can do better. `timeout`: it took too long. `server_down`:
    the service behind the tool is unavailable. `died`: its process died or never started. Both are
    infrastructure failures.
    """

    def __init__(self, text: str, failure: str = "tool_error") -> None:
        super().__init__(text)
        self.failure = failure

    @property
    def infrastructure(self) -> bool:
        """True if the rollout should be excluded from training, as the policy did not cause the failure."""
        return self.failure in (SERVER_DOWN, DIED)
