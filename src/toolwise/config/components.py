"""Creates a user's parts, such as a router, an estimator or a tracker, from a class or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from toolwise.config.imports import did_you_mean
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.untrusted.user_code import call_user_code, describe, user_location


def is_factory(target: Any) -> bool:
    """Whether `target` is called to create the part; if not, it is the part itself."""
    return isinstance(target, type) or inspect.isroutine(target)


def create(target: Any, kwargs: Mapping[str, Any], where: str, provided: Mapping[str, Any] | None = None) -> Any:
    """The part: `target` itself, or what it returns for `kwargs` and those of `provided` that it has parameters for."""
    check_kwargs(target, kwargs, where, provided or {})
    if not is_factory(target):
        return target
    arguments = {key: v for key, v in (provided or {}).items() if key in inspect.signature(target).parameters}
    try:
        return call_user_code(target, **arguments, **kwargs)
    except Exception as fault:
        error = str(fault) if isinstance(fault, ToolwiseError) else f"{describe(fault)}{user_location(fault)}"
        raise ConfigError(f"{where} could not be created: {' '.join(error.split())}") from fault


def check_kwargs(target: Any, kwargs: Mapping[str, Any], where: str, provided: Mapping[str, Any]) -> None:
    if kwargs and not is_factory(target):
        raise ConfigError(f"{where} is an object, not a class; set {', '.join(kwargs)} where it is created")
    if kwargs:
        check_options(target, kwargs, where, provided)


def check_options(
    target: Callable[..., Any], options: Mapping[str, Any], where: str, reserved: Mapping[str, Any]
) -> None:
    """Raise for options that `target` does not accept, and for those in `reserved`, which it receives anyway."""
    parameters = inspect.signature(target).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters if name not in reserved]
    for key in options:
        if key in reserved or (key not in known and not takes_all):
            hint = did_you_mean(key, known) or f"; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"{where} has no option {key!r}{hint}")
