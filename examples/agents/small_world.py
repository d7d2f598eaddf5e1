"""The demo's world for an agent in any environment: its two tools as plain functions, and their specifications."""

import operator
import re

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression exactly.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Such as 417 * 38."}},
                "required": ["expression"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the documents at hand and gives back the text that fits the query best.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "Words to look for."}},
                "required": ["query"],
            },
        },
    },
]


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression exactly."""
    match = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    return str(OPERATORS[match[2]](int(match[1]), int(match[3]))) if match else "error: not an expression"


def search(query: str, documents: list[str]) -> str:
    """The document that shares the most words with the query."""
    words = set(query.lower().split())
    best = max(documents, key=lambda text: len(words & set(text.lower().strip(".").split())), default="")
    return best if words & set(best.lower().strip(".").split()) else "No results."


def documents_of(task: dict) -> list[str]:
    return task["tools_kwargs"]["search"]["create_kwargs"]["documents"]


def call_tool(name: str, arguments: dict, task: dict) -> str:
    try:
        if name == "calculator":
            return calculator(arguments["expression"])
        if name == "search":
            return search(arguments["query"], documents_of(task))
        return f"error: there is no tool {name}"
    except (KeyError, TypeError, AttributeError) as fault:
        return f"error: bad arguments: {fault}"
