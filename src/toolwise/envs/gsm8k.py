"""GSM8K as an environment: a question, a tool that checks answers, and an episode that ends with the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolwise.concurrency.limits import Gate
from toolwise.envs.tool_env import ToolEnv, validate_reward
from toolwise.errors import DataError
from toolwise.messages import Message
from toolwise.tools.base import BaseTool
from toolwise.tools.builtin.gsm8k import Gsm8kTool
from toolwise.types import Task


class Gsm8kEnv(ToolEnv):
    """One problem. `sample` has its `question` and `answer`; `tool` is created with the answer.

    Text ends the episode: the tool checks it, and the step's reward is 1 or 0. The tool is an oracle, so the agent can
    call it only with `oracle=True`; `tools` are other tools to offer, such as a calculator.
    """

    def __init__(
        self,
        tool: BaseTool,
        sample: Mapping[str, Any],
        *,
        tools: Mapping[str, BaseTool] | None = None,
        oracle: bool = False,
        tool_timeout_s: float = 30.0,
        gates: Mapping[str, Gate] | None = None,
    ) -> None:
        if sample.get("answer") is None:
            raise DataError("gsm8k: the sample has no answer; give {'question': …, 'answer': …}")
        self.tool = tool
        self.sample = sample
        checker = {"create_kwargs": {"ground_truth": sample["answer"]}}
        task = Task(task_id="gsm8k", prompt=[], tools_kwargs={tool.name: checker})
        others = {name: other for name, other in (tools or {}).items() if name != tool.name}
        oracle_tool = {tool.name: tool}
        super().__init__(
            task,
            others | oracle_tool if oracle else others,
            unseen=None if oracle else oracle_tool,
            tool_timeout_s=tool_timeout_s,
            gates=gates,
        )

    @classmethod
    def from_task(
        cls,
        task: Task,
        *,
        tool: BaseTool | None = None,
        tools: Mapping[str, BaseTool] | None = None,
        oracle: bool = False,
        tool_timeout_s: float = 30.0,
        gates: Mapping[str, Gate] | None = None,
    ) -> Gsm8kEnv:
        """The problem of a dataset row, whose prompt already contains the question."""
        tool = tool if tool is not None else Gsm8kTool()
        created = task.tools_kwargs.get(tool.name, {}).get("create_kwargs", {})
        answers = (created.get("ground_truth"), task.ground_truth, task.interaction_kwargs.get("ground_truth"))
        answer = next((answer for answer in answers if answer is not None), None)
        if answer is None:
            raise DataError(f"gsm8k: task {task.task_id} has no ground truth; add reward_model.ground_truth to its row")
        sample = {"question": "", "answer": answer}
        return cls(tool, sample, tools=tools, oracle=oracle, tool_timeout_s=tool_timeout_s, gates=gates)

    async def reset(self) -> str:
        await super().reset()
        return str(self.sample.get("question") or "")

    async def step(self, action: Any) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        if isinstance(action, Mapping) and action.get("tool_calls"):
            return await super().step(action)
        answer = action if isinstance(action, str) else str(action.get("content") or "")
        _, reward, info = await self._with_timeout(
            self.tool.execute(self._instances[self.tool.name], {"answer": answer})
        )
        verdict = info.get("reward", reward)  # `reward` itself is only the penalty for asking again
        return [], validate_reward(verdict), True, {**info, "is_action_valid": True}
