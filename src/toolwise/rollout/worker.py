"""One episode: observe, decide, act, until something ends it. The scheduler runs many of these at once."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import ToolEnv, as_reward
from toolwise.errors import ContextFullError
from toolwise.messages import Message, Prefix, ToolCall, as_messages
from toolwise.protocols import AgentPolicy, SessionPolicy
from toolwise.tools.base import BaseTool
from toolwise.types import StepData, StopReason, Task, Usage
from toolwise.waiting import end_within

log = logging.getLogger("toolwise.rollout")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy answered, read and found whole."""

    action: dict[str, Any]
    raw: str | None
    logprobs: dict[str, Any] | None
    value: float | None
    message: Message
    """The action as the conversation has it."""

    @classmethod
    def of(cls, answer: tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]) -> Decision:
        action, raw, logprobs, value = answer
        if action["type"] not in ("text", "tool_call", "terminate"):
            raise ValueError(f"an action of type {action['type']!r}; give text, tool_call or terminate")
        if raw is not None and not isinstance(raw, str):
            raise ValueError(f"a raw output of type {type(raw).__name__}; give a string or None")
        calls = [ToolCall.model_validate(call) for call in action.get("tool_calls") or ()]
        if action["type"] == "tool_call" and not calls:  # one call may be told by its name and arguments alone
            calls = [ToolCall(id="call_0", name=action["name"], arguments=action.get("arguments") or {})]
        if calls:
            action = {**action, "tool_calls": calls}
        message = Message(role="assistant", content=action.get("content") or "", tool_calls=calls or None)
        return cls(action, raw, logprobs, value, message)


