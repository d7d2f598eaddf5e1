"""The ways in which other people's code fails, by name, and how a fault crosses from a worker to the trainer."""

from __future__ import annotations

from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.rewards.function import fault_result
from toolwise.types import EvaluateResult

KINDS = frozenset(
    {
        "timeout",
        "memory",
        "exception",
        "denied",
        "died",
        "bad_type",
        "non_finite",
        "out_of_range",
        "wrong_length",
        "too_big",
        "import",
    }
)
MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS = 2_000, 20_000


class SandboxError(ToolwiseError):
    """A sandbox that cannot be had as it was asked for."""


class WorkerFault(Exception):  # noqa: N818 (a fault of the user's code, which becomes a result)
    """One call came to nothing: `kind` is one of KINDS."""

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.traceback = kind, message, traceback
        self.loading = False
        """Whether it happened before the first call: then every call would meet it."""
        self.not_received = False
        """Whether its process was gone, or stopped, before it had read the call: nobody's fault who called."""

    def result(self) -> EvaluateResult:
        return fault_result(self.kind, self.message, self.traceback)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def sanitize_text(text: object, max_chars: int) -> str:
    """`text` as something that can be kept anywhere: no lone surrogates, no more than `max_chars` characters."""
    if not isinstance(text, str):
        return ""
    if len(text) > max_chars:
        text = text[: max_chars // 2] + " … " + text[-max_chars // 2 :]
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_fault(value: Any) -> WorkerFault:
    """A fault as a worker tells it; its words are checked like everything that it sends."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return WorkerFault("bad_type", "the worker answered with a fault that is none")
    message = sanitize_text(value.get("message"), MAX_MESSAGE_CHARS) or "no message"
    return WorkerFault(kind, message, sanitize_text(value.get("traceback"), MAX_TRACEBACK_CHARS))
