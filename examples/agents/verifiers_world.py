"""The demo's world as an environment of the `verifiers` package: a taskset with its reward, and a harness.

`run` plays one task of it. verifiers renders the prompts itself and asks for tokens (`/inference/v1/generate`), so
every token that the model sees is the environment's own.
"""

import json
import os
import urllib.request
from collections.abc import Iterable

import verifiers.v1 as vf
from openai import AsyncOpenAI
from renderers import DefaultRendererConfig
from small_world import TOOLS, call_tool
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

__all__ = ["LoopHarness", "SmallWorldTaskset"]
MAX_TURNS = 6
KEY_VARIABLE = "SMALL_WORLD_API_KEY"


class SmallWorldData(vf.TaskData):
    row: dict
    """The task as Toolwise has it."""


class SmallWorldTask(vf.Task[SmallWorldData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        replies = [message.content or "" for message in trace.assistant_messages]
        return float(bool(replies) and replies[-1].strip() == f"Answer: {self.data.row['ground_truth']}")


class SmallWorldTaskset(vf.Taskset[SmallWorldTask]):
    def load(self) -> Iterable[SmallWorldTask]:
        return []  # tasks come from the run


class LoopHarness(vf.Harness[vf.HarnessConfig]):
    """A loop with the world's tools, in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        messages = list(data.row["prompt"])
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(MAX_TURNS):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, tools=TOOLS)
                reply = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                if not reply.tool_calls:
                    break
                for call in reply.tool_calls:
                    try:
                        arguments = json.loads(call.function.arguments)
                    except ValueError:
                        arguments = {}
                    result = call_tool(call.function.name, arguments, data.row)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return ProgramResult(0, "", "")


def model_folder(base_url: str, api_key: str) -> str:
    """The folder of the tokenizer, which verifiers loads."""
    request = urllib.request.Request(f"{base_url}/models", headers={"authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)["data"][0]["root"]


ENV = None


def environment() -> vf.SingleAgentEnv:
    global ENV
    if ENV is None:
        agent = vf.AgentConfig(harness={"id": "verifiers_world"}, runtime=SubprocessConfig())
        ENV = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "verifiers_world"}, agent=agent))
    return ENV


async def run(task: dict, base_url: str, api_key: str) -> dict:
    os.environ[KEY_VARIABLE] = api_key
    client = vf.TrainClientConfig(
        base_url=base_url,
        api_key_var=KEY_VARIABLE,
        renderer=DefaultRendererConfig(tool_parser="qwen3"),
        renderer_model_name=model_folder(base_url, api_key),
    )
    env = environment()
    async with env.serving():
        data = SmallWorldData(prompt=task["prompt"][-1]["content"], row=task)
        episode = await env.run_episode(SmallWorldTask(data), vf.ModelContext("toolwise", client))
    (trace,) = episode.traces
    if trace.errors:
        raise RuntimeError(trace.errors[0].message)
    return {"score": trace.reward, "metrics": {"turns": float(len(trace.assistant_messages))}}
