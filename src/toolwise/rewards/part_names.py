"""Names of a reward's parts for metrics, records and reports: short, unique and without a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import PurePath
from typing import Any

from toolwise.errors import ConfigError
from toolwise.rewards.function import Reward

RewardSource = str | Callable[..., Any] | Reward


def part_names(sources: Sequence[RewardSource], given: Sequence[str] = ()) -> list[str]:
    """One name per source, in order. `given` holds the configured names ("" means none).

    A part without a name takes its function's name; if several share it, `module:function`, then numbered.
    """
    names = [*given, *[""] * (len(sources) - len(given))]
    duplicates = [name for name, times in Counter(filter(None, names)).items() if times > 1]
    if duplicates:
        raise ConfigError(f"reward.parts: two parts have the name {duplicates[0]!r}; give each a different one")
    origins = [_split_source(source) for source in sources]
    shared = Counter(function or module for (module, function), name in zip(origins, names, strict=True) if not name)
    for index, (module, function) in enumerate(origins):
        if not names[index]:
            short = function or module
            name = f"{module}:{function}" if module and function and shared[short] > 1 else short
            candidates = chain([name], (f"{name}-{number}" for number in count(2)))
            names[index] = next(candidate for candidate in candidates if candidate not in names)
    return names


def _split_source(source: RewardSource) -> tuple[str, str]:
    """The last component of the module or file, and the function name if the source has one."""
    if isinstance(source, Reward):
        source = source.reference or source.function or source.name
    if not isinstance(source, str):
        name = str(getattr(source, "__name__", type(source).__name__))
        return source.__module__.rpartition(".")[2], name
    module, _, function = ("", "", "") if source.endswith(".py") else source.rpartition(":")
    home = module or source
    return PurePath(home).stem if home.endswith(".py") else home.rpartition(".")[2], function if module else ""
