"""Simulated users, who reply when the assistant answers in plain text, and the environment that adds one."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from string import Template
from typing import Any, ClassVar

from toolwise.concurrency.deadlines import call_in_thread, gather_all, run_with_deadline
from toolwise.envs.base import BaseEnv, Observation, Phase
from toolwise.envs.state_keys import state_digest
from toolwise.envs.tool_env import validate_reward
from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message, as_messages
from toolwise.protocols import AgentPolicy, has_sessions
from toolwise.rewards.transcript import split_thought
from toolwise.types import Task

Reply = tuple[str, bool, float | None, dict[str, Any]]
"""The user's text, whether the conversation ends, a reward for the assistant's turn, and extra info."""

STOP_MARKER = "###STOP###"


class BaseInteraction(ABC):
    """The simulated user of one episode: `start` is called once, `respond` every turn, `finish` once."""

    def set_seed(self, seed: int) -> None:
        """Called once before `start`, with the same seed for all rollouts of a task."""
        return

    async def start(self, **interaction_kwargs: Any) -> str | None:
        """Start with the task's `interaction_kwargs`; returns the user's first message besides the prompt, if any."""
        return None

    @abstractmethod
    async def respond(self, messages: Sequence[Message]) -> Reply:
        """Reply to the assistant, whose message is the last of `messages`."""

    async def finish(self) -> None:
        """Release the conversation's resources; called exactly once."""
        return


class ScriptedInteraction(BaseInteraction):
    """Says its lines in order and is done after the last; a task can set its own as `interaction_kwargs.lines`."""

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self._lines = iter(_as_lines(lines, ConfigError))

    async def start(self, **interaction_kwargs: Any) -> str | None:
        if "lines" in interaction_kwargs:
            self._lines = iter(_as_lines(interaction_kwargs["lines"], DataError))
        return None

    async def respond(self, messages: Sequence[Message]) -> Reply:
        return as_reply(next(self._lines, None))


class FunctionInteraction(BaseInteraction):
    """A user implemented by a function of the messages, `kwargs` and, if it takes them, the task's interaction_kwargs.

    The function returns the user's text, None to end the conversation, or a full `Reply`. It may be async, and may
    block.
    """

    def __init__(self, function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._kwargs = dict(kwargs or {})

    async def start(self, **interaction_kwargs: Any) -> str | None:
        parameters = inspect.signature(self._function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._kwargs |= {key: value for key, value in interaction_kwargs.items() if takes_all or key in parameters}
        return None

    async def respond(self, messages: Sequence[Message]) -> Reply:
        if inspect.iscoroutinefunction(self._function):
            value = await self._function(messages, **self._kwargs)
        else:
            value = await call_in_thread(lambda: self._function(messages, **self._kwargs))
        return as_reply(value)


class PolicyInteraction(BaseInteraction):
    """A user played by any policy, with a system prompt in which `$name` stands for the task's interaction_kwargs.

    The policy sees the conversation with the roles swapped, without tool calls and results, and ends it by writing
    `stop`.
    """

    def __init__(
        self,
        policy: AgentPolicy,
        system_prompt: str,
        *,
        stop: str = STOP_MARKER,
        greeting: str = "Hi! How can I help you today?",
        do_sample: bool = True,
    ) -> None:
        if not stop:
            raise ConfigError("interaction: stop is empty; give the text that ends the conversation")
        self._policy = policy
        self._system_prompt = system_prompt
        self._stop = stop
        self._greeting = greeting
        self._do_sample = do_sample
        self._seed = 0

    def set_seed(self, seed: int) -> None:
        self._seed = seed

    async def start(self, **interaction_kwargs: Any) -> str | None:
        self._system_prompt = Template(self._system_prompt).safe_substitute(interaction_kwargs)
        if has_sessions(self._policy):
            self._policy = self._policy.session(seed=self._seed, do_sample=self._do_sample)
        return None

    async def respond(self, messages: Sequence[Message]) -> Reply:
        action, *_ = await self._policy.get_action(self._swap_roles(messages), None)
        text = str(action.get("content") or "")
        done = self._stop in text or action.get("type") == "terminate"
        return text.replace(self._stop, "").strip(), done, None, {}

    def _swap_roles(self, messages: Sequence[Message]) -> list[Message]:
        other = {"user": "assistant", "assistant": "user"}
        texts = [(other[m.role], m.content or "") for m in messages if m.role in other]
        # The user does not hear the assistant's thoughts.
        heard = [(role, split_thought(text)[1].strip() if role == "user" else text) for role, text in texts]
        flipped = [Message.model_validate({"role": role, "content": text}) for role, text in heard if text]
        # Chat templates expect a user message first.
        opening = [Message(role="user", content=self._greeting)] if flipped and flipped[0].role == "assistant" else []
        return [Message(role="system", content=self._system_prompt), *opening, *flipped]


def as_reply(value: Any) -> Reply:
    """Convert the result of a user function to a `Reply`."""
    if value is None:
        return "", True, None, {}
    if isinstance(value, str):
        return value, False, None, {}
    if isinstance(value, tuple) and len(value) == 4:
        text, done, reward, info = value
        numeric = reward is None or isinstance(reward, int | float)
        if isinstance(text, str) and isinstance(done, bool) and numeric and isinstance(info, dict):
            return text, done, None if reward is None else float(reward), info
    raise TypeError(
        f"the simulated user returned {value!r:.80}: return a string, None to end, or (text, done, reward, info)"
    )


def _as_lines(lines: Any, error: type[ConfigError | DataError]) -> list[str]:
    if isinstance(lines, str) or not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise error(f"interaction: lines must be a list of strings, got {lines!r:.80}")
    return list(lines)


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
        if opening := await self._with_timeout(self.interaction.start(**self._kwargs), "start"):
            messages.append(Message(role="user", content=opening))
        self._messages.extend(messages)
        return messages

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        calls = action.get("tool_calls") or None
        self._messages.append(Message(role="assistant", content=action.get("content") or "", tool_calls=calls))
        if calls is None:
            return await self._user_turn()
        observation, reward, done, info = await self.env.step(action)
        self._messages.extend(messages := _to_messages(observation))
        return messages, reward, done, info

    async def final_rewards(self) -> dict[str, float]:
        return await self.env.final_rewards()

    async def close(self) -> None:
        closing = [self.env.close()]
        if self._started:
            closing.append(self._with_timeout(self.interaction.finish(), "finish"))
        self._started = False
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

    def forbid_tools(self, names: Collection[str]) -> None:
        self.env.forbid_tools(names)

    def refuses(self, name: str) -> bool:
        return self.env.refuses(name)

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
