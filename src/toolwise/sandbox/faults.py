"""The kinds of failure of untrusted code, and how a fault travels from a worker to the trainer."""

from __future__ import annotations

from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.rewards.results import fault_result
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
    """The requested sandbox cannot be provided."""


class WorkerFault(Exception):  # noqa: N818 (an error in user code, which becomes a result)
    """A call failed; `kind` is one of KINDS."""

    def __init__(self, kind: str, message: str, traceback: str = "", *, not_received: bool = False) -> None:
        super().__init__(message)
        self.kind, self.message, self.traceback = kind, message, traceback
        self.loading = False
        """Whether it happened while loading, before the first call: every call would fail the same way."""
        self.not_received = not_received
        """Whether the process was dead or stopped before it read the call: the call is not to blame."""

    def result(self) -> EvaluateResult:
        return fault_result(self.kind, self.message, self.traceback)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def sanitize_text(text: object, max_chars: int) -> str:
    """`text` without lone surrogates and cut to about `max_chars` characters, so that it can be stored anywhere."""
    if not isinstance(text, str):
        return ""
    if len(text) > max_chars:
        text = text[: max_chars // 2] + " … " + text[-max_chars // 2 :]
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_fault(value: Any) -> WorkerFault:
    """Parse a fault that a worker reports; validated like everything a worker sends."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return WorkerFault("bad_type", "the worker reported an invalid fault")
    message = sanitize_text(value.get("message"), MAX_MESSAGE_CHARS) or "no message"
    return WorkerFault(kind, message, sanitize_text(value.get("traceback"), MAX_TRACEBACK_CHARS))
