"""Any Gymnasium environment, with observations and actions as text (extra `worlds`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.envs.base import BaseEnv
from toolwise.envs.blocking_calls import BlockingCalls
from toolwise.envs.state_keys import state_digest, to_jsonable
from toolwise.errors import ConfigError, import_extra
from toolwise.rewards.transcript import split_thought

T = TypeVar("T")
SEED_MODULUS = 2**31
"""Gymnasium accepts no negative seeds, and some environments none that do not fit in a C integer."""
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
    rows = flat if isinstance(flat, list) and flat and all(isinstance(row, list) for row in flat) else [flat]
    return "\n".join(map(_format_value, rows))


class GymnasiumEnv(BaseEnv):
    """One episode of a Gymnasium environment.

    `world` is a registered id, or a function that builds the environment. `actions` names the actions of a discrete
    space; `parse_action(text)` replaces the built-in parser and raises ValueError, with a message for the model, if
    there is no action; `format_observation(observation)` turns an observation into text; `state_of(world, observation)`
    returns the state key, by default a hash of the observation; `draw` adds the text rendering
    (`make_kwargs = {"render_mode": "ansi"}`); `describe` lists the actions in the first observation; `seed` fixes the
    start of the episode, whatever the group's seed.
    """

    keeps_deadlines: ClassVar[bool] = True

    def __init__(
        self,
        world: str | Callable[[], Any],
        *,
        make_kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        parse_action: Callable[[str], Any] | None = None,
        format_observation: Callable[[Any], str] = observation_text,
        state_of: Callable[[Any, Any], str] | None = None,
        draw: bool = False,
        describe: bool = True,
        seed: int | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        # ActionReader already checks that actions fit the space; the passive checker would print warnings every step.
        make = (
            world
            if callable(world)
            else partial(import_extra("gymnasium", "worlds").make, world, disable_env_checker=True)
        )
        self._make = partial(make, **(make_kwargs or {}))
        self._names = actions
        self._parse_action = parse_action
        self._format = format_observation
        self._state_of = state_of
        self._draw = draw
        self._describe = describe
        self._own_seed = seed
        self._group_seed: int | None = None
        self._timeout_s = timeout_s
        self._calls = BlockingCalls(f"the environment {world}" if isinstance(world, str) else "the environment")
        self._world: Any = None
        self._reader: ActionReader | None = None
        self._key: str | None = None
        self._truncated_at_end: bool | None = None  # None while the episode runs

    def set_seed(self, seed: int) -> None:
        self._group_seed = seed

    @property
    def state_key(self) -> str | None:
        return self._key

    def example_actions(self) -> Sequence[str]:
        return self._reader.examples() if self._reader is not None and self._parse_action is None else ()

    async def reset(self) -> str:
        text, self._key = await self._with_timeout(self._calls.call(self._reset_world), "reset")
        self._truncated_at_end = None
        menu = self._reader.menu() if self._reader is not None and self._parse_action is None else ""
        return f"{text}\n\n{menu[:1].upper()}{menu[1:]}." if menu and self._describe else text

    async def step(self, action: Any) -> tuple[str, float | None, bool, dict[str, Any]]:
        if self._reader is None:
            raise RuntimeError("step before reset")
        if self._truncated_at_end is not None:
            return (
                "error: the episode is over",
                None,
                True,
                {"is_action_valid": False, "truncated": self._truncated_at_end},
            )
        parse = self._parse_action or self._reader.read
        try:
            move = parse(action if isinstance(action, str) else str((action or {}).get("content") or ""))
        except ValueError as error:
            return f"error: {error}", None, False, {"is_action_valid": False}
        (text, self._key), reward, terminated, truncated, env_info = await self._with_timeout(
            self._calls.call(partial(self._step_world, move)), "step"
        )
        truncated = truncated and not terminated  # termination takes precedence over truncation
        if terminated or truncated:
            self._truncated_at_end = truncated
        # Keep Gymnasium's info separate: its "cost" or "calls" do not mean ours.
        info: dict[str, Any] = {"is_action_valid": True, "truncated": truncated, "gymnasium": to_jsonable(env_info)}
        if (success := env_info.get("is_success", env_info.get("success"))) is not None:
            info["success"] = bool(success)
        return text, reward, terminated or truncated, info

    async def close(self) -> None:
        await self._with_timeout(self._calls.end(self._close_world), "close")

    def _reset_world(self) -> tuple[str, str]:
        if self._world is None:
            self._world = self._make()
            if self._draw and getattr(self._world, "render_mode", None) != "ansi":
                raise ConfigError('env: draw = true needs text rendering: set make_kwargs.render_mode = "ansi"')
            self._reader = ActionReader(self._world.action_space, self._names)
        seed = self._own_seed if self._own_seed is not None else self._group_seed
        observation, _ = self._world.reset(seed=None if seed is None else seed % SEED_MODULUS)
        return self._snapshot(observation)

    def _step_world(self, move: Any) -> tuple[tuple[str, str], float, bool, bool, Mapping[str, Any]]:
        observation, reward, terminated, truncated, env_info = self._world.step(move)
        return self._snapshot(observation), float(reward), bool(terminated), bool(truncated), env_info

    def _snapshot(self, observation: Any) -> tuple[str, str]:
        """The observation as text, and the state key."""
        text = self._format(observation)
        if self._draw:
            text = f"{text}\n{rendered_text(self._world.render())}".strip()
        key = self._state_of(self._world, observation) if self._state_of is not None else state_digest(observation)
        return text, str(key)

    def _close_world(self) -> None:
        if self._world is not None:
            self._world.close()

    async def _with_timeout(self, work: Coroutine[Any, Any, T], what: str) -> T:
        late = TimeoutError(f"{self._calls.what}: {what} took longer than {self._timeout_s:g} s")
        return await run_with_deadline(self._timeout_s, work, late)


def check_registered(world: str) -> None:
    """Raise if no environment is registered under this id, before the run starts."""
    gymnasium = import_extra("gymnasium", "worlds")
    try:
        gymnasium.spec(world)
    except (gymnasium.error.Error, ImportError) as fault:
        reason = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(fault).split()))
        raise ConfigError(f"env: gymnasium has no environment {world!r}: {reason}") from fault


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
        if self.names is not None and not self._discrete:
            raise ConfigError(f"actions: only the actions of a Discrete space can be named, not those of {space}")
        if self.names is not None and not len(self.names) == len(self._numbers) == self._count:
            raise ConfigError(f"actions: {space} needs {self._count} different names, got {self.names}")

    def read(self, text: str) -> Any:
        """Parse the action in `text`; raises ValueError, with a message for the model, if there is none."""
        written = extract_action(text)
        if not written and not self._text:
            raise ValueError(f"you wrote no action; {self.menu()}")
        try:
            action = self._parse(text, written)
            fits = self.space.contains(action)
        except Exception:  # spaces raise all kinds of exceptions for JSON of the wrong shape
            fits = False
        if not fits:
            flat = " ".join(written.split())
            quoted = repr(flat if len(flat) <= 80 else f"{flat[:79]}…")
            raise ValueError(f"{quoted} is no action here; {self.menu()}")
        return action

    def _parse(self, text: str, written: str) -> Any:
        if self._text:
            return written if self.space.contains(written) else text
        if not self._discrete:
            return _from_json(self.space, json.loads(written))
        number = self._numbers.get(_normalize_name(written))
        return int(written) if number is None and re.fullmatch(r"[+-]?[0-9]{1,18}", written) else number

    def menu(self) -> str:
        """The valid actions, in one line for the model."""
        if self.names is not None:
            listed = ", ".join(f"{name} ({self._first + i})" for i, name in enumerate(self.names[:MAX_LISTED]))
            return f"actions: {listed}{', …' if self._count > MAX_LISTED else ''}"
        if self._discrete:
            return f"actions: a number from {self._first} to {self._first + self._count - 1}"
        if self._text:
            return f"actions: text of {self.space.min_length} to {self.space.max_length} characters"
        return f"actions: JSON that fits {self.space}"

    def examples(self) -> list[str]:
        """A few valid actions, as an agent would write them."""
        if self._discrete:
            numbers = range(self._first, self._first + min(self._count, MAX_LISTED))
            return self.names[:MAX_LISTED] if self.names is not None else list(map(str, numbers))
        self.space.seed(0)
        samples = [self.space.sample() for _ in range(3)]
        return [sample if self._text else json.dumps(to_jsonable(sample)) for sample in samples]


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
