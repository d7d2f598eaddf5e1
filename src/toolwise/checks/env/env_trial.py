"""Runs one environment under test: every call has a deadline, results are validated and recorded for comparison."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from toolwise.checks.contract import is_finite_number, short_repr
from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.envs.base import BaseEnv
from toolwise.envs.state_keys import to_jsonable
from toolwise.messages import ToolCall, as_messages


class EnvViolation(Exception):  # noqa: N818 (a finding about user code, not an error in Toolwise)
    """One line on how an environment breaks the contract."""


@dataclass(frozen=True, slots=True)
class EnvSnapshot:
    """What the agent and credit assignment see after `reset` or one `step`, as plain data that can be compared."""

    observation: Any
    reward: float | None = None
    done: bool = False
    info: Any = field(default_factory=dict)
    state_key: str | None = None
    tools: Any = None

    @property
    def truncated(self) -> bool:
        return bool(self.info.get("truncated"))

    def difference(self, other: EnvSnapshot) -> str | None:
        """Describe the first field in which two snapshots differ."""
        for name in ("observation", "reward", "done", "state_key", "tools", "info"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} {short_repr(mine)} and {short_repr(theirs)}"
        return None


class EnvTrial:
    """One environment and its snapshots so far. `problems` describes return values of the wrong type."""

    def __init__(self, env: BaseEnv, limit_s: float) -> None:
        self.env = env
        self.limit_s = limit_s
        self.problems: list[str] = []
        self.snapshots: list[EnvSnapshot] = []

    @property
    def done(self) -> bool:
        return bool(self.snapshots) and self.snapshots[-1].done

    async def reset(self, seed: int | None) -> EnvSnapshot:
        if seed is not None:
            with raise_violations("set_seed raised"):
                self.env.set_seed(seed)
        return self._record("reset", await self._with_timeout(self.env.reset(), "reset"))

    async def step(self, action: Any) -> EnvSnapshot:
        where = f"step {len(self.snapshots)}"
        result = await self._with_timeout(self.env.step(_to_env_action(action, self.env.structured_actions)), where)
        if not isinstance(result, tuple) or len(result) != 4:
            what = f"{len(result)} values" if isinstance(result, tuple) else f"{result!r:.60}"
            expected = '(observation, reward, done, info), with info["truncated"] for a truncated episode'
            raise EnvViolation(f"{where} returned {what}; return {expected}")
        observation, reward, done, info = result
        if not isinstance(done, bool):
            self.problems.append(f"{where}: done is {short_repr(done)}; use True or False")
        if reward is not None and not is_finite_number(reward):
            self.problems.append(f"{where}: the reward is {short_repr(reward)}; use a finite number or None")
        if not isinstance(info, dict):
            self.problems.append(f"{where}: info is {short_repr(info)}; use a dictionary")
        else:
            self._check_info(info, where)
        valid_info = info if isinstance(info, dict) else {}
        return self._record(
            where, observation, float(reward) if is_finite_number(reward) else None, bool(done), valid_info
        )

    async def final_rewards(self) -> dict[str, float]:
        rewards = await self._with_timeout(self.env.final_rewards(), "final_rewards")
        if not isinstance(rewards, dict) or not all(is_finite_number(value) for value in rewards.values()):
            raise EnvViolation(f"final_rewards returned {rewards!r:.60}; return a dictionary of finite numbers")
        return rewards

    async def close(self) -> None:
        await self._with_timeout(self.env.close(), "close")

    def _record(
        self,
        where: str,
        observation: Any,
        reward: float | None = None,
        done: bool = False,
        info: Mapping[str, Any] | None = None,
    ) -> EnvSnapshot:
        with raise_violations(f"{where}: state_key raised"):
            key: Any = self.env.state_key
        if key is not None and not isinstance(key, str):
            self.problems.append(f"{where}: state_key is {short_repr(key)}; use a string or None")
            key = str(key)
        with raise_violations(f"{where}: tool_specs raised"):
            tools = self.env.tool_specs()
        snapshot = EnvSnapshot(
            self._read(observation, where), reward, done, to_jsonable(info or {}), key, to_jsonable(tools)
        )
        self.snapshots.append(snapshot)
        return snapshot

    def _read(self, observation: Any, where: str) -> Any:
        if isinstance(observation, str):
            return observation
        try:
            return [message.to_openai() for message in as_messages(observation)]
        except ValueError:
            self.problems.append(f"{where}: the observation is {short_repr(observation)}; use a string or messages")
            return to_jsonable(observation)

    def _check_info(self, info: dict[str, Any], where: str) -> None:
        for name in ("truncated", "is_action_valid"):
            if not isinstance(info.get(name, False), bool):
                self.problems.append(f'{where}: info["{name}"] is {short_repr(info[name])}; use True or False')
        try:
            json.dumps(info)
        except (TypeError, ValueError, RecursionError) as fault:
            self.problems.append(f"{where}: info is not JSON-serializable ({fault}); rollouts are stored as JSON")

    async def _with_timeout(self, work: Any, what: str) -> Any:
        if not isinstance(work, Coroutine):
            raise EnvViolation(f"{what} is not a coroutine; define it with async def")
        late = EnvViolation(f"{what} took longer than {self.limit_s:g} s")
        with raise_violations(f"{what} raised"):
            return await run_with_deadline(self.limit_s, work, late)


@contextmanager
def raise_violations(what: str) -> Iterator[None]:
    """Any exception in the body becomes an `EnvViolation` that starts with `what`."""
    try:
        yield
    except EnvViolation:
        raise
    except Exception as fault:
        raise EnvViolation(f"{what} {type(fault).__name__}: {fault}") from fault


@asynccontextmanager
async def open_trial(env: BaseEnv, limit_s: float) -> AsyncIterator[EnvTrial]:
    """A trial that is closed on exit. An error in the body is not masked by an error in `close`."""
    trial = EnvTrial(env, limit_s)
    try:
        yield trial
    except BaseException:
        with suppress(EnvViolation):
            await trial.close()
        raise
    await trial.close()


def as_action(action: Any) -> Any:
    """Parse an action: text, one call `{"name": …, "arguments": …}`, or a list of such calls."""
    if isinstance(action, str):
        return action
    calls = action if isinstance(action, list) else action.get("tool_calls") or ([action] if "name" in action else [])
    if not calls:
        return dict(action)
    tool_calls = [
        c if isinstance(c, ToolCall) else ToolCall.model_validate({"id": f"call_{i}", **c}) for i, c in enumerate(calls)
    ]
    content = action.get("content", "") if isinstance(action, dict) else ""
    first = {"name": tool_calls[0].name, "arguments": tool_calls[0].arguments}
    return {"type": "tool_call", "content": content, **first, "tool_calls": tool_calls}


def _to_env_action(action: Any, structured: bool) -> Any:
    action = as_action(action)
    if structured:
        return {"type": "text", "content": action} if isinstance(action, str) else action
    return action if isinstance(action, str) else str(action.get("content") or "")
