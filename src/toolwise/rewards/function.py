"""`@reward_function`: people write Python over plain messages; this finds it, checks it, and reads what it returns.

pointwise   f(messages, ground_truth, **kwargs) -> EvaluateResult | float | dict
batch       f(rollouts_messages, ground_truths, **kwargs) -> list of the same
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from pydantic import ValidationError

from toolwise.errors import ConfigError, RewardError
from toolwise.references import load_reference
from toolwise.types import EvaluateResult, EvaluationFault

Mode = Literal["pointwise", "batch"]
F = TypeVar("F", bound=Callable[..., Any])


@overload
def reward_function(function: F) -> F: ...
@overload
def reward_function(*, mode: Mode | None = None) -> Callable[[F], F]: ...
def reward_function(function: F | None = None, *, mode: Mode | None = None) -> F | Callable[[F], F]:
    """Marks a function as a reward. The mode is read from its first parameter unless it is given."""

    def mark(f: F) -> F:
        f.__toolwise_reward_mode__ = mode or _mode_of(f)  # type: ignore[attr-defined]
        return f

    return mark(function) if function is not None else mark


def _mode_of(function: Callable[..., Any]) -> Mode:
    parameters = list(inspect.signature(function).parameters)
    return "batch" if parameters and parameters[0] == "rollouts_messages" else "pointwise"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, ready to be called."""

    function: Callable[..., Any]
    name: str
    mode: Mode
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str | Callable[..., Any] | Reward, kwargs: Mapping[str, Any] | None = None) -> Reward:
        """From a reference, a function, or a reward; keyword arguments are checked against the signature now."""
        if isinstance(source, Reward):
            return source
        function = load_reference(source, what="reward") if isinstance(source, str) else source
        if not callable(function):
            raise ConfigError(f"reward {source!r} is a {type(function).__name__}, not a function")
        name = source if isinstance(source, str) else getattr(function, "__name__", type(function).__name__)
        mode: Mode = getattr(function, "__toolwise_reward_mode__", None) or _mode_of(function)
        reward = cls(function, name, mode, dict(kwargs or {}))
        parameters = inspect.signature(function).parameters
        if len([p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]) < 2:
            raise RewardError(
                f"reward {name}: it must take (messages, ground_truth) or (rollouts_messages, ground_truths)"
            )
        unknown = [key for key in reward.kwargs if key not in reward.accepts(reward.kwargs)]
        if unknown:
            raise RewardError(f"reward {name} takes no argument {unknown[0]!r}: add it to the function or take it out")
        return reward

    def accepts(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `kwargs` that the function has a parameter for (all, where it takes **kwargs)."""
        parameters = list(inspect.signature(self.function).parameters.values())[2:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return dict(kwargs)
        names = {p.name for p in parameters}
        return {key: value for key, value in kwargs.items() if key in names}


def read_result(value: Any) -> EvaluateResult:
    """What a reward function returned, as an `EvaluateResult`; nonsense becomes a typed fault, never a silent 0."""
    if isinstance(value, EvaluateResult):
        return value
    try:
        if isinstance(value, bool) or value is None:
            return faulty("bad_type", f"a reward must return a number or an EvaluateResult, not {value!r}")
        if isinstance(value, int | float):
            score = float(value)
            if not math.isfinite(score):
                return faulty("non_finite", f"the score is {score}")
            return EvaluateResult(score=score)
        if isinstance(value, dict):
            return EvaluateResult.model_validate(value)
    except (ValidationError, OverflowError) as fault:
        return faulty("bad_type", str(fault).splitlines()[0])
    return faulty("bad_type", f"a reward must return a number or an EvaluateResult, not a {type(value).__name__}")


def faulty(kind: str, message: str, traceback: str = "") -> EvaluateResult:
    """A result that says why there is none."""
    fault = EvaluationFault(kind=kind, message=message, traceback=traceback)
    return EvaluateResult(score=None, is_score_valid=False, reason=message, error=fault)


def read_results(values: Any, count: int) -> list[EvaluateResult]:
    """What a batch function returned for `count` rollouts."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [faulty("bad_type", f"a batch reward must return a list, not a {type(values).__name__}")] * count
    if len(values) != count:
        return [faulty("wrong_length", f"a batch reward returned {len(values)} results for {count} rollouts")] * count
    return [read_result(value) for value in values]
