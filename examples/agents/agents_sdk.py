"""The OpenAI Agents SDK: its runner and its function tools."""

import small_world
from agents import Agent, ModelBehaviorError, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded
from openai import AsyncOpenAI

set_tracing_disabled(True)
MAX_TURNS = 6


async def run(task: dict, base_url: str, api_key: str) -> None:
    documents = small_world.documents_of(task)

    @function_tool
    def calculator(expression: str) -> str:
        """Evaluates an arithmetic expression exactly."""
        return small_world.calculator(expression)

    @function_tool
    def search(query: str) -> str:
        """Searches the documents at hand and gives back the text that fits the query best."""
        return small_world.search(query, documents)

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatCompletionsModel(model="toolwise", openai_client=client)
        agent = Agent(name="small world", model=model, tools=[calculator, search])
        try:
            await Runner.run(agent, task["prompt"], max_turns=MAX_TURNS)
        except (MaxTurnsExceeded, ModelBehaviorError):
            return  # the model's doing: the rollout is scored as it is
