"""The `@reward_function` decorator, the signature of a reward function as plain data, and the reward as a run sees it.

pointwise   f(messages, ground_truth, **kwargs) -> EvaluateResult | float | dict
batch       f(rollouts_messages, ground_truths, **kwargs) -> list of the same
group       f(group_messages, ground_truth, **kwargs) -> list of the same: all rollouts of one task
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, overload

from pydantic import TypeAdapter

from toolwise.config.imports import load_module, load_reference
from toolwise.errors import ConfigError, RewardError

F = TypeVar("F", bound=Callable[..., Any])
Mode = Literal["pointwise", "batch", "group"]
MODE_BY_FIRST_PARAMETER: dict[str, Mode] = {"rollouts_messages": "batch", "group_messages": "group"}
SIGNATURE_FORMS = "(messages, ground_truth), (rollouts_messages, ground_truths) or (group_messages, ground_truth)"
OTHER_LIBRARY_PARAMETERS = {
    "completions": "TRL",
    "completion": "TRL",
    "prompts": "TRL",
    "prompt": "TRL",
    "completion_ids": "TRL",
    "completions_ids": "TRL",
    "data_source": "verl",
    "solution_str": "verl",
    "data_sources": "verl",
    "solution_strs": "verl",
    "response": "other libraries",
    "responses": "other libraries",
    "output": "other libraries",
    "outputs": "other libraries",
    "generations": "other libraries",
    "predictions": "other libraries",
}
"""First parameters of reward functions in other libraries, which receive texts where ours receive conversations."""
_GROUND_TRUTH_NAMES = ("ground_truth", "ground_truths", "labels")
TASK_FIELDS = ("extra_info", "data_source")
"""Task fields passed to a function that names them; a batch function gets a list."""
# verl's names for `TASK_FIELDS` in batch rewards.
_VERL_BATCH_FIELDS = {"extra_infos": "extra_info", "data_sources": "data_source"}


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's mode and its parameters beyond the conversation and the ground truth."""

    mode: Mode
    first: tuple[str, ...]
    """Names of the two positional parameters."""
    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """The entries of `names` without a default."""
    takes_any: bool = False
    """Whether it accepts **kwargs."""
    is_async: bool = False
    """Whether calls can overlap in one event loop."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Signature:
        parameters = _parameters(function, name)
        mode = getattr(function, "__toolwise_reward_mode__", None) or infer_mode(function, name)
        first, rest = parameters[:2], parameters[2:]
        if [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first] != [True, True]:
            raise RewardError(f"reward {name}: it must take {SIGNATURE_FORMS}")
        keywords = [p for p in rest if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            mode=mode,
            first=tuple(p.name for p in first),
            names=tuple(p.name for p in keywords),
            required=tuple(p.name for p in keywords if p.default is p.empty),
            takes_any=any(p.kind is p.VAR_KEYWORD for p in rest),
            is_async=any(map(inspect.iscoroutinefunction, (function, type(function).__call__))),
        )

    def accepted_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The `kwargs` that match a parameter after the first two; all of them if the function has **kwargs."""
        names = set(kwargs).difference(self.first) if self.takes_any else self.names
        return {key: value for key, value in kwargs.items() if key in names}

    def missing_arguments(self, given: Collection[str]) -> list[str]:
        """Required parameters that are not in `given`."""
        return [name for name in self.required if name not in given]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: Any) -> Signature:
        """Reads untrusted JSON; raises ValueError if it is not a signature."""
        return TypeAdapter(cls).validate_python(value)


def infer_mode(function: Callable[..., Any], name: str) -> Mode:
    """The mode implied by the first parameter's name.

    A name used by another library raises an error that shows how to port the function.
    """
    parameters = _parameters(function, name)
    first = parameters[0].name if parameters else ""
    if first in OTHER_LIBRARY_PARAMETERS:
        raise RewardError(_porting_hint(parameters, name))
    return MODE_BY_FIRST_PARAMETER.get(first, "pointwise")


def _porting_hint(parameters: list[inspect.Parameter], name: str) -> str:
    first = parameters[0].name
    dropped = {*OTHER_LIBRARY_PARAMETERS, *_GROUND_TRUTH_NAMES}.difference(TASK_FIELDS)
    renamed = [p.replace(name=_VERL_BATCH_FIELDS.get(p.name, p.name), annotation=p.empty) for p in parameters]
    extra = [str(p) for p in renamed if p.name not in dropped and p.kind != p.VAR_POSITIONAL]
    function_name = name.rpartition(":")[2]
    forms = [
        f"def {function_name}({', '.join([*pair, *extra])})"
        for pair in (("messages", "ground_truth"), ("rollouts_messages", "ground_truths"))
    ]
    return (
        f"reward {name}: its first parameter is {first!r}, as in rewards for {OTHER_LIBRARY_PARAMETERS[first]}; "
        f'Toolwise passes conversations: write {forms[0]} for one rollout (its reply is messages[-1]["content"]), '
        f"or {forms[1]} for all rollouts of a step, returning a list"
    )


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some built-ins have no introspectable signature
        raise RewardError(f"reward {name}: its signature cannot be inspected; wrap it in a def") from None


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
