"""The four thinking levels, read from a template file that users can replace (levels.toml).

Choosing a level is part of the policy's reply: `<level>k</level>`, the thought the level calls for, then the action.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints

from toolwise.config.loader import Section, build_config, read_settings
from toolwise.errors import ConfigError
from toolwise.types import LEVEL_COUNT

LEVELS_FILE = Path(__file__).with_name("levels.toml")
THINK, END_THINK = "<think>", "</think>"
ACTION, END_ACTION = "<action>", "</action>"
_PART = re.compile(r"\{(\w+)\}")
_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True)
class Level:
    """One way to think before an action."""

    number: int
    """1 to 4."""
    name: str
    instruction: str
    """One line for the prompt."""
    skeleton: str
    """A complete reply, with `{action}` and the parts of its thought in braces."""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts of the thought, in order."""
        return tuple(name for name in _PART.findall(self.skeleton) if name != "action")

    @property
    def thinks(self) -> bool:
        return THINK in self.skeleton

    @property
    def opening(self) -> str:
        """Prefix that forces the level: the reply up to the start of its thought or, without one, up to the action."""
        before, _, _ = self.skeleton.partition(THINK if self.thinks else ACTION)
        return before + THINK if self.thinks else before

    def head(self, thought: str = "") -> str:
        """The reply with this thought, up to the action."""
        return f"{self.opening}{thought}{END_THINK}" if self.thinks else self.opening

    def thought(self, parts: Mapping[str, str]) -> str:
        """Fill the skeleton's thought with `parts`; parts it does not name are ignored."""
        for name in self.parts:
            if name not in parts:
                raise ConfigError(f"level {self.number} ({self.name}) needs the part {name!r} in its thought: add it")
        inside = self.skeleton.partition(THINK)[2].partition(END_THINK)[0]
        return _PART.sub(lambda match: parts[match.group(1)], inside)

    def write(self, action: str, parts: Mapping[str, str] | None = None) -> str:
        """A complete reply."""
        return f"{self.head(self.thought(parts or {}))}{ACTION}{action}{END_ACTION}"


@dataclass(frozen=True)
class Levels:
    """The levels of a template file, in order."""

    prompt: str
    """Explanation for the model; `{levels}` is replaced by one line per level."""
    all: tuple[Level, ...]

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Level]:
        return iter(self.all)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(level.number for level in self.all)

    def by_number(self, number: int) -> Level:
        return self.all[number - 1]

    def explain(self) -> str:
        """The text for a system prompt."""
        lines = [
            f"{level.number} ({level.name}): {level.instruction}. {_PART.sub('…', level.skeleton)}"
            for level in self.all
        ]
        return self.prompt.replace("{levels}", "\n".join(lines)).strip()


class _LevelTable(Section):
    name: _Text
    instruction: _Text
    skeleton: _Text


class _LevelsFile(Section):
    prompt: str = Field(default="{levels}", pattern=r"\{levels\}")
    level: list[_LevelTable] = Field(min_length=LEVEL_COUNT, max_length=LEVEL_COUNT)


def load_levels(path: str | Path = LEVELS_FILE) -> Levels:
    """Read and check a template file."""
    file = build_config(_LevelsFile, read_settings(path), source=f"levels: {path}")
    levels = [Level(number, **dict(table)) for number, table in enumerate(file.level, start=1)]
    for level in levels:
        _check_skeleton(level, f"levels: {path}, level {level.number}")
    return Levels(file.prompt, tuple(levels))


def _check_skeleton(level: Level, where: str) -> None:
    thought = f"{THINK}…{END_THINK}" if level.number > 1 else ""
    shape = f"<level>{level.number}</level>{thought}{ACTION}{{action}}{END_ACTION}"
    if not re.fullmatch(re.escape(shape).replace("…", r"(?:(?!</?\w+>).)*"), level.skeleton, re.DOTALL):
        raise ConfigError(f"{where}: the skeleton must be {shape}, got {level.skeleton!r:.80}")
    if level.skeleton.count("{action}") > 1:
        raise ConfigError(
            f"{where}: the skeleton has {{action}} in its thought, which would train thoughts to state the action"
        )


DEFAULT_LEVELS = load_levels()
"""The built-in levels."""
