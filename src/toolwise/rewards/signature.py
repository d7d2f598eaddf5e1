"""The signature of a reward function as plain data, so that a run can use it without loading the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from toolwise.errors import RewardError

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
_VERL_BATCH_FIELDS = {"extra_infos": "extra_info", "data_sources": "data_source"}
"""verl's names for `TASK_FIELDS` in batch rewards."""


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
        if self.takes_any:
            return {key: value for key, value in kwargs.items() if key not in self.first}
        return {key: value for key, value in kwargs.items() if key in self.names}

    def missing_arguments(self, given: Iterable[str]) -> list[str]:
        """Required parameters that are not in `given`."""
        available = set(given)
        return [name for name in self.required if name not in available]

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
    if not parameters:
        return "pointwise"
    if parameters[0].name in OTHER_LIBRARY_PARAMETERS:
        raise RewardError(_porting_hint(parameters, name))
    return MODE_BY_FIRST_PARAMETER.get(parameters[0].name, "pointwise")


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
