"""GSM8K environment: the documented example runs, and the oracle is unavailable unless enabled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolwise.envs.gsm8k import Gsm8kEnv
from toolwise.errors import DataError
from toolwise.messages import Message, ToolCall
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.rollout.worker import RLRolloutWorker
from toolwise.tools import Gsm8kTool, build_tools
from toolwise.types import StopReason, Task

CHECK = ToolCall(id="c", name="calc_gsm8k_reward", arguments={"answer": "8"})


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def an_env(**options: Any) -> Gsm8kEnv:
    return Gsm8kEnv(Gsm8kTool(), {"question": "What is 3 + 5?", "answer": "8"}, **options)


@pytest.mark.parametrize(("answer", "reward"), [("8", 1.0), ("so it is #### 8", 1.0), ("9", 0.0), ("", 0.0)])
def test_the_documented_example(answer: str, reward: float) -> None:
    async def episode() -> None:
        env = an_env()
        assert await env.reset() == "What is 3 + 5?"
        observation, given, done, _ = await env.step(answer)
        assert (list(observation), given, done) == ([], reward, True)
        assert await env.final_rewards() == {"calc_gsm8k_reward": reward}
        await env.close()

    run(episode())


def test_a_disabled_oracle_is_neither_visible_nor_callable() -> None:
    async def episode() -> None:
        env = an_env(tools=build_tools(["calculator"]))
        await env.reset()
        assert [spec["function"]["name"] for spec in env.tool_specs()] == ["calculator"]
        messages, _, done, info = await env.step({"type": "tool_call", "tool_calls": [CHECK]})
        assert messages[0].content == "error: there is no tool 'calc_gsm8k_reward'; tools: calculator"
        assert (done, info["is_action_valid"], info["cost"]) == (False, False, 1)
        await env.close()

    run(episode())


def test_with_the_oracle_an_agent_may_ask_and_try_again() -> None:
    async def episode() -> None:
        env = an_env(oracle=True)
        await env.reset()
        wrong = ToolCall(name="calc_gsm8k_reward", arguments={"answer": "7"})
        messages, _, done, _ = await env.step({"type": "tool_call", "tool_calls": [wrong]})
        assert (messages[0].content, done) == ("Your answer is wrong.", False)
        _, reward, done, _ = await env.step({"type": "text", "content": "#### 8"})
        assert (reward, done) == (1.0, True)
        await env.close()

    run(episode())


def test_the_tool_lives_once_an_episode() -> None:
    tool = Gsm8kTool()

    async def episode() -> None:
        env = Gsm8kEnv(tool, {"question": "?", "answer": "1"})
        await env.reset()
        assert len(tool._instances) == 1
        await env.close()
        await env.close()
        assert tool._instances == {}

    run(episode())


def test_a_sample_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match="the sample has no answer"):
        Gsm8kEnv(Gsm8kTool(), {"question": "?"})


@pytest.mark.parametrize(
    "more",
    [
        {"ground_truth": "8"},
        {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "8"}}}},
        {"interaction_kwargs": {"ground_truth": "#### 8"}},
    ],
)
def test_a_row_of_the_dataset_is_rolled_out(more: dict[str, Any]) -> None:
    task = Task(task_id="t", prompt=[Message(role="user", content="What is 3 + 5?")], **more)
    worker = RLRolloutWorker(task, ScriptedPolicy(["#### 8"]), env=Gsm8kEnv.from_task(task))
    steps, messages, _ = run(worker.run_episode())
    assert [m.role for m in messages] == ["user", "assistant"]
    assert steps[0].base_reward == 1.0
    assert worker.stop_reason is StopReason.ANSWERED
    assert worker.tool_rewards == {"calc_gsm8k_reward": 1.0}


def test_a_row_without_a_ground_truth_is_named() -> None:
    with pytest.raises(DataError, match="task t has no ground truth"):
        Gsm8kEnv.from_task(Task(task_id="t", prompt=[]))
