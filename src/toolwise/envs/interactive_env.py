"""Tools and a simulated user in one episode: plain text does not end it, the user replies next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolwise.concurrency.deadlines import gather_all, run_with_deadline
from toolwise.envs.base import BaseEnv, Observation, Phase
from toolwise.envs.interactions import BaseInteraction, as_reply
from toolwise.envs.state_keys import state_digest
from toolwise.envs.tool_env import validate_reward
from toolwise.errors import ConfigError
from toolwise.messages import Message, as_messages
from toolwise.types import Task


class InteractiveEnv(BaseEnv):
    """`env` runs tool calls, `interaction` replies to plain text, until it is done or out of turns.

    A user that fails or times out is an environment error, never the agent's: `step` raises, and the rollout is left
    out of the update. An episode that runs out of user turns is truncated.
    """

    structured_actions: ClassVar[bool] = True

    def __init__(
        self,
        env: BaseEnv,
        interaction: BaseInteraction,
        task: Task,
        *,
        kwargs: Mapping[str, Any] | None = None,
        max_user_turns: int = 10,
        timeout_s: float = 60.0,
    ) -> None:
        if not env.structured_actions:
            raise ConfigError(
                f"interaction: {type(env).__name__} takes every text as an action, so the agent could not talk to a "
                "user; use an environment with tools"
            )
        self.env = env
        self.interaction = interaction
        self.max_user_turns = max_user_turns
        self.user_turns = 0
        self._kwargs = {**(kwargs or {}), **task.interaction_kwargs}
        self._timeout_s = timeout_s
        self._messages: list[Message] = list(task.prompt)
        self._started = False

    def set_seed(self, seed: int) -> None:
        self.env.set_seed(seed)
        self.interaction.set_seed(seed)

    async def reset(self) -> list[Message]:
        messages = _to_messages(await self.env.reset())
        self._started = True
        opening = await self._with_timeout(self.interaction.start(**self._kwargs), "start")
        if opening:
            messages.append(Message(role="user", content=opening))
        self._messages.extend(messages)
        return messages

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        calls = action.get("tool_calls") or None
        self._messages.append(Message(role="assistant", content=action.get("content") or "", tool_calls=calls))
        if calls is None:
            return await self._user_turn()
        observation, reward, done, info = await self.env.step(action)
        messages = _to_messages(observation)
        self._messages.extend(messages)
        return messages, reward, done, info

    async def final_rewards(self) -> dict[str, float]:
        return await self.env.final_rewards()

    async def close(self) -> None:
        was_started, self._started = self._started, False
        closing = [
            self.env.close(),
            *([self._with_timeout(self.interaction.finish(), "finish")] if was_started else []),
        ]
        await gather_all(closing)

    @property
    def state_key(self) -> str | None:
        """The state of `env` and the user's last request; None if `env` has no state key."""
        key = self.env.state_key
        request = next((m.content for m in reversed(self._messages) if m.role == "user"), "")
        return None if key is None else f"{key}/{self.user_turns}/{state_digest(request)}"

    def tool_specs(self) -> list[dict[str, Any]] | None:
        return self.env.tool_specs()

    def unread_calls(self, action: Any) -> dict[str, Any]:
        return self.env.unread_calls(action)

    def phase_of(self, action: Any) -> Phase:
        return self.env.phase_of(action) if action.get("tool_calls") else "interaction"

    def gold_actions(self) -> Sequence[Any] | None:
        return self.env.gold_actions()

    def example_actions(self) -> Sequence[Any]:
        return self.env.example_actions()

    async def _user_turn(self) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        if self.user_turns >= self.max_user_turns:
            return [], None, True, {"is_action_valid": True, "truncated": True, "user_turns": self.user_turns}
        reply = await self._with_timeout(self.interaction.respond(tuple(self._messages)), "respond")
        text, done, reward, reply_info = as_reply(reply)
        self.user_turns += 1
        messages = [Message(role="user", content=text)] if text else []
        if not text and not done:
            raise ValueError("the simulated user returned no text and is not done")
        self._messages.extend(messages)
        info = {"is_action_valid": True, "user_turns": self.user_turns, "interaction": reply_info}
        return messages, validate_reward(reward), done, info

    async def _with_timeout(self, work: Any, what: str) -> Any:
        late = TimeoutError(f"the simulated user: {what} took longer than {self._timeout_s:g} s")
        return await run_with_deadline(self._timeout_s, work, late)


def _to_messages(observation: Observation) -> list[Message]:
    if isinstance(observation, str):
        return [Message(role="user", content=observation)] if observation else []
    return list(as_messages(observation))
