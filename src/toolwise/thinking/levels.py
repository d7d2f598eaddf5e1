"""The four thinking levels, read from a template file that users can replace (levels.toml).

Choosing a level is part of the policy's reply: `<level>k</level>`, the thought the level calls for, then the action.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from toolwise.errors import ConfigError
from toolwise.types import LEVEL_COUNT

LEVELS_FILE = Path(__file__).with_name("levels.toml")
THINK, END_THINK = "<think>", "</think>"
ACTION, END_ACTION = "<action>", "</action>"
_PART = re.compile(r"\{(\w+)\}")
_KEYS = ("name", "instruction", "skeleton")


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


def load_levels(path: str | Path = LEVELS_FILE) -> Levels:
    """Read and check a template file."""
    file = Path(path)
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"levels: cannot read {file}: {error}") from None
    if unknown := sorted(set(table) - {"prompt", "level"}):
        raise ConfigError(
            f"levels: {file} has an unknown key {unknown[0]!r}; only prompt and four [[level]] tables are allowed"
        )
    rows = table.get("level", [])
    if not isinstance(rows, list) or len(rows) != LEVEL_COUNT:
        count = len(rows) if isinstance(rows, list) else "no list of"
        raise ConfigError(f"levels: {file} has {count} [[level]] tables; there must be {LEVEL_COUNT}")
    prompt = table.get("prompt", "{levels}")
    if not isinstance(prompt, str) or "{levels}" not in prompt:
        raise ConfigError(f"levels: {file}: prompt must be a string that contains {{levels}}, where the levels go")
    return Levels(prompt, tuple(_read_level(file, number, row) for number, row in enumerate(rows, start=1)))


def _read_level(file: Path, number: int, row: object) -> Level:
    prefix = f"levels: {file}, level {number}"
    if not isinstance(row, dict) or sorted(row) != sorted(_KEYS):
        raise ConfigError(f"{prefix}: must have exactly {', '.join(_KEYS)}")
    if empty := [key for key in _KEYS if not isinstance(row[key], str) or not row[key].strip()]:
        raise ConfigError(f"{prefix}: {empty[0]} must be a non-empty string")
    level = Level(number, *(row[key].strip() for key in _KEYS))
    shape = f"<level>{number}</level>{f'{THINK}…{END_THINK}' if number > 1 else ''}{ACTION}{{action}}{END_ACTION}"
    if not re.fullmatch(re.escape(shape).replace("…", r"(?:(?!</?\w+>).)*"), level.skeleton, re.DOTALL):
        raise ConfigError(f"{prefix}: the skeleton must be {shape}, got {level.skeleton!r:.80}")
    if level.skeleton.count("{action}") > 1:
        raise ConfigError(
            f"{prefix}: the skeleton has {{action}} in its thought, which would train thoughts to state the action"
        )
    return level


DEFAULT_LEVELS = load_levels()
"""The built-in levels."""
