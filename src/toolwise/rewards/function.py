"""The `@reward_function` decorator: finds reward functions, checks their signatures and parses what they return.

pointwise   f(messages, ground_truth, **kwargs) -> EvaluateResult | float | dict
batch       f(rollouts_messages, ground_truths, **kwargs) -> list of the same
group       f(group_messages, ground_truth, **kwargs) -> list of the same: all rollouts of one task
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any, TypeVar, overload

from pydantic import BaseModel, ValidationError

from toolwise.config.imports import did_you_mean, load_module, load_reference
from toolwise.errors import ConfigError, RewardError
from toolwise.rewards.result_bounds import find_excess, truncate_result
from toolwise.rewards.signature import Mode, Signature, infer_mode
from toolwise.types import EvaluateResult, EvaluationFault
from toolwise.types.results import MetricResult, StepOutput, unwrap_scalar
from toolwise.untrusted.bounds import in_bounds

F = TypeVar("F", bound=Callable[..., Any])


@overload
def reward_function(function: F) -> F: ...
@overload
def reward_function(*, mode: Mode | None = None) -> Callable[[F], F]: ...
def reward_function(function: F | None = None, *, mode: Mode | None = None) -> F | Callable[[F], F]:
    """Marks a function as a reward. Unless `mode` is given, it is inferred from the first parameter."""

    def mark(f: F) -> F:
        f.__toolwise_reward_mode__ = mode or infer_mode(f, _function_name(f))  # type: ignore[attr-defined]
        return f

    return mark(function) if function is not None else mark


def _function_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward as a run sees it: its name, its signature and the arguments from the configuration.

    `function` is set only if it was loaded into this process; otherwise a worker loads it by `reference`.
    """

    name: str
    signature: Signature
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    reference: str | None = None
    timeout_s: float | None = None
    """Limit on an async call in this process; None if it is trusted to end."""

    def __post_init__(self) -> None:
        unknown = [key for key in self.kwargs if key not in self.signature.accepted_kwargs(self.kwargs)]
        if unknown:
            raise RewardError(
                f"reward {self.name} takes no argument {unknown[0]!r}: add it to the function or remove it"
            )

    @classmethod
    def of(cls, source: str | Callable[..., Any] | Reward, kwargs: Mapping[str, Any] | None = None) -> Reward:
        """Loads a reference, a function or a `Reward` into this process and checks `kwargs` against the signature."""
        if isinstance(source, Reward):
            return replace(source, kwargs={**source.kwargs, **(kwargs or {})})
        function = find_reward(source) if isinstance(source, str) else source
        if not callable(function):
            raise ConfigError(f"reward {source!r} is a {type(function).__name__}, not a function")
        name, reference = (source, source) if isinstance(source, str) else (_function_name(function), None)
        return cls(name, Signature.of(function, name), dict(kwargs or {}), function, reference)

    @property
    def mode(self) -> Mode:
        return self.signature.mode

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function with the `kwargs` that it accepts."""
        if self.function is None:
            raise RewardError(f"reward {self.name} is not loaded in this process: run it in a sandbox")
        return self.function(*args, **self.signature.accepted_kwargs(kwargs))


def find_reward(reference: str) -> Any:
    """`module:function`, `path.py:function`, or a module or file with exactly one decorated function."""
    if ":" in reference:
        return load_reference(reference, what="reward")
    module = load_module(reference, what="reward")
    marked = {
        name: value
        for name, value in vars(module).items()
        if hasattr(value, "__toolwise_reward_mode__") and getattr(value, "__module__", None) == module.__name__
    }
    if len(marked) != 1:
        problem = f"it has {', '.join(sorted(marked))}: choose one as {reference}:NAME" if marked else "it has none"
        raise ConfigError(f"reward: {reference} must have exactly one function marked @reward_function; {problem}")
    return next(iter(marked.values()))


def read_result(value: Any) -> EvaluateResult:
    """Converts a return value to an `EvaluateResult`; an invalid value becomes a typed fault, never a silent 0."""
    if isinstance(value, EvaluateResult):
        return _check_result(value)
    try:
        if not isinstance(value, dict):
            score = _number(value)
            if score is None:
                return fault_result(
                    "bad_type", f"a reward must return a number or an EvaluateResult, not {_describe_type(value)}"
                )
            return _check_result(EvaluateResult(score=score)) if math.isfinite(score) else _non_finite_result(score)
        fields = dict(value)
        score = _number(fields.get("score"))
        if score is not None and not math.isfinite(score):
            return _non_finite_result(score)
        return _check_result(EvaluateResult.model_validate(fields))
    except OverflowError:
        return fault_result("non_finite", "the score is too large for a float")
    except ValidationError as fault:
        return fault_result("bad_type", _describe_error(fault.errors()[0]))


def _number(value: Any) -> float | None:
    """`value` as a float, or None if it is not a number. Bools and NumPy or torch scalars count as numbers."""
    scalar = unwrap_scalar(value)
    if isinstance(scalar, complex) or not isinstance(scalar, Real | Decimal):
        return None
    return float(scalar)


def _non_finite_result(score: float) -> EvaluateResult:
    return fault_result("non_finite", f"the score is {score}")


_NESTED_MODELS: dict[str, type[BaseModel]] = {
    "step_outputs": StepOutput,
    "metrics": MetricResult,
    "error": EvaluationFault,
}


def _describe_error(reason: Any) -> str:
    """One line about a validation error in a returned dictionary."""
    *path, name = map(str, reason["loc"] or ("result",))
    if reason["type"] != "extra_forbidden":
        return f"{'.'.join((*path, name))}: {reason['msg']}"
    known = list((_NESTED_MODELS[path[0]] if path else EvaluateResult).model_fields)
    hint = did_you_mean(name, known) or f"; known keys: {', '.join(known)}"
    return f"{'.'.join(path) or 'the result'} has an unknown key {name!r}{hint}"


def _check_result(result: EvaluateResult) -> EvaluateResult:
    """Rejects results beyond the size limits, and valid results without a finite score.

    If there is a score, a bad step reward is left to the aligner, which reports and ignores it.
    """
    if (excess := find_excess(result)) is not None:
        return fault_result(*excess)
    result = truncate_result(result)
    if not result.is_score_valid or result.error is not None:
        return result
    for name, metric in result.metrics.items():
        if not math.isfinite(metric.score):
            return fault_result("non_finite", f"the metric {name!r} is {metric.score}")
    if result.score is None:
        for output in result.step_outputs or ():
            if not in_bounds(output.base_reward):
                message = f"the base_reward of step {output.step_index} is {output.base_reward}, and there is no score"
                return fault_result("out_of_range" if math.isfinite(output.base_reward) else "non_finite", message)
        return fault_result("bad_type", "the result has no score: set one, or set is_score_valid=False")
    return result if math.isfinite(result.score) else _non_finite_result(result.score)


def _describe_type(value: Any) -> str:
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}{f' of shape {tuple(shape)}' if isinstance(shape, tuple) else ''}"


def fault_result(kind: str, message: str, traceback: str = "") -> EvaluateResult:
    """An invalid result that carries the reason."""
    fault = EvaluationFault(kind=kind, message=message, traceback=traceback)
    return EvaluateResult(score=None, is_score_valid=False, reason=message, error=fault)


def read_results(values: Any, count: int) -> list[EvaluateResult]:
    """Converts what a batch function returned for `count` rollouts: a list, array or tensor of that length."""
    if not isinstance(values, Sequence) and hasattr(type(values), "tolist") and getattr(values, "ndim", 0) > 0:
        values = values.tolist()  # NumPy or torch, without importing either
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return [fault_result("bad_type", f"a batch reward must return a list, not {_describe_type(values)}")] * count
    if len(values) != count:
        return [
            fault_result("wrong_length", f"a batch reward returned {len(values)} results for {count} rollouts")
        ] * count
    return [read_result(value) for value in values]
