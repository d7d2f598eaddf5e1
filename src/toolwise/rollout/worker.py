"""`RLRolloutWorker`: runs one episode of one task with any policy and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.envs.base import BaseEnv
from toolwise.envs.tool_env import ToolEnv
from toolwise.messages import Message
from toolwise.protocols import AgentPolicy
from toolwise.rollout.request import AsyncRolloutRequest
from toolwise.rollout.termination import Termination
from toolwise.tools.base import BaseTool
from toolwise.types import StepData, Task
from toolwise.untrusted.patterns import compile_pattern


class RLRolloutWorker(AsyncRolloutRequest):
    """Runs one episode of `task_definition` with `agent_policy`.

    `run_episode` returns (steps, messages, ground truth); `stop_reason`, `usage`, `tool_rewards` and `fault` hold the
    rest of the outcome. Without `env` the environment is a `ToolEnv` over `tools`.
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
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(
            task_definition,
            agent_policy,
            env if env is not None else ToolEnv(task_definition, tools or {}),
            prompt=prompt,
            seed=seed,
            do_sample=do_sample,
            deadline_s=deadline_s,
            termination=build_termination(
                task_definition, max_episode_steps, max_tokens=max_tokens, max_invalid_in_a_row=max_invalid_in_a_row
            ),
        )

    async def run_episode(self) -> tuple[list[StepData], list[Message], Any]:
        await self.run()
        return self.steps, self.messages, self.task.ground_truth


def build_termination(
    task: Task, max_steps: int, *, max_tokens: int | None = None, max_invalid_in_a_row: int = 3
) -> Termination:
    """The termination rules for one episode of `task`."""
    regex = compile_pattern(task.termination_regex) if task.termination_regex else None
    return Termination(max_steps, max_tokens, regex, max_invalid_in_a_row)
