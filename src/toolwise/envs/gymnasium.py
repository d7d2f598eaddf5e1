"""Any Gymnasium environment, with observations and actions as text (extra `worlds`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.envs.base import BaseEnv
from toolwise.envs.blocking_calls import BlockingCalls
from toolwise.envs.gymnasium_text import ActionReader, observation_text, rendered_text
from toolwise.envs.state_keys import state_digest, to_jsonable
from toolwise.errors import ConfigError, import_extra

T = TypeVar("T")
SEED_MODULUS = 2**31
"""Gymnasium accepts no negative seeds, and some environments none that do not fit in a C integer."""


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
        self._make = _world_factory(world, make_kwargs or {})
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
        self._truncated_at_end: bool | None = None
        """None while the episode runs; afterwards, whether it was truncated."""

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
        success = env_info.get("is_success", env_info.get("success"))
        if success is not None:
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


def _world_factory(world: str | Callable[[], Any], make_kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    if callable(world):
        return partial(world, **make_kwargs)
    # ActionReader already checks that actions fit the space; the passive checker would print warnings at every step.
    return partial(import_extra("gymnasium", "worlds").make, world, disable_env_checker=True, **make_kwargs)
