"""One small exception tree. Whatever a person can put right is a `ToolwiseError`: one line that says what is
wrong, where, and what to do. The command line prints it without a traceback and exits with status 2."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class ToolwiseError(Exception):
    """Something the user gave us is wrong, or something asked for cannot be had."""


class ConfigError(ToolwiseError):
    """A configuration file or `--set` that does not make a run."""


class DataError(ToolwiseError):
    """A file of tasks or conversations; the message names the file, the row and the field."""


class ModelError(ToolwiseError):
    """A model folder or tokenizer that cannot be used."""


class TemplateLimitError(ToolwiseError):
    """A chat template that does not end, or makes more than a conversation can be: not one to try in another way."""


class CheckpointError(ToolwiseError):
    """A checkpoint or run folder that is missing, torn or tampered with."""


class RewardError(ToolwiseError):
    """A reward function that cannot be used, or fails more often than the run allows."""


class FaultRateError(ToolwiseError):
    """More of a run fails than `faults` allows."""


class PolicyError(ToolwiseError):
    """A policy that cannot do what was asked of it."""


class ContextFullError(PolicyError):
    """The conversation has outgrown the model's context: the episode ends, the run goes on."""


class MissingExtraError(ToolwiseError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'toolwise[{extra}]'")


def import_extra(package: str, extra: str) -> Any:
    """Import an optional dependency; raise `MissingExtraError` if it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise MissingExtraError(package, extra) from None
