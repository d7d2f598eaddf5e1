"""Task arguments for function tools, from a data row to the function, separate from the model's arguments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import RunConfig
from toolwise.data.rows import read_task
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import DataError
from toolwise.messages import Message, ToolCall
from toolwise.tools.catalog import build_tools, check_task_arguments
from toolwise.training.rollout_setup import build_scheduler
from toolwise.training.run import assemble
from toolwise.training.tasks import check_task_tools
from toolwise.types import RouteDecision, Task


def price(article: str, currency: str = "EUR", shelf: dict[str, float] | None = None) -> str:
    """The price of an article."""
    return f"{(shelf or {}).get(article, 0)} {currency}"


def a_task(**kwargs: Any) -> Task:
    return Task(task_id="t", prompt=[Message(role="user", content="?")], tools_kwargs={"price": kwargs})


class Buyer:
    """Asks for the price of tea, and repeats it."""

    specs: Any = None

    async def get_action(self, observation: Any, available_tools_specs: Any = None) -> Any:
        self.specs = available_tools_specs
        if len(observation) > 1:
            return {"type": "text", "content": observation[-1].content}, None, None, None
        return {"type": "tool_call", "name": "price", "arguments": {"article": "tea"}}, None, None, None


SHELF = {"create_kwargs": {"shelf": {"tea": 3.5}}, "execute_kwargs": {"currency": "CHF"}}


@pytest.mark.parametrize("isolate", [True, False])
def test_a_row_of_data_reaches_a_plain_function(isolate: bool) -> None:
    row = {"prompt": "How much is tea?", "extra_info": {"tools_kwargs": {"price": SHELF}}}
    task = read_task(Path("rows"), 0, row, {})
    tools = build_tools([{"name": price, "isolate": isolate}])
    policy = Buyer()
    scheduler = build_scheduler(RunConfig(), policy, tools)
    (rollout,) = asyncio.run(scheduler.roll_out([RouteDecision(task, "g", 1, 0, task.prompt)]))
    assert rollout.messages[-1].content == "3.5 CHF"
    assert list(policy.specs[0]["function"]["parameters"]["properties"]) == ["article"]


def test_the_model_cannot_give_what_the_task_gives() -> None:
    async def call() -> str:
        env = ToolEnv(a_task(**SHELF), build_tools([price]))
        await env.reset()
        given = ToolCall(name="price", arguments={"article": "tea", "currency": "USD"})
        messages, _, _, info = await env.step({"tool_calls": [given]})
        await env.close()
        assert info["failed_calls"] == {"bad_arguments": 1}
        return messages[0].content or ""

    assert "currency" in asyncio.run(call())


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"execute_kwargs": {"colour": "red"}}, "takes no argument 'colour': it takes article, currency, shelf"),
        ({"create_kwargs": {"currency": 3}}, "argument 'currency': Input should be a valid string, got 3"),
        ({"calc_reward_kwargs": {"x": 1}}, "calc_reward_kwargs: function tools accept only"),
    ],
)
def test_an_argument_that_does_not_fit_is_told_before_the_run(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=r"task t: tools_kwargs\.price") as error:
        assemble(RunConfig(), tasks=[a_task(**kwargs)], tools=[price], reward="env")
    assert words in str(error.value)


def haggle(article: str) -> str:
    """Asks for less."""
    return article


def test_a_tool_that_the_run_does_not_have_is_told_before_the_run() -> None:
    misspelt = Task(task_id="t", prompt=[], tools_kwargs={"prise": SHELF})
    told = r"task t: tools_kwargs\.prise: the run has no tool 'prise'"
    with pytest.raises(DataError, match=rf"{told}; did you mean 'price'\?"):
        assemble(RunConfig(), tasks=[misspelt], tools=[price, haggle], reward="env")
    with pytest.raises(DataError, match=f"{told}; it has haggle"):
        check_task_arguments(misspelt, build_tools([haggle]))


def test_a_tool_that_the_task_is_not_offered_may_be_given_to() -> None:
    task = a_task(**SHELF).model_copy(update={"tools": ["haggle"]})
    check_task_arguments(task, build_tools([price, haggle]))


def test_a_run_without_tools_and_an_environment_with_its_own_take_any_task() -> None:
    task = a_task(execute_kwargs={"colour": "red"})
    check_task_arguments(task, {})
    check_task_arguments(task, build_tools([haggle]), env_has_tools=True)
    for env in ("gsm8k", "file.py:Shop"):
        check_task_tools(task, build_tools([haggle]), env=env)
    with pytest.raises(DataError, match="the run has no tool 'price'"):
        check_task_tools(task, build_tools([haggle]), env="tools")


def test_a_held_out_tool_may_be_given_to() -> None:
    config = RunConfig.model_validate({"multi_turn": {"held_out_tools": ["price"]}, "data": {"batch_size": 1}})
    run = assemble(config, tasks=[a_task(**SHELF)], validation_tasks=[], tools=[price, haggle], reward="env")
    assert run.batches.tasks[0].tools == ["haggle"]
    run.close()
