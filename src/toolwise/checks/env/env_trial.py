"""Runs one environment under test: every call has a deadline, results are validated and recorded for comparison."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from toolwise.checks.contract import is_finite_number, short_repr
from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.envs.base import MEASURED_TIMES, BaseEnv
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


@dataclass(slots=True)
class EnvTrial:
    """One environment and its snapshots so far. `problems` describes return values of the wrong type."""

    env: BaseEnv
    limit_s: float
    problems: list[str] = field(default_factory=list)
    snapshots: list[EnvSnapshot] = field(default_factory=list)

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
            raise EnvViolation(
                f"{where} returned {what}; return (observation, reward, done, info), with "
                'info["truncated"] for a truncated episode'
            )
        observation, reward, done, info = result
        flags = info if isinstance(info, dict) else {}
        for valid, what, value, wanted in (
            (isinstance(done, bool), "done", done, "True or False"),
            (reward is None or is_finite_number(reward), "the reward", reward, "a finite number or None"),
            (isinstance(info, dict), "info", info, "a dictionary"),
            *(
                (isinstance(flags.get(name, False), bool), f'info["{name}"]', flags.get(name), "True or False")
                for name in ("truncated", "is_action_valid")
            ),
        ):
            if not valid:
                self.problems.append(f"{where}: {what} is {short_repr(value)}; use {wanted}")
        try:
            json.dumps(flags)
        except (TypeError, ValueError, RecursionError) as fault:
            self.problems.append(f"{where}: info is not JSON-serializable ({fault}); rollouts are stored as JSON")
        return self._record(where, observation, float(reward) if is_finite_number(reward) else None, bool(done), flags)

    async def play(self, script: Sequence[Any]) -> None:
        """Take the actions in `script` until the episode ends."""
        for action in script:
            if self.done:
                return
            await self.step(action)

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
        observed = self._read(observation, where)
        described = {name: value for name, value in (info or {}).items() if name not in MEASURED_TIMES}
        self.snapshots.append(EnvSnapshot(observed, reward, done, to_jsonable(described), key, to_jsonable(tools)))
        return self.snapshots[-1]

    def _read(self, observation: Any, where: str) -> Any:
        if isinstance(observation, str):
            return observation
        try:
            return [message.to_openai() for message in as_messages(observation)]
        except ValueError:
            self.problems.append(f"{where}: the observation is {short_repr(observation)}; use a string or messages")
            return to_jsonable(observation)

    async def _with_timeout(self, work: Any, what: str) -> Any:
        if not isinstance(work, Coroutine):
            raise EnvViolation(f"{what} is not a coroutine; define it with async def")
        with raise_violations(f"{what} raised"):
            return await run_with_deadline(
                self.limit_s, work, EnvViolation(f"{what} took longer than {self.limit_s:g} s")
            )


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
    return {
        "type": "tool_call",
        "content": content,
        "name": tool_calls[0].name,
        "arguments": tool_calls[0].arguments,
        "tool_calls": tool_calls,
    }


def _to_env_action(action: Any, structured: bool) -> Any:
    action = as_action(action)
    if structured:
        return {"type": "text", "content": action} if isinstance(action, str) else action
    return action if isinstance(action, str) else str(action.get("content") or "")
