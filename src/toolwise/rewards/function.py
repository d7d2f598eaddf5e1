"""`@reward_function`: people write Python over plain messages; this finds it, checks it, and reads what it returns.

pointwise   f(messages, ground_truth, **kwargs) -> EvaluateResult | float | dict
batch       f(rollouts_messages, ground_truths, **kwargs) -> list of the same
group       f(group_messages, ground_truth, **kwargs) -> list of the same: all rollouts of one task
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeVar, overload

from pydantic import ValidationError

from toolwise.errors import ConfigError, RewardError
from toolwise.references import load_module, load_reference
from toolwise.rewards.signature import Mode, Signature, mode_of
from toolwise.types import EvaluateResult, EvaluationFault

F = TypeVar("F", bound=Callable[..., Any])


@overload
def reward_function(function: F) -> F: ...
@overload
def reward_function(*, mode: Mode | None = None) -> Callable[[F], F]: ...
def reward_function(function: F | None = None, *, mode: Mode | None = None) -> F | Callable[[F], F]:
    """Marks a function as a reward. The mode is read from its first parameter unless it is given."""

    def mark(f: F) -> F:
        f.__toolwise_reward_mode__ = mode or mode_of(f, _name_of(f))  # type: ignore[attr-defined]
        return f

    return mark(function) if function is not None else mark


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as a run knows it: its name, what it takes, and what the configuration gives it.

    The function itself is here only where it was loaded into this process; else a worker finds it by `reference`.
    """

    name: str
    signature: Signature
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    reference: str | None = None

    def __post_init__(self) -> None:
        unknown = [key for key in self.kwargs if key not in self.signature.accepts(self.kwargs)]
        if unknown:
            raise RewardError(
                f"reward {self.name} takes no argument {unknown[0]!r}: add it to the function or take it out"
            )

    @classmethod
    def of(cls, source: str | Callable[..., Any] | Reward, kwargs: Mapping[str, Any] | None = None) -> Reward:
        """From a reference, a function, or a reward, loaded here; arguments are checked against the signature now."""
        if isinstance(source, Reward):
            return replace(source, kwargs={**source.kwargs, **(kwargs or {})})
        function = find_reward(source) if isinstance(source, str) else source
        if not callable(function):
            raise ConfigError(f"reward {source!r} is a {type(function).__name__}, not a function")
        name, reference = (source, source) if isinstance(source, str) else (_name_of(function), None)
        return cls(name, Signature.of(function, name), dict(kwargs or {}), function, reference)

    @property
    def mode(self) -> Mode:
        return self.signature.mode

    def accepts(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return self.signature.accepts(kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The function's own word, with those of `kwargs` that it takes."""
        if self.function is None:
            raise RewardError(f"reward {self.name} is not loaded in this process: evaluate it in a sandbox")
        return self.function(*args, **self.accepts(kwargs))


def find_reward(reference: str) -> Any:
    """`module:function`, `path.py:function`, or a module or file with exactly one decorated function."""
    if ":" in reference:
        return load_reference(reference, what="reward")
    module = load_module(reference, what="reward")
    found = {
        name: value
        for name, value in vars(module).items()
        if hasattr(value, "__toolwise_reward_mode__") and getattr(value, "__module__", None) == module.__name__
    }
    if len(found) != 1:
        there = f"it has {', '.join(sorted(found))}: say which, as {reference}:NAME" if found else "it has none"
        raise ConfigError(f"reward: {reference} must have exactly one function marked @reward_function; {there}")
    return next(iter(found.values()))


def read_result(value: Any) -> EvaluateResult:
    """What a reward function returned, as an `EvaluateResult`; nonsense becomes a typed fault, never a silent 0."""
    if isinstance(value, EvaluateResult):
        return _checked(value)
    if value is None or isinstance(value, bool) or not isinstance(value, Real | dict):  # Real: numpy's numbers as well
        return faulty("bad_type", f"a reward must return a number or an EvaluateResult, not {_shown(value)}")
    try:
        given = value if isinstance(value, dict) else {"score": float(value)}
        score = given.get("score")
        if isinstance(score, Real) and not math.isfinite(score):
            return faulty("non_finite", f"the score is {score}")
        return _checked(EvaluateResult.model_validate(given))
    except OverflowError:
        return faulty("non_finite", "the score is too large for a float")
    except ValidationError as fault:
        reason = fault.errors()[0]
        return faulty("bad_type", f"{'.'.join(map(str, reason['loc']))}: {reason['msg']}")


def _checked(result: EvaluateResult) -> EvaluateResult:
    """A result that claims to count must have numbers to count."""
    if not result.is_score_valid or result.error is not None:
        return result
    if result.score is None:
        return faulty("bad_type", "the result has no score: set one, or say is_score_valid=False")
    if not math.isfinite(result.score):
        return faulty("non_finite", f"the score is {result.score}")
    for output in result.step_outputs or ():
        if not math.isfinite(output.base_reward):
            return faulty("non_finite", f"the base_reward of step {output.step_index} is {output.base_reward}")
    return result


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else f"a {type(value).__name__}"


def faulty(kind: str, message: str, traceback: str = "") -> EvaluateResult:
    """A result that says why there is none."""
    fault = EvaluationFault(kind=kind, message=message, traceback=traceback)
    return EvaluateResult(score=None, is_score_valid=False, reason=message, error=fault)


def read_results(values: Any, count: int) -> list[EvaluateResult]:
    """What a batch function returned for `count` rollouts."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return [faulty("bad_type", f"a batch reward must return a list, not {_shown(values)}")] * count
    if len(values) != count:
        return [faulty("wrong_length", f"a batch reward returned {len(values)} results for {count} rollouts")] * count
    return [read_result(value) for value in values]
