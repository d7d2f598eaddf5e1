"""Exceptions. Anything a user can fix is a `ToolwiseError`: one line that says what is wrong, where, and what to do.
The command line prints it without a traceback and exits with status 2."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class ToolwiseError(Exception):
    """The user's input is invalid, or a request cannot be satisfied."""


class ConfigError(ToolwiseError):
    """Invalid settings, in a config file, `--set` or Python arguments."""


class DataError(ToolwiseError):
    """Invalid tasks or conversations; the message names the file, the row and the field."""


class ModelError(ToolwiseError):
    """A model folder or tokenizer cannot be used."""


class TemplateLimitError(ToolwiseError):
    """A chat template does not terminate or its output is too large; retrying with another rendering is pointless."""


class CheckpointError(ToolwiseError):
    """A checkpoint or run folder is missing, incomplete or was modified."""


class QuestionError(ConfigError):
    """An agent cannot answer a question as it was asked; `option` names what asks too much, by its name in a
    request: route, budget, max_cost, messages, …"""

    def __init__(self, message: str, option: str) -> None:
        super().__init__(message)
        self.option = option


class RewardError(ToolwiseError):
    """A reward function cannot be used, or fails more often than `reward.max_error_rate` allows."""


class FaultRateError(ToolwiseError):
    """More rollouts or calls fail than the `faults` settings allow."""


class PolicyError(ToolwiseError):
    """A policy cannot serve a request."""


class ContextFullError(PolicyError):
    """The conversation exceeds the model's context: the episode ends, the run continues."""


class RouterError(ToolwiseError):
    """A user's router failed, or its decisions cannot be rolled out."""


class MissingExtraError(ToolwiseError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'toolwise[{extra}]'")


def import_extra(package: str, extra: str) -> Any:
    """Import an optional dependency; raise `MissingExtraError` if it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, extra) from None
