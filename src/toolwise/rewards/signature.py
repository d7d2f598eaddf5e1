"""What a reward function takes, as data: known to a run without the function itself, which a worker has loaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
"""First parameters of the rewards of other libraries, which get texts where ours get conversations."""
_GROUND_TRUTH_NAMES = ("ground_truth", "ground_truths", "labels")
TASK_FIELDS = ("extra_info", "data_source")
"""Fields of a task that a function gets if it names them, a batch function as a list."""
_VERL_BATCH_FIELDS = {"extra_infos": "extra_info", "data_sources": "data_source"}
"""What verl calls them in batch rewards."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A function's mode and its parameters beyond the conversation and the ground truth."""

    mode: Mode
    first: tuple[str, ...]
    """The names of the two that are given by position."""
    names: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Those of `names` that have no default."""
    takes_any: bool = False
    """It has **kwargs."""
    is_async: bool = False
    """Its calls can overlap in one event loop."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Signature:
        parameters = _parameters(function, name)
        mode = getattr(function, "__toolwise_reward_mode__", None) or infer_mode(function, name)
        first, more = parameters[:2], parameters[2:]
        if [p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in first] != [True, True]:
            raise RewardError(f"reward {name}: it must take {SIGNATURE_FORMS}")
        named = [p for p in more if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return cls(
            mode=mode,
            first=tuple(p.name for p in first),
            names=tuple(p.name for p in named),
            required=tuple(p.name for p in named if p.default is p.empty),
            takes_any=any(p.kind is p.VAR_KEYWORD for p in more),
            is_async=_is_async(function),
        )

    def accepted_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `kwargs` that the function has a parameter for beyond its first two (all, with **kwargs)."""
        if self.takes_any:
            return {key: value for key, value in kwargs.items() if key not in self.first}
        return {key: value for key, value in kwargs.items() if key in self.names}

    def missing_arguments(self, given: Iterable[str]) -> list[str]:
        """What it cannot do without and nobody gives."""
        known = set(given)
        return [name for name in self.required if name not in known]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: Any) -> Signature:
        """Read as a stranger's word: raises ValueError where it is no signature."""
        if not isinstance(value, dict) or value.get("mode") not in ("pointwise", "batch", "group"):
            raise ValueError("no signature")
        lists = {key: value.get(key) for key in ("first", "names", "required")}
        if not all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists.values()):
            raise ValueError("no signature")
        first, names, required = (tuple(found or ()) for found in lists.values())
        flags = {key: value.get(key) is True for key in ("takes_any", "is_async")}
        return cls(value["mode"], first, names, required, **flags)


def infer_mode(function: Callable[..., Any], name: str) -> Mode:
    """What the name of its first parameter says; an error that shows what to write where it is another library's."""
    parameters = _parameters(function, name)
    if not parameters:
        return "pointwise"
    if parameters[0].name in OTHER_LIBRARY_PARAMETERS:
        raise RewardError(_porting_hint(parameters, name))
    return MODE_BY_FIRST_PARAMETER.get(parameters[0].name, "pointwise")


def _porting_hint(parameters: list[inspect.Parameter], name: str) -> str:
    first = parameters[0].name
    known = {*OTHER_LIBRARY_PARAMETERS, *_GROUND_TRUTH_NAMES}.difference(TASK_FIELDS)
    renamed = [p.replace(name=_VERL_BATCH_FIELDS.get(p.name, p.name), annotation=p.empty) for p in parameters]
    kept = [str(p) for p in renamed if p.name not in known and p.kind != p.VAR_POSITIONAL]
    short = name.rpartition(":")[2]
    shapes = [
        f"def {short}({', '.join([*two, *kept])})"
        for two in (("messages", "ground_truth"), ("rollouts_messages", "ground_truths"))
    ]
    return (
        f"reward {name}: its first parameter is {first!r}, as in rewards for {OTHER_LIBRARY_PARAMETERS[first]}; "
        f"here it gets whole "
        f'conversations: write {shapes[0]} for one rollout, whose last text is messages[-1]["content"], or {shapes[1]} '
        "for all of a step, which returns a list"
    )


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # some built-ins do not say what they take
        raise RewardError(f"reward {name}: Python cannot tell what it takes; wrap it in a def") from None
