"""Gymnasium observations as text, and actions parsed from text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.envs.state_keys import to_jsonable
from toolwise.errors import ConfigError
from toolwise.rewards.transcript import split_thought

MAX_NUMBERS = 1000
"""Observations with more numbers are images or the like, and are not turned into text."""
MAX_LISTED = 50
"""Maximum number of actions listed in a menu or an error."""

_OPENING, _CLOSING = "<action>", "</action>"
_HIGHLIGHT = re.compile(r"\x1b\[(?!0m)[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def observation_text(value: Any) -> str:
    """An observation as text for the model: dictionaries one line per key, numbers with few digits."""
    if isinstance(value, str):
        return value
    flat = to_jsonable(value)
    if _count(flat) > MAX_NUMBERS:
        raise ConfigError(
            f"the observation has over {MAX_NUMBERS} numbers: set format_observation to turn it into text"
        )
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_format_value(item)}" for key, item in flat.items())
    rows = isinstance(flat, list) and flat and all(isinstance(row, list) for row in flat)
    return "\n".join(_format_value(row) for row in flat) if rows else _format_value(flat)


def rendered_text(drawing: Any) -> str:
    """The output of `render` in mode "ansi", with highlighted characters in brackets and without escape codes."""
    if not isinstance(drawing, str):
        raise ConfigError(
            f"env: draw = true, but the environment renders {type(drawing).__name__}, not text; leave it out"
        )
    return _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", drawing)).strip("\n")


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else 1


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_format_value(item)}' for key, item in value.items())}}}"
    return str(value)


def extract_action(text: str) -> str:
    """The action in the agent's text: its last `<action>` block, or everything after its thought."""
    text = split_thought(text)[1]
    action, position = text, 0
    while (begin := text.find(_OPENING, position)) >= 0 and (end := text.find(_CLOSING, begin)) >= 0:
        action, position = text[begin + len(_OPENING) : end], end + len(_CLOSING)
    return action.strip()


class ActionReader:
    """Parses actions of one action space. `names` are the names of a discrete space's actions, in order."""

    def __init__(self, space: Any, names: Sequence[str] | None = None) -> None:
        from gymnasium import spaces

        self.space = space
        self._discrete = isinstance(space, spaces.Discrete)
        self._text = isinstance(space, spaces.Text)
        self._first, self._count = (int(space.start), int(space.n)) if isinstance(space, spaces.Discrete) else (0, 0)
        self.names = [str(name) for name in names] if names is not None else None
        self._numbers = {_normalize_name(name): self._first + i for i, name in enumerate(self.names or ())}
        if self.names is None:
            return
        if not self._discrete:
            raise ConfigError(f"actions: only the actions of a Discrete space can be named, not those of {space}")
        if len(self.names) != self._count or len(self._numbers) != self._count:
            raise ConfigError(f"actions: {space} needs {self._count} different names, got {self.names}")

    def read(self, text: str) -> Any:
        """Parse the action in `text`; raises ValueError, with a message for the model, if there is none."""
        written = extract_action(text)
        if self._text:
            return self._read_text(text, written)
        if not written:
            raise ValueError(f"you wrote no action; {self.menu()}")
        if self._discrete:
            return self._read_discrete(written)
        return self._read_json(written)

    def menu(self) -> str:
        """The valid actions, in one line for the model."""
        if self._discrete:
            last = self._first + self._count - 1
            numbers = range(self._first, self._first + min(self._count, MAX_LISTED))
            if self.names is not None:
                listed = ", ".join(f"{self.names[n - self._first]} ({n})" for n in numbers)
                return f"actions: {listed}{', …' if self._count > MAX_LISTED else ''}"
            return f"actions: a number from {self._first} to {last}"
        if self._text:
            return f"actions: text of {self.space.min_length} to {self.space.max_length} characters"
        return f"actions: JSON that fits {self.space}"

    def examples(self) -> list[str]:
        """A few valid actions, as an agent would write them."""
        if self._discrete:
            last = min(self._count, MAX_LISTED)
            return self.names[:last] if self.names is not None else [str(self._first + i) for i in range(last)]
        self.space.seed(0)
        samples = [self.space.sample() for _ in range(3)]
        return [sample if self._text else json.dumps(to_jsonable(sample)) for sample in samples]

    def _read_text(self, text: str, written: str) -> str:
        for candidate in (written, text):
            if self.space.contains(candidate):
                return candidate
        raise ValueError(f"{_quote(written)} is no action here; {self.menu()}")

    def _read_discrete(self, written: str) -> int:
        number = self._numbers.get(_normalize_name(written))
        if number is None and re.fullmatch(r"[+-]?[0-9]{1,18}", written):
            number = int(written)
        if number is None or not self._first <= number < self._first + self._count:
            raise ValueError(f"{_quote(written)} is no action here; {self.menu()}")
        return number

    def _read_json(self, written: str) -> Any:
        try:
            action = _from_json(self.space, json.loads(written))
            fits = self.space.contains(action)
        except Exception:  # spaces raise all kinds of exceptions for JSON of the wrong shape
            fits = False
        if not fits:
            raise ValueError(f"{_quote(written)} is no action here; {self.menu()}")
        return action


def _from_json(space: Any, value: Any) -> Any:
    """One sample from JSON; `Space.from_jsonable` expects tuples and dictionaries as columns of a batch."""
    from gymnasium import spaces

    if isinstance(space, spaces.Tuple):
        return tuple(_from_json(inner, item) for inner, item in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        if value.keys() != space.spaces.keys():
            raise ValueError("other keys")
        return {key: _from_json(inner, value[key]) for key, inner in space.spaces.items()}
    return space.from_jsonable([value])[0]


def _normalize_name(name: str) -> str:
    return " ".join(name.split()).casefold()


def _quote(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= 80 else f"{flat[:79]}…")
