"""Rollouts of finished prompts as bytes, for checkpoints: exact, without pickle, and of known types only.

A user's environment may put any object into a step. A group with such an object cannot be stored; a resumed run rolls
it out again, with the same seeds.
"""

from __future__ import annotations

import base64
import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from random import Random
from typing import Any

import numpy as np
from pydantic import BaseModel

from toolwise.messages import Message, Prefix, ToolCall, construct
from toolwise.routing.inference_router import PredictedPrompt
from toolwise.routing.prompts import RoutedMessage
from toolwise.routing.samples import RoutePrediction
from toolwise.types import EvaluateResult, EvaluationFault, MetricResult, Rollout, StepData, StepOutput, Task, Usage
from toolwise.types.rollouts import StopReason
from toolwise.types.tokens import SampledTokens
from toolwise.types.turns import TurnRoute


@dataclass(frozen=True, slots=True)
class FinishedPrompt:
    """All rollouts of one prompt, with their rewards unless the learner computes those."""

    rollouts: list[Rollout]
    results: list[EvaluateResult] | None
    pending: dict[str, Any]
    """What a learning router remembers of the prompt, by group."""

    def __deepcopy__(self, memo: object) -> FinishedPrompt:
        """Itself: nobody changes it, and the state before a step is copied often."""
        return self


CLASSES: dict[str, Any] = {
    known.__name__: known
    for known in (
        *(FinishedPrompt, Rollout, StepData, Usage, StopReason, SampledTokens, TurnRoute, Message, ToolCall, Task),
        *(EvaluateResult, EvaluationFault, MetricResult, StepOutput, RoutePrediction, PredictedPrompt, RoutedMessage),
    )
}


class UnstorableError(Exception):
    """A group holds an object of an unknown type, or one that would come back as something else."""


def pack_group(group: FinishedPrompt) -> np.ndarray[Any, Any] | None:
    """The group as an array of bytes; None if it cannot be stored."""
    packer = _Packer()
    try:
        whole = packer.plain(group)
        text = json.dumps([whole, packer.lists])
    except Exception:  # an object of the user's can raise anything; a checkpoint must not fail because of it
        return None
    return np.frombuffer(bytearray(text.encode("ascii")), np.uint8)


def unpack_group(packed: np.ndarray[Any, Any], tasks: Mapping[str, Task]) -> FinishedPrompt:
    """The group again; `tasks` are those of the run by their ids."""
    whole, lists = json.loads(packed.tobytes().decode("ascii"))
    group = _Unpacker(tasks, lists).value(whole)
    assert isinstance(group, FinishedPrompt)
    return group


class _Packer:
    """Values as JSON: what that cannot express is an object with one key, which begins with `$`."""

    def __init__(self) -> None:
        self.lists: list[Any] = []
        """Those that prefixes share."""
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        """Keeps the addresses of the lists in use."""

    def plain(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": value.hex()}
        if type(value) is list:
            return [self.plain(item) for item in value]
        if type(value) is tuple:
            return {"$tuple": [self.plain(item) for item in value]}
        if type(value) is dict:
            return {"$dict": [[self.plain(key), self.plain(item)] for key, item in value.items()]}
        return self._object(value)

    def _object(self, value: Any) -> Any:
        if type(value) is Prefix:
            return {"$prefix": [self._shared(value), len(value)]}
        if type(value) is array:
            return {"$array": [value.typecode, _text(value.tobytes())]}
        if isinstance(value, np.ndarray | np.generic):
            return _plain_numpy(value)
        if type(value) is Random:
            return {"$random": self.plain(value.getstate())}
        name = type(value).__name__
        if CLASSES.get(name) is type(value):
            if isinstance(value, Enum):
                return {"$enum": [name, value.value]}
            if isinstance(value, BaseModel):
                parts = {key: self.plain(item) for key, item in value.__dict__.items()}
                private = [self.plain(value.__pydantic_private__)] if value.__pydantic_private__ else []
                return {"$model": [name, parts, sorted(value.model_fields_set), *private]}
            if is_dataclass(value):
                parts = {part.name: self.plain(getattr(value, part.name)) for part in fields(value)}
                return {"$class": [name, parts]}
        return self._tensor(value)

    def _tensor(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.layout != torch.strided:
            raise UnstorableError(type(value).__name__)
        dense = value.detach().cpu().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), _text(data)]}

    def _shared(self, prefix: Prefix[Any]) -> int:
        items = prefix._items
        if id(items) not in self._numbers:
            self._numbers[id(items)] = number = len(self.lists)
            self._kept.append(items)
            self.lists.append(None)
            self.lists[number] = self.plain(items)
        return self._numbers[id(items)]


class _Unpacker:
    def __init__(self, tasks: Mapping[str, Task], lists: list[Any]) -> None:
        self.tasks, self.lists = tasks, lists
        self._read: dict[int, Any] = {}
        self._tags: dict[str, Callable[[Any], Any]] = {
            "$float": float.fromhex,
            "$tuple": lambda items: tuple(self.value(item) for item in items),
            "$dict": lambda items: {self.value(key): self.value(item) for key, item in items},
            "$prefix": lambda known: Prefix(self._shared(known[0]), known[1]),
            "$array": lambda known: array(known[0], base64.b64decode(known[1])),
            "$numpy": _numpy,
            "$random": self._random,
            "$enum": lambda known: CLASSES[known[0]](known[1]),
            "$model": self._model,
            "$class": lambda known: CLASSES[known[0]](**{name: self.value(part) for name, part in known[1].items()}),
            "$tensor": _tensor,
        }

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        [(tag, known)] = plain.items()
        return self._tags[tag](known)

    def _shared(self, number: int) -> Any:
        if number not in self._read:
            self._read[number] = self.value(self.lists[number])
        return self._read[number]

    def _model(self, known: Any) -> Any:
        name, parts, given, *private = known
        read = {key: self.value(part) for key, part in parts.items()}
        if name == "Task" and read["task_id"] in self.tasks and self.tasks[read["task_id"]].__dict__ == read:
            return self.tasks[read["task_id"]]  # not a copy for each rollout
        model = construct(CLASSES[name], read, set(given))
        if private:
            object.__setattr__(model, "__pydantic_private__", self.value(private[0]))
        return model

    def _random(self, known: Any) -> Random:
        rng = Random()
        rng.setstate(self.value(known))
        return rng


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _plain_numpy(value: Any) -> Any:
    """An array or a scalar; not subclasses of arrays, and no types that their short names do not describe."""
    if type(value) not in (np.ndarray, value.dtype.type) or value.dtype.kind in "OV":
        raise UnstorableError(type(value).__name__)
    shape = None if type(value) is np.ndarray and not value.shape else list(value.shape)
    return {"$numpy": [value.dtype.str, shape, _text(value.tobytes())]}


def _numpy(known: Any) -> Any:
    """Of the shape None: an array without dimensions; of the shape []: a scalar."""
    dtype, shape, data = known
    found = np.ndarray(shape or (), dtype, bytearray(base64.b64decode(data)))
    return found[()] if shape == [] else found


def _tensor(known: Any) -> Any:
    import torch

    dtype, shape, data = known
    if 0 in shape:  # torch cannot read an empty buffer
        return torch.empty(shape, dtype=getattr(torch, dtype))
    flat = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).reshape(shape)
