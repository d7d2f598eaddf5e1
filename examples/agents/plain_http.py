"""An agent without any package: a loop over HTTP, with the tools of the demo's world."""

import json
import urllib.request

from small_world import TOOLS, call_tool

MAX_TURNS = 6


def chat(base_url: str, api_key: str, messages: list[dict]) -> dict:
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    body = json.dumps({"model": "toolwise", "messages": messages, "tools": TOOLS}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]["message"]


def read_arguments(text: str) -> dict:
    try:
        return json.loads(text)
    except ValueError:
        return {}


def run(task: dict, base_url: str, api_key: str) -> None:
    messages = list(task["prompt"])
    for _ in range(MAX_TURNS):
        reply = chat(base_url, api_key, messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            return
        for call in reply["tool_calls"]:
            function = call["function"]
            result = call_tool(function["name"], read_arguments(function["arguments"]), task)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
