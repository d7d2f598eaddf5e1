"""One episode: observe, decide, act, until something ends it. The scheduler runs many of these at once."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ContextFullError
from toolwise.messages import Message, Prefix
from toolwise.protocols import AgentPolicy
from toolwise.tools.base import BaseTool
from toolwise.types import StepData, StopReason, Task, Usage

log = logging.getLogger("toolwise.rollout")


class RLRolloutWorker:
    """Runs one episode of `task_definition` with `agent_policy`.

    `run_episode` gives (steps, messages, ground truth); what else happened stands in `stop_reason`, `usage`,
    `tool_rewards` and `fault`. `start`, `decide`, `act` and `finish` are its parts, for those who run many in step.
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
        self.max_episode_steps = max_episode_steps
        self.env = env if env is not None else ToolEnv(task_definition, tools or {})
        self.deadline_s = deadline_s
        self.max_invalid_in_a_row = max_invalid_in_a_row
        session = getattr(agent_policy, "session", None)
        self.policy: AgentPolicy = (
            session(seed=seed, do_sample=do_sample, prompt_ids=task_definition.prompt_ids) if session else agent_policy
        )
        self.messages: list[Message] = list(prompt if prompt is not None else task_definition.prompt)
        self.steps: list[StepData] = []
        self.stop_reason: StopReason | None = None
        self.fault: str | None = None
        self.tool_rewards: dict[str, float] = {}
        self._regex = re.compile(task_definition.termination_regex) if task_definition.termination_regex else None
        self._decision: tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None] | None = None
        self._invalid_in_a_row = 0
        self._calls: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._cost = 0.0
        self._began = time.monotonic()

    @property
    def done(self) -> bool:
        return self.stop_reason is not None

    async def run_episode(self) -> tuple[list[StepData], list[Message], Any]:
        try:
            async with asyncio.timeout(self.deadline_s):
                await self.start()
                while not self.done:
                    await self.decide()
                    await self.act()
        except TimeoutError:
            self.stop(StopReason.DEADLINE, f"the episode took longer than {self.deadline_s:g} s")
        finally:
            await self.finish()
        return self.steps, self.messages, self.task.ground_truth

    async def start(self) -> None:
        try:
            self._see(await self.env.reset())
        except Exception as fault:  # a world that does not begin is a typed outcome, never a crash of the run
            self.stop(StopReason.ENV_FAULT, f"reset: {type(fault).__name__}: {fault}")

    async def decide(self) -> None:
        if self.done:
            return
        try:
            specs = self.env.tool_specs()
            self._decision = await self.policy.get_action(Prefix(self.messages), specs)
        except ContextFullError as fault:
            self.stop(StopReason.MAX_TOKENS, str(fault))
        except Exception as fault:  # likewise: counted, left out of the update, and the run goes on
            self.stop(StopReason.POLICY_FAULT, f"{type(fault).__name__}: {fault}")

    async def act(self) -> None:
        """Carry out what was decided, and note the step."""
        if self.done or self._decision is None:
            return
        (action, raw, logprobs, value), self._decision = self._decision, None
        seen = Prefix(self.messages)
        state_key = self.env.state_key
        self.messages.append(
            Message(role="assistant", content=action.get("content") or "", tool_calls=action.get("tool_calls"))
        )
        reward: float | None = None
        info: dict[str, Any] = {"assistant_turn_index": len(self.steps)}
        if state_key is not None:
            info["state_key"] = state_key
        ending = self._ending_of(action, raw, logprobs)
        if ending is None:
            try:
                move = action if self.env.structured_actions else action.get("content") or ""
                observation, reward, env_done, env_info = await self.env.step(move)
                info.update(env_info)
                self._see(observation)
                self._count(env_info)
                ending = self._ending_after(action, env_done, env_info)
            except Exception as fault:  # a broken world: counted, and not the policy's fault
                ending = StopReason.ENV_FAULT
                self.fault = f"step: {type(fault).__name__}: {fault}"
        if ending is None and len(self.steps) + 1 >= self.max_episode_steps:
            ending = StopReason.MAX_STEPS
        self.steps.append(
            StepData.model_construct(
                system_step_index=len(self.steps),
                observation_data=seen,
                action_taken=action,
                raw_policy_output=raw,
                resulting_messages_history=Prefix(self.messages),
                policy_logprobs=logprobs,
                policy_value_estimate=value,
                is_done=ending is not None,
                step_info=info,
                base_reward=reward,
            )
        )
        log.debug("step %d of %s: %s", len(self.steps), self.task.task_id, raw)
        if ending is not None:
            self.stop(ending, self.fault)

    async def finish(self) -> None:
        """Ask for the last rewards and free the world: exactly once, however the episode ended."""
        try:
            if self.stop_reason is not None and self.stop_reason is not StopReason.DEADLINE:
                self.tool_rewards = await self.env.final_rewards()
        except Exception as fault:  # no reward to be had from a broken tool: say so and leave it out of the update
            self.stop_reason, self.fault = (
                StopReason.ENV_FAULT,
                f"calc_reward: {type(fault).__name__}: {fault}",
            )
        finally:
            try:
                await self.env.close()
            except Exception as fault:  # the episode is over and whole; what could not be freed is still said
                self.fault = self.fault or f"close: {type(fault).__name__}: {fault}"
                log.warning("task %s: %s", self.task.task_id, self.fault)
        log.info(
            "task %s: %s after %d steps, cost %g",
            self.task.task_id,
            self.stop_reason,
            len(self.steps),
            self._cost,
        )

    def stop(self, reason: StopReason, fault: str | None = None) -> None:
        self.stop_reason, self.fault = reason, fault

    @property
    def usage(self) -> Usage:
        sampled = [s.policy_logprobs for s in self.steps if s.policy_logprobs is not None]
        return Usage(
            calls=dict(self._calls),
            failed_calls=dict(self._failed),
            cost=self._cost,
            prompt_tokens=sum(len(p["prompt_ids"]) for p in sampled),
            sampled_tokens=sum(len(p["token_ids"]) for p in sampled),
            seconds=time.monotonic() - self._began,
        )

    def _see(self, observation: str | Sequence[Message]) -> None:
        if isinstance(observation, str):
            if observation:
                self.messages.append(Message(role="user", content=observation))
        else:
            self.messages.extend(observation)

    def _count(self, info: dict[str, Any]) -> None:
        self._calls.update(info.get("calls") or {})
        self._failed.update(info.get("failed_calls") or {})
        self._cost += float(info.get("cost") or 0.0)

    def _ending_of(self, action: dict[str, Any], raw: str | None, logprobs: dict[str, Any] | None) -> StopReason | None:
        """Endings that the action itself brings about, before the world sees it."""
        if action["type"] == "terminate":
            return StopReason.TERMINATED
        if logprobs is not None and logprobs.get("finish_reason") == "length":
            return StopReason.MAX_TOKENS
        if self._regex is not None and self._regex.search(raw or action.get("content") or ""):
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
