"""What the pages of a group show: its rollouts as a tree of messages, and its steps by the state they were taken in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolwise.training.records import RolloutRecord
from toolwise.training.trackers.conversation import conversation_turns, shorten
from toolwise.view.rollout_page import brief, message_view
from toolwise.view.rollout_store import NotFoundError, RunStore

MAX_SIBLINGS = 256
MAX_NODE_TEXT = 1500


def group_page(store: RunStore, file: str, group_id: str) -> dict[str, Any]:
    """The tree of the group's messages: a prefix that rollouts share is there once, each leaf is a rollout."""
    rows = store.group(file, group_id)
    if not rows:
        raise NotFoundError(f"{file} of {store.name} has no group {group_id!r:.120}")
    shown = rows[:MAX_SIBLINGS]
    root: dict[str, Any] = {"children": {}, "leaves": []}
    for row, record in zip(shown, store.records(shown), strict=True):
        node = root
        for message in record.messages:
            key = _key(message)
            node = node["children"].setdefault(key, {"message": message, "children": {}, "leaves": []})
        returns = [step.return_to_go for step in record.steps if step.return_to_go is not None]
        node["leaves"].append(brief(row) | {"return": returns[0] if returns else None})
    return {
        "group_id": group_id,
        "file": file,
        "task_id": rows[0]["task_id"],
        "question": rows[0]["question"],
        "total": len(rows),
        "rollouts": [brief(row) for row in shown],
        "tree": _chains(root),
    }


def _key(message: Mapping[str, Any]) -> str:
    """Equal for messages that say the same; names of calls are left out."""
    view = message_view(message, limit=None)
    return json.dumps([view, [{**call, "id": ""} for call in view.pop("calls")]])


def _chains(root: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with messages that always follow each other in one node; without recursion, since it may be deep."""
    result: dict[str, Any] = {"messages": [], "leaves": list(root["leaves"]), "children": []}
    left = [(root, result)]
    while left:
        node, view = left.pop()
        for child in node["children"].values():
            messages, current = [child["message"]], child
            while len(current["children"]) == 1 and not current["leaves"]:
                (current,) = current["children"].values()
                messages.append(current["message"])
            below = {
                "messages": [message_view(message, MAX_NODE_TEXT) for message in messages],
                "leaves": list(current["leaves"]),
                "children": [],
            }
            view["children"].append(below)
            left.append((current, below))
    return result


def anchor_page(store: RunStore, file: str, group_id: str) -> dict[str, Any]:
    """All steps of the group by state: what was done in it, its return and its advantage."""
    rows = store.group(file, group_id)
    if not rows:
        raise NotFoundError(f"{file} of {store.name} has no group {group_id!r:.120}")
    states: dict[int, list[dict[str, Any]]] = {}
    shown = rows[:MAX_SIBLINGS]
    for row, record in zip(shown, store.records(shown), strict=True):
        parts = {step.step: step.parts for step in store.tokens(row)} if row["trained_on"] else {}
        actions = _actions(record)
        for index, step in enumerate(record.steps):
            if step.anchor is None:
                continue
            own = parts.get(index, {})
            states.setdefault(step.anchor, []).append(
                brief(row)
                | {
                    "index": index,
                    "advantage": step.advantage,
                    "return_to_go": step.return_to_go,
                    "base_reward": step.base_reward,
                    "parts": {name: float(values[0]) for name, values in own.items() if len(values)},
                }
                | actions[index]
            )
    ordered = sorted(states.items(), key=lambda state: -len(state[1]))
    found = [{"anchor": anchor, "steps": steps} for anchor, steps in ordered]
    alone = sum(len(steps) == 1 for steps in states.values())
    return {"group_id": group_id, "file": file, "question": rows[0]["question"], "states": found, "alone": alone}


def _actions(record: RolloutRecord) -> list[dict[str, Any]]:
    """For each step what the agent saw last and what it did, shortened. Steps are counted from the end, because a
    prompt may contain assistant messages."""
    acted = [index for index, message in enumerate(record.messages) if message.get("role") == "assistant"]
    acted = acted[len(acted) - len(record.steps) :] if len(acted) >= len(record.steps) else acted
    found = []
    for number in range(len(record.steps)):
        if number >= len(acted):
            found.append({"saw": "", "did": ""})
            continue
        index = acted[number]
        saw = record.messages[index - 1 : index] if index else []
        found.append({"saw": _one_line(saw), "did": _one_line(record.messages[index : index + 1])})
    return found


def _one_line(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of messages in one line, from the beginning of each."""
    bounded = []
    for message in messages:
        content = message.get("content")
        bounded.append({**message, "content": content[:MAX_NODE_TEXT]} if isinstance(content, str) else message)
    return shorten(" ".join(turn.text for turn in conversation_turns(bounded)), 200)