class RLRolloutWorker:
    """Runs one episode of `task_definition` with `agent_policy`.

    `run_episode` gives (steps, messages, ground truth); what else happened stands in `stop_reason`, `usage`,
    `tool_rewards` and `fault`. `start`, `decide`, `act` and `finish` are its parts, for those who run many in step.
    Each part keeps to the episode's deadline, and none of them raises: whatever goes wrong is a `stop_reason`.
    """

    def __init__(
        self,
        task_definition: Task,
        agent_policy: AgentPolicy,
        max_episode_steps: int = 10,
        *,
        env: BaseEnv | None = None,
        tools: Mapping[str, BaseTool] | None = None,
        prompt: Sequence[Message] | None = None,
        seed: int = 0,
        do_sample: bool = True,
        deadline_s: float = 600.0,
        max_invalid_in_a_row: int = 3,
    ) -> None:
        self.task = task_definition
        self.policy = agent_policy
        self.max_episode_steps = max_episode_steps
        self.env = env if env is not None else ToolEnv(task_definition, tools or {})
        self.seed = seed
        self.do_sample = do_sample
        self.deadline_s = deadline_s
        self.max_invalid_in_a_row = max_invalid_in_a_row
        self.messages: list[Message] = list(prompt if prompt is not None else task_definition.prompt)
        self.steps: list[StepData] = []
        self.stop_reason: StopReason | None = None
        self.fault: str | None = None
        self.tool_rewards: dict[str, float] = {}
        self._regex = re.compile(task_definition.termination_regex) if task_definition.termination_regex else None
        self._session: AgentPolicy | None = None
        self._decision: Decision | None = None
        self._state_key: str | None = None
        self._invalid_in_a_row = 0
        self._calls: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._cost = 0.0
        self._began = time.monotonic()
        self._ended: float | None = None
        self._finishing: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.stop_reason is not None

    async def run_episode(self) -> tuple[list[StepData], list[Message], Any]:
        try:
            await self.start()
            while not self.done:
                await self.decide()
                await self.act()
        finally:
            await self.finish()
        return self.steps, self.messages, self.task.ground_truth

    async def start(self) -> None:
        self._began = time.monotonic()
        await self._in_time(self._begin(), StopReason.ENV_FAULT, "reset: ")

    async def decide(self) -> None:
        if self.done:
            return
        try:
            specs, self._state_key = self.env.tool_specs(), self.env.state_key
        except Exception as fault:
            self.stop(StopReason.ENV_FAULT, f"tool_specs, state_key: {type(fault).__name__}: {fault}")
            return
        self._decision = await self._in_time(self._ask(specs), StopReason.POLICY_FAULT)

    async def act(self) -> None:
        """Carry out what was decided, and note the step, whatever came of it."""
        if self.done or self._decision is None:
            return
        decision, self._decision = self._decision, None
        seen = Prefix(self.messages)
        self.messages.append(decision.message)
        reward: float | None = None
        info: dict[str, Any] = {}
        ending = self._ending_of(decision)
        if ending is not None:
            self.stop(ending)
        else:
            came = await self._in_time(self._move(decision.action), StopReason.ENV_FAULT, "step: ")
            reward, info = came if came is not None else (reward, info)
        if not self.done and len(self.steps) + 1 >= self.max_episode_steps:
            self.stop(StopReason.MAX_STEPS)
        if self._state_key is not None:
            info = {**info, "state_key": self._state_key}
        self.steps.append(
            StepData.model_construct(
                system_step_index=len(self.steps),
                observation_data=seen,
                action_taken=decision.action,
                raw_policy_output=decision.raw,
                resulting_messages_history=Prefix(self.messages),
                policy_logprobs=decision.logprobs,
                policy_value_estimate=decision.value,
                is_done=self.done,
                step_info={**info, "assistant_turn_index": len(self.steps)},
                base_reward=reward,
            )
        )
        log.debug("step %d of %s: %s", len(self.steps), self.task.task_id, decision.raw)

    async def finish(self) -> None:
        """Ask for the last rewards and free the world: once, and to the end, however often somebody cancels."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._finish())
        cancelled = False
        while not self._finishing.done():
            try:
                await asyncio.shield(self._finishing)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    def stop(self, reason: StopReason, fault: str | None = None) -> None:
        self.stop_reason, self.fault = reason, fault

    async def _in_time(self, work: Coroutine[Any, Any, T], blame: StopReason, where: str = "") -> T | None:
        """What one part of the episode gives. What goes wrong in it is a typed outcome, never a crash of the run."""
        late = TimeoutError(f"the episode took longer than {self.deadline_s:g} s")
        try:
            return await end_within(self.deadline_s - (time.monotonic() - self._began), work, late)
        except ContextFullError as fault:
            self.stop(StopReason.MAX_TOKENS, str(fault))
        except Exception as fault:
            if fault is late:
                self.stop(StopReason.DEADLINE, str(late))
            else:
                self.stop(blame, f"{where}{type(fault).__name__}: {fault}")
        return None

    async def _begin(self) -> None:
        self._see(await self.env.reset())

    async def _ask(self, specs: list[dict[str, Any]] | None) -> Decision:
        if self._session is None:
            self._session = self._open_session()
        return Decision.of(await self._session.get_action(Prefix(self.messages), specs))

    def _open_session(self) -> AgentPolicy:
        if not isinstance(self.policy, SessionPolicy):
            return self.policy
        # Ids that came with the task stand for its own prompt: neither for a routed one, nor for what `reset` added.
        own = self.task.prompt_ids is not None and self.messages == list(self.task.prompt)
        prompt_ids = self.task.prompt_ids if own else None
        return self.policy.session(seed=self.seed, do_sample=self.do_sample, prompt_ids=prompt_ids)

    async def _move(self, action: dict[str, Any]) -> tuple[float | None, dict[str, Any]]:
        move = action if self.env.structured_actions else action.get("content") or ""
        observation, reward, env_done, info = await self.env.step(move)
        reward = as_reward(reward)
        self._see(observation)
        self._count(info)
        ending = self._ending_after(action, env_done, info)
        if ending is not None:
            self.stop(ending)
        return reward, info

    async def _finish(self) -> None:
        late = TimeoutError(f"took longer than {self.deadline_s:g} s")
        try:
            self.tool_rewards = await end_within(self.deadline_s, self.env.final_rewards(), late)
        except Exception as fault:  # no reward to be had from a broken tool: say so and leave it out of the update
            if self.stop_reason is None or self.stop_reason.trainable:
                self.stop(StopReason.ENV_FAULT, f"calc_reward: {type(fault).__name__}: {fault}")
        try:
            await end_within(self.deadline_s, self.env.close(), late)
        except Exception as fault:  # the episode is over and whole; what could not be freed is still said
            self.fault = self.fault or f"close: {type(fault).__name__}: {fault}"
            log.warning("task %s: %s", self.task.task_id, self.fault)
        self._ended = time.monotonic()
        log.info(
            "task %s: %s after %d steps, cost %g",
            self.task.task_id,
            self.stop_reason,
            len(self.steps),
            self._cost,
        )

    @property
    def usage(self) -> Usage:
        sampled = [s.policy_logprobs or {} for s in self.steps]
        return Usage(
            calls=dict(self._calls),
            failed_calls=dict(self._failed),
            cost=self._cost,
            prompt_tokens=sum(len(p.get("prompt_ids", ())) for p in sampled),
            sampled_tokens=sum(len(p.get("token_ids", ())) for p in sampled),
            seconds=(self._ended or time.monotonic()) - self._began,
        )

    def _see(self, observation: str | Sequence[Message]) -> None:
        if isinstance(observation, str):
            if observation:
                self.messages.append(Message(role="user", content=observation))
        else:
            self.messages.extend(as_messages(observation))

    def _count(self, info: dict[str, Any]) -> None:
        self._calls.update(info.get("calls") or {})
        self._failed.update(info.get("failed_calls") or {})
        self._cost += float(info.get("cost") or 0.0)

    def _ending_of(self, decision: Decision) -> StopReason | None:
        """Endings that the action itself brings about, before the world sees it."""
        if decision.action["type"] == "terminate":
            return StopReason.TERMINATED
        if decision.logprobs is not None and decision.logprobs.get("finish_reason") == "length":
            return StopReason.MAX_TOKENS
        if self._regex is not None and self._regex.search(decision.raw or decision.message.content or ""):
            return StopReason.REGEX
        return None

    def _ending_after(self, action: dict[str, Any], env_done: bool, info: dict[str, Any]) -> StopReason | None:
        """Endings that the world brings about."""
        self._invalid_in_a_row = 0 if info.get("is_action_valid", True) else self._invalid_in_a_row + 1
        if info.get("truncated"):
            return StopReason.ENV_TRUNCATED
        if env_done:
            return (
                StopReason.ANSWERED if action["type"] == "text" and self.env.structured_actions else StopReason.ENV_DONE
            )
        if self._invalid_in_a_row >= self.max_invalid_in_a_row:
            return StopReason.REPEATED_INVALID
        return None
