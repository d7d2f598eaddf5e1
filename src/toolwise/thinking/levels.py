"""The four levels of thinking, read from one template file that a user can replace (levels.toml).

A level is a decision: the policy writes `<level>k</level>`, the thought that level asks for, and the action.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from toolwise.errors import ConfigError

LEVEL_COUNT = 4
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
    """A whole reply, with `{action}` and the parts of its thought in braces."""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """What the thought is made of, in order."""
        return tuple(name for name in _PART.findall(self.skeleton) if name != "action")

    @property
    def thinks(self) -> bool:
        return THINK in self.skeleton

    @property
    def opening(self) -> str:
        """What forces the level: the reply up to where its thought begins; without a thought, up to the action."""
        mark = THINK if self.thinks else ACTION
        before, _, _ = self.skeleton.partition(mark)
        return before + THINK if self.thinks else before

    def head(self, thought: str = "") -> str:
        """The reply with this thought in it, cut before the action."""
        return f"{self.opening}{thought}{END_THINK}" if self.thinks else self.opening

    def thought(self, parts: Mapping[str, str]) -> str:
        """The thought that the skeleton makes of its parts; parts that it does not name are left out."""
        inside = self.skeleton.partition(THINK)[2].partition(END_THINK)[0]
        missing = [name for name in self.parts if name not in parts]
        if missing:
            raise ConfigError(f"level {self.number} ({self.name}) wants {missing[0]!r} in its thought: give that part")
        return _PART.sub(lambda found: parts[found.group(1)], inside)

    def write(self, action: str, parts: Mapping[str, str] | None = None) -> str:
        """A whole reply."""
        return f"{self.head(self.thought(parts or {}))}{ACTION}{action}{END_ACTION}"


@dataclass(frozen=True)
class Levels:
    """The levels of a template file, from the first to the last."""

    prompt: str
    """How they are explained to a model; `{levels}` stands for a line each."""
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
            f"{level.number} ({level.name}): {level.instruction}. {_elide_parts(level.skeleton)}" for level in self.all
        ]
        return self.prompt.replace("{levels}", "\n".join(lines)).strip()


def load_levels(path: str | Path = LEVELS_FILE) -> Levels:
    """The levels that a template file describes."""
    where = Path(path)
    try:
        table = tomllib.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ConfigError(f"levels: cannot read {where}: {fault}") from None
    unknown = sorted(set(table) - {"prompt", "level"})
    if unknown:
        raise ConfigError(f"levels: {where} has {unknown[0]!r}; it may have prompt and four [[level]] tables")
    rows = table.get("level", [])
    if not isinstance(rows, list) or len(rows) != LEVEL_COUNT:
        found = len(rows) if isinstance(rows, list) else "no list of"
        raise ConfigError(f"levels: {where} has {found} [[level]] tables; there must be {LEVEL_COUNT}")
    prompt = table.get("prompt", "{levels}")
    if not isinstance(prompt, str) or "{levels}" not in prompt:
        raise ConfigError(f"levels: {where}: prompt must be text with {{levels}} in it, where the levels go")
    return Levels(prompt, tuple(_read_level(where, number, row) for number, row in enumerate(rows, start=1)))


def _read_level(where: Path, number: int, row: object) -> Level:
    at = f"levels: {where}, level {number}"
    if not isinstance(row, dict) or sorted(row) != sorted(_KEYS):
        raise ConfigError(f"{at}: must have exactly {', '.join(_KEYS)}")
    empty = [key for key in _KEYS if not isinstance(row[key], str) or not row[key].strip()]
    if empty:
        raise ConfigError(f"{at}: {empty[0]} must be text and not empty")
    level = Level(number, *(row[key].strip() for key in _KEYS))
    thought = rf"{THINK}(?:(?!</?\w+>).)*{END_THINK}" if number > 1 else ""
    wanted = rf"<level>{number}</level>{thought}{ACTION}\{{action\}}{END_ACTION}"
    if not re.fullmatch(wanted, level.skeleton, re.DOTALL):
        shape = f"<level>{number}</level>{f'{THINK}…{END_THINK}' if number > 1 else ''}{ACTION}{{action}}{END_ACTION}"
        raise ConfigError(f"{at}: the skeleton must be {shape}, got {level.skeleton!r:.80}")
    if level.skeleton.count("{action}") > 1:
        raise ConfigError(f"{at}: the skeleton has {{action}} in its thought, which would teach thoughts to name it")
    return level


def _elide_parts(skeleton: str) -> str:
    return _PART.sub("…", skeleton)


DEFAULT_LEVELS = load_levels()
"""Those that ship."""
