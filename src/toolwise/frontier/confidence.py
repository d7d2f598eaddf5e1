"""The confidence-threshold router: the model answers by itself and gets tools where its answer was unlikely.

    κ(x) = mean or minimum over the tokens of the greedy answer of log π(token)
    route(x) = ANSWER if κ(x) > τ, else tools                                  ANSWER: the first route without tools

τ meets the budget, as the learned router's threshold does: the value of ANSWER is κ(x), that of the tools is 0. Which κ
and which tools is decided on the tuning split (`tuning.py`): all tools at once, one tool route for every prompt, or the
one that the classifier prefers. It costs one answer per prompt more than a router that only reads the prompt.

Related: choosing between models of different size by the small one's confidence, Chen et al. 2026, arXiv 2602.22090.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from toolwise.agent.inference import TrainedRouter
from toolwise.frontier.router_comparison import RouteValues
from toolwise.routing.threshold import Floats, Ints
from toolwise.training.rollout_setup import build_scheduler
from toolwise.types import Rollout, Task

CONFIDENCE = "confidence"
MEASURES = ("mean log-prob of the answer", "lowest log-prob in the answer")
NOT_TAKEN = -1e3
"""Value of the routes that a candidate does not use; below any log-prob that matters."""


async def answer_confidences(routing: TrainedRouter, tasks: Sequence[Task]) -> Floats:
    """[rows, measures] of one greedy answer each, on the first route without tools."""
    scheduler = build_scheduler(routing.config, routing.policy, dict(routing.tools))
    decisions = [routing.decide(task, routing.routes.direct) for task in tasks]
    return confidences_of(await scheduler.roll_out(decisions, do_sample=False))


def confidences_of(rollouts: Sequence[Rollout]) -> Floats:
    """[rollouts, measures]; an answer that failed counts as the least likely of all."""
    confidences = np.full((len(rollouts), len(MEASURES)), np.nan)
    for index, rollout in enumerate(rollouts):
        logprobs = np.array([each for step in rollout.steps for each in step.tokens.logprobs], dtype=np.float64)
        if len(logprobs) and rollout.trainable:
            confidences[index] = logprobs.mean(), logprobs.min()
    return np.where(np.isnan(confidences), np.nanmin(confidences, axis=0, initial=0.0), confidences)


def confidence_candidates(
    confidences: Floats, columns: Sequence[str], tool_choices: Mapping[str, Ints], *, direct: int = 0
) -> dict[str, RouteValues]:
    """Each measure with each way to choose tools: description -> the column of each row, in `columns`. `direct` is the
    column of answers without tools: a row with that choice gets no tools."""
    rows = np.arange(len(confidences))
    candidates = {}
    for measure, confidence in zip(MEASURES, confidences.T, strict=True):
        for choice, column in tool_choices.items():
            values = np.full((len(rows), len(columns)), NOT_TAKEN)
            values[rows, column] = 0.0
            values[:, direct] = confidence
            candidates[f"{measure}, {choice}"] = RouteValues(values, samples=False, columns=tuple(columns))
    return candidates
