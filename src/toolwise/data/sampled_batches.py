"""Batches whose tasks a sampler chooses: the counterpart of `Batches` for `data.sampler`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

from toolwise.config.components import create
from toolwise.config.imports import did_you_mean, load_reference
from toolwise.data.batches import NO_TASKS
from toolwise.data.samplers import SAMPLERS
from toolwise.data.task_set import TaskSet, find_numbers, fingerprint
from toolwise.errors import CheckpointError, ConfigError, ToolwiseError
from toolwise.protocols import Sampler
from toolwise.types import ScoredRollout, Task
from toolwise.untrusted.user_code import describe_at

KEY = "data.sampler"


class SampledBatches(Iterator[list[Task]]):
    """Endless batches of `batch_size` tasks. The state is the sampler's own."""

    def __init__(self, tasks: Sequence[Task], batch_size: int, sampler: Sampler) -> None:
        if isinstance(tasks, TaskSet) and tasks.weights:
            raise ConfigError(f"{KEY} is set and sources of data.train have weights: remove one of the two")
        if not tasks:
            raise ConfigError(NO_TASKS)
        self.tasks, self.sampler, self._batch_size = tasks, sampler, batch_size
        self._fingerprint = fingerprint(tasks)
        self.drawn = 0

    @property
    def batches_per_epoch(self) -> int:
        """As many as all tasks would fill."""
        return max(1, len(self.tasks) // self._batch_size)

    @property
    def next_size(self) -> int:
        return self._batch_size

    def __next__(self) -> list[Task]:
        drawn = self._call(lambda count: _as_list(self.sampler.draw(count)), self._batch_size)
        numbers = [_as_number(value, len(self.tasks)) for value in drawn] if isinstance(drawn, list) else []
        if None in numbers or len(numbers) != self._batch_size:
            raise ToolwiseError(
                f"{KEY}: {type(self.sampler).__name__}.draw({self._batch_size}) returned {drawn!r:.100}: it must "
                f"return {self._batch_size} integers from 0 to {len(self.tasks) - 1}"
            )
        self.drawn += len(numbers)
        return [self.tasks[number] for number in numbers if number is not None]

    def observe(self, scored: Sequence[ScoredRollout]) -> None:
        """Tell the sampler the scores of rollouts that were learned from, or dropped because their group had no
        signal; not of those that failed."""
        scores: dict[str, list[float]] = defaultdict(list)
        for s in scored:
            if s.result.has_valid_score and s.rollout.trainable:
                scores[s.rollout.task.task_id].append(s.score)
        if scores:
            numbers = find_numbers(self.tasks, scores)
            self._call(self.sampler.observe, {number: scores[task_id] for task_id, number in numbers.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "drawn": self.drawn, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "sampler" not in state:
            raise CheckpointError(f"the checkpoint was made without {KEY}: resume without it")
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError("the checkpoint was made with other data: resume with the data of the first run")
        try:
            self.sampler.load_state_dict(state["sampler"])
        except ToolwiseError:
            raise
        except Exception as fault:
            raise CheckpointError(
                f"{KEY}: {type(self.sampler).__name__} cannot load the checkpoint's state ({describe_at(fault)}): "
                "resume with the sampler of the first run"
            ) from fault
        self.drawn = state["drawn"]

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except ToolwiseError:
            raise
        except Exception as fault:
            raise ToolwiseError(f"{KEY}: {type(self.sampler).__name__} failed: {describe_at(fault)}") from fault


def _as_list(drawn: Any) -> Any:
    """What is iterable as a list: a generator of a user's runs here."""
    return list(drawn) if isinstance(drawn, Iterable) else drawn


def _as_number(value: Any, count: int) -> int | None:
    """The number of one of `count` tasks, also a numpy integer; None for anything else."""
    try:
        number = index(value)
    except TypeError:
        return None
    return number if 0 <= number < count and not isinstance(value, bool) else None


def build_sampler(source: Any, kwargs: dict[str, Any], tasks: Sequence[Task], seed: int) -> Sampler:
    """One that ships, by name; a user's by reference; or an object or class given in Python."""
    target = source
    if isinstance(source, str):
        if source not in SAMPLERS and ":" not in source:
            known = ", ".join(SAMPLERS)
            hint = did_you_mean(source, list(SAMPLERS))
            raise ConfigError(f"{KEY} is {source!r}; use {known} or package.module:Name{hint}")
        target = SAMPLERS[source] if source in SAMPLERS else load_reference(source, what=KEY)
    where = f"{KEY}: {source if isinstance(source, str) else type(source).__name__}"
    sampler = create(target, kwargs, where, provided={"tasks": tasks, "seed": seed})
    missing = [name for name in ("draw", "observe", "state_dict", "load_state_dict") if not hasattr(sampler, name)]
    if missing:
        raise ConfigError(f"{where} has no {', '.join(missing)}; subclass toolwise.Sampler")
    built: Sampler = sampler
    return built
