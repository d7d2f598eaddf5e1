"""Samplers that ship: which tasks are trained on next (`data.sampler`). Without one, every epoch is a permutation.

uniform      each task once per epoch, in a new order; no batch is short
difficulty   tasks that the policy solves sometimes more often than those that it always or never solves
mixture      data sources in the shares of their weights, each in epochs of its own
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from toolwise.data.task_set import map_distinct
from toolwise.errors import CheckpointError, ConfigError
from toolwise.protocols import Sampler
from toolwise.types import Task


class Shuffled:
    """Numbers below `size` without end, one permutation after the other. The state is one number."""

    def __init__(self, size: int, seed: int, key: int = 0) -> None:
        self.size, self.position = size, 0
        self._seed, self._key = seed, key
        self._epoch, self._order = -1, np.zeros(0, dtype=np.int64)

    def __next__(self) -> int:
        epoch, place = divmod(self.position, self.size)
        if epoch != self._epoch:
            generator = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(self._key, epoch)))
            self._epoch, self._order = epoch, generator.permutation(self.size)
        self.position += 1
        return int(self._order[place])


class Uniform(Sampler):
    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._seed, self._stream = seed, Shuffled(len(tasks), seed)

    def draw(self, count: int) -> list[int]:
        return [next(self._stream) for _ in range(count)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._stream.position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_seed(state, self._seed)
        self._stream.position = state["position"]


class Difficulty(Sampler):
    """A task's weight is 4·p·(1 − p) + `floor`, where p is the moving average of its mean score, scaled from
    [`lowest`, `highest`] to [0, 1]. A task that was never seen has the weight of p = 1/2. No task comes twice in a
    batch, as long as there are enough."""

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        *,
        floor: float = 0.1,
        decay: float = 0.5,
        lowest: float = 0.0,
        highest: float = 1.0,
    ) -> None:
        for wrong, problem in (
            (not 0 < floor < math.inf, f"floor is {floor}: it must be above 0, so that every task keeps a chance"),
            (not 0 <= decay < 1, f"decay is {decay}: it must be at least 0 and below 1"),
            (not highest > lowest, f"highest is {highest}: it must be above lowest, {lowest}"),
        ):
            if wrong:
                raise ConfigError(problem)
        self.floor, self.decay, self.lowest, self.highest = floor, decay, lowest, highest
        self._seed, self._draws = seed, 0
        self._solved = np.full(len(tasks), np.nan)

    def weights(self) -> np.ndarray[Any, Any]:
        solved = np.where(np.isnan(self._solved), 0.5, self._solved)
        return np.asarray(4.0 * solved * (1.0 - solved) + self.floor)

    def draw(self, count: int) -> list[int]:
        generator = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(self._draws,)))
        self._draws += 1
        weights = self.weights()
        chosen = generator.choice(len(weights), count, replace=count > len(weights), p=weights / weights.sum())
        return [int(index) for index in chosen]

    def observe(self, scores: Mapping[int, Sequence[float]]) -> None:
        for index, values in scores.items():
            mean = (sum(values) / len(values) - self.lowest) / (self.highest - self.lowest)
            mean, old = min(1.0, max(0.0, mean)), self._solved[index]
            self._solved[index] = mean if np.isnan(old) else self.decay * old + (1.0 - self.decay) * mean

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws, "solved": self._solved.copy(), "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_seed(state, self._seed)
        self._draws, self._solved = state["draws"], np.array(state["solved"])


class Mixture(Sampler):
    """`weights`: data source (the rows' `data_source`) -> its share of the tasks, relative to the others."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, weights: Mapping[str, float] | None = None) -> None:
        if not isinstance(weights, Mapping) or not weights:
            raise ConfigError("weights is empty or not a table: give one such as {math = 3, search = 1}")
        self._members: dict[str, array[int]] = {}
        for index, source in enumerate(map_distinct(tasks, lambda task: task.data_source)):
            self._members.setdefault(source, array("q")).append(index)
        for name, weight in weights.items():
            if name not in self._members:
                known = ", ".join(sorted(map(repr, self._members)))
                raise ConfigError(f"weights names the data source {name!r}, but the tasks have: {known}")
            if not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise ConfigError(f"the weight of {name!r} is {weight!r:.60}: give a number above 0, or leave it out")
        self._seed = seed
        self._weights = dict(sorted(weights.items()))
        self._streams = {name: Shuffled(len(self._members[name]), seed, _key(name)) for name in self._weights}
        self._counts = dict.fromkeys(self._weights, 0)
        """Tasks drawn of each source with these weights."""

    def draw(self, count: int) -> list[int]:
        """Each task is of the source that is furthest behind its share."""
        drawn, total = [], sum(self._weights.values())
        for _ in range(count):
            made = sum(self._counts.values()) + 1
            missing = {n: w / total * made - self._counts[n] for n, w in self._weights.items()}
            name = max(missing, key=lambda n: missing[n])
            self._counts[name] += 1
            drawn.append(self._members[name][next(self._streams[name])])
        return drawn

    def state_dict(self) -> dict[str, Any]:
        positions = {name: stream.position for name, stream in self._streams.items()}
        counted = {"weights": dict(self._weights), "counts": dict(self._counts)}
        return {"positions": positions, **counted, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """With other weights than the state's, the shares are counted from here on."""
        _check_seed(state, self._seed)
        for name, stream in self._streams.items():
            stream.position = state["positions"].get(name, 0)
        same = state.get("weights") == self._weights
        self._counts = dict(state["counts"]) if same else dict.fromkeys(self._weights, 0)


def _check_seed(state: Mapping[str, Any], seed: int) -> None:
    """Older states do not say theirs."""
    if state.get("seed", seed) != seed:
        raise CheckpointError(
            f"the checkpoint's data seed is {state['seed']!r}, but now it is {seed!r}: the order of tasks would change "
            f"mid-epoch; resume with seed = {state['seed']!r}"
        )


def _key(name: str) -> int:
    """A number for a source that does not depend on the other sources."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "big")


SAMPLERS: dict[str, Any] = {"uniform": Uniform, "difficulty": Difficulty, "mixture": Mixture}
