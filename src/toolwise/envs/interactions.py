"""Simulated users, who reply when the assistant answers in plain text. `InteractiveEnv` adds one to an episode."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from string import Template
from typing import Any

from toolwise.concurrency.deadlines import call_in_thread
from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.protocols import AgentPolicy, has_sessions
from toolwise.rewards.transcript import split_thought

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
        self._lines = _as_lines(lines, ConfigError)
        self._next = 0

    async def start(self, **interaction_kwargs: Any) -> str | None:
        if "lines" in interaction_kwargs:
            self._lines = _as_lines(interaction_kwargs["lines"], DataError)
        return None

    async def respond(self, messages: Sequence[Message]) -> Reply:
        if self._next >= len(self._lines):
            return "", True, None, {}
        self._next += 1
        return self._lines[self._next - 1], False, None, {}


class FunctionInteraction(BaseInteraction):
    """A user implemented by a function of the messages and, if it takes them, the task's interaction_kwargs.

    The function returns the user's text, None to end the conversation, or a full `Reply`. It may be async, and may
    block.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._kwargs: dict[str, Any] = {}

    async def start(self, **interaction_kwargs: Any) -> str | None:
        parameters = inspect.signature(self._function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._kwargs = {key: value for key, value in interaction_kwargs.items() if takes_all or key in parameters}
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
        spoken = [(other[m.role], _spoken_text(m)) for m in messages if m.role in other]
        flipped = [Message.model_validate({"role": role, "content": text}) for role, text in spoken if text]
        # Chat templates expect a user message first.
        opening = [Message(role="user", content=self._greeting)] if flipped and flipped[0].role == "assistant" else []
        return [Message(role="system", content=self._system_prompt), *opening, *flipped]


def _spoken_text(message: Message) -> str:
    """The part of a message the other side sees: an assistant's thoughts are removed."""
    text = message.content or ""
    return split_thought(text)[1].strip() if message.role == "assistant" else text


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
