"""A plain loop with the `openai` package."""

import json

from openai import OpenAI
from small_world import TOOLS, call_tool

MAX_TURNS = 6


def run(task: dict, base_url: str, api_key: str) -> None:
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = list(task["prompt"])
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model="toolwise", messages=messages, tools=TOOLS).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
            except ValueError:
                arguments = {}
            result = call_tool(call.function.name, arguments, task)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
