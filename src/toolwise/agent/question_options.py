"""Checks the options of a question, so that a wrong type is an error that names the option."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from toolwise.errors import QuestionError

SAMPLING = ("temperature", "max_new_tokens", "options")
MIN_TEMPERATURE = 0.001
"""Lower ones overflow; greedy decoding needs none."""


def check_question_options(
    *, budget: Any, route: Any, cap: Any, seed: Any, do_sample: Any, sampling: Mapping[str, Any] | None
) -> None:
    """Raise a `QuestionError` for the first option of `Agent.ask` that is not what it must be."""
    for name, option, value in (("budget", "budget", budget), ("cap", "max_cost", cap)):
        if value is not None and value != math.inf and not (_is_number(value) and value >= 0):
            raise QuestionError(f"{name} is {_shown(value)}: give a number of at least 0", option)
    if not isinstance(route, str):
        raise QuestionError(f'route is {_shown(route)}: give the name of a route, or "auto"', "route")
    if not _is_whole(seed):
        raise QuestionError(f"seed is {_shown(seed)}: give a whole number", "seed")
    if not isinstance(do_sample, bool):
        raise QuestionError(f"do_sample is {_shown(do_sample)}: give True or False", "temperature")
    if sampling is not None:
        _check_sampling(sampling)


def _check_sampling(sampling: Any) -> None:
    if not isinstance(sampling, Mapping):
        raise QuestionError(f"sampling is {_shown(sampling)}: give a dictionary", "sampling")
    if unknown := [name for name in sampling if name not in SAMPLING]:
        raise QuestionError(f"sampling has no {_shown(unknown[0])}: it has {', '.join(SAMPLING)}", "sampling")
    temperature, limit = sampling.get("temperature"), sampling.get("max_new_tokens")
    if temperature is not None and not (_is_number(temperature) and temperature >= MIN_TEMPERATURE):
        problem = f"sampling: temperature is {_shown(temperature)}: give a number of at least {MIN_TEMPERATURE}"
        raise QuestionError(f"{problem}; greedy decoding is do_sample=False", "temperature")
    if limit is not None and (not _is_whole(limit) or limit < 1):
        problem = f"sampling: max_new_tokens is {_shown(limit)}: give a whole number of at least 1"
        raise QuestionError(problem, "max_tokens")
    if "options" in sampling:
        from toolwise.engine.request import ServingOptions

        if not isinstance(sampling["options"], ServingOptions):
            raise QuestionError(f"sampling: options is {_shown(sampling['options'])}: give ServingOptions", "sampling")


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return f"{value!r:.60}"
