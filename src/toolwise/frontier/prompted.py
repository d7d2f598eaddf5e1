"""The prompted router: the model itself is asked, in words, which route to take.

The question is added to the prompt, and the value of a route is the mean log-prob per token of the reply that names it,
normalized over the routes that apply. Nothing is sampled, so a threshold can meet any budget. Models prefer some
letters and words whatever the question is; the second variant of each wording subtracts that, measured on the tuning
split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolwise.agent.inference import TrainedRouter
from toolwise.envs.tool_env import tool_spec
from toolwise.errors import ContextFullError
from toolwise.frontier.router_comparison import RouteValues
from toolwise.messages import Message
from toolwise.routing.families import offered_tools
from toolwise.routing.prompts import allowed_tools
from toolwise.routing.threshold import Floats
from toolwise.thinking.thinking_model import ScoringRequest, ThinkingModel
from toolwise.training.components import thinking_model
from toolwise.types import Task

PROMPTED = "prompted"


@dataclass(frozen=True, slots=True)
class Wording:
    """`question` is followed by one `option` per route; the reply names a route by letter or by its tools."""

    name: str
    question: str
    option: str
    by_letter: bool


WORDINGS = (
    Wording(
        "by letter",
        "Do not answer yet. How would you find the answer? Reply with one letter.",
        "{letter}: {how}",
        by_letter=True,
    ),
    Wording(
        "by name",
        "Do not answer yet. Which of these do you need to find the answer? Reply with its name only.",
        "- {how}",
        by_letter=False,
    ),
)
NO_TOOLS = "no tools"


async def prompted_candidates(
    routing: TrainedRouter, tasks: Sequence[Task], tuning_rows: int
) -> dict[str, RouteValues]:
    """Each wording, as it is and without the model's preference for some replies on the first `tuning_rows` tasks."""
    model = thinking_model(routing.policy, routing.config.actor)
    candidates, applies = {}, applicable_routes(routing, tasks)
    for wording in WORDINGS:
        values = np.stack(await asyncio.gather(*(_route_logprobs(routing, model, task, wording) for task in tasks)))
        centred = values - values[:tuning_rows].mean(axis=0)
        for name, each in ((wording.name, values), (f"{wording.name}, without preferences", centred)):
            candidates[name] = RouteValues(_normalized(np.where(applies, each, -np.inf)))
    return candidates


def applicable_routes(routing: TrainedRouter, tasks: Sequence[Task]) -> NDArray[np.bool_]:
    """[rows, routes]"""
    masks = (routing.routes.applicable(routing.conditioning.families_of(task)) for task in tasks)
    return np.array([mask or (True,) * len(routing.routes) for mask in masks], dtype=bool)


async def _route_logprobs(routing: TrainedRouter, model: ThinkingModel, task: Task, wording: Wording) -> Floats:
    """[routes]; all equal if the prompt does not fit the context."""
    hows = _descriptions(routing, task)
    letters = [f"{chr(ord('A') + index % 26)}{index // 26 or ''}" for index in range(len(hows))]
    options = [wording.option.format(letter=letter, how=how) for letter, how in zip(letters, hows, strict=True)]
    tools = [tool_spec(tool, task) for tool in offered_tools(task, routing.tools).values()]
    chat = routing.policy.chat
    prefix = chat.start(ask(task.prompt, "\n".join([wording.question, *options])), tools or None)
    replies = [chat.encode(reply) for reply in (letters if wording.by_letter else hows)]
    try:
        (scores,) = await model.score([ScoringRequest(prefix, tuple(replies))], 1.0)
    except ContextFullError:
        return np.full(len(hows), -np.log(len(hows)))
    # The mean over tokens: replies differ in length.
    return _normalized(np.array([float(np.mean(score.logprobs)) for score in scores]))


def ask(prompt: Sequence[Message], question: str) -> list[Message]:
    """Adds `question` to the last message if it is the user's, since many templates refuse two user messages in a
    row; else as a message of its own."""
    *before, last = prompt
    if last.role != "user":
        return [*prompt, Message(role="user", content=question)]
    return [*before, last.model_copy(update={"content": f"{last.content or ''}\n\n{question}"})]


def _descriptions(routing: TrainedRouter, task: Task) -> list[str]:
    """The tools of each route, in words; with its name where another route has the same ones, by another model, say."""
    families = routing.conditioning.families_of(task)
    tools = [", ".join(allowed_tools(route, families, hard=True)) or NO_TOOLS for route in routing.routes]
    return [
        each if not routing.routes.own or tools.count(each) == 1 else f"{route.name} ({each})"
        for route, each in zip(routing.routes, tools, strict=True)
    ]


def _normalized(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
