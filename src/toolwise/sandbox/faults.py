"""The ways in which other people's code fails, by name, and how a fault crosses from a worker to the trainer."""

from __future__ import annotations

from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.rewards.function import faulty
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
LONGEST_MESSAGE, LONGEST_TRACEBACK = 2_000, 20_000


class SandboxError(ToolwiseError):
    """A sandbox that cannot be had as it was asked for."""


class WorkerFault(Exception):  # noqa: N818 (a fault of the user's code, which becomes a result)
    """One call came to nothing: `kind` is one of KINDS."""

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.kind, self.message, self.traceback = kind, message, traceback
        self.loading = False
        """Whether it happened before the first call: then every call would meet it."""
        self.unreached = False
        """Whether its process was gone, or stopped, before it had read the call: nobody's fault who called."""

    def result(self) -> EvaluateResult:
        return faulty(self.kind, self.message, self.traceback)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def printable(text: object, longest: int) -> str:
    """`text` as something that can be kept anywhere: no lone surrogates, no more than `longest` characters."""
    if not isinstance(text, str):
        return ""
    if len(text) > longest:
        text = text[: longest // 2] + " … " + text[-longest // 2 :]
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def read_fault(value: Any) -> WorkerFault:
    """A fault as a worker tells it; its words are checked like everything that it sends."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        return WorkerFault("bad_type", "the worker answered with a fault that is none")
    message = printable(value.get("message"), LONGEST_MESSAGE) or "no message"
    return WorkerFault(kind, message, printable(value.get("traceback"), LONGEST_TRACEBACK))
